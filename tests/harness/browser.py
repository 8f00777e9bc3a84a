"""A browser for tests of pages: Debian's chromium, headless, one for all tests of a worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.federation import RUN_S

WIDE, NARROW = 1280, 360


class Browser:
    """Looks at pages as people do."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver

    def look(self, page: Path, *, width: int, dark: bool = False, printed: bool = False) -> None:
        """Opens a page in a window of this width, in CSS pixels."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        media = {"media": "print" if printed else "screen", "features": [scheme]}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self._driver.get(page.resolve().as_uri())

    def open(self, url: str) -> None:
        """Opens an address."""
        self._driver.get(url)

    def type(self, name: str, text: str) -> None:
        """Types into a field."""
        self._driver.find_element("name", name).send_keys(text)

    def click(self, text: str) -> None:
        """Clicks a link or a button by its text. Returns when the next page is there."""
        path = f'//*[self::a or self::button][normalize-space()="{text}"]'
        self._driver.find_element("xpath", path).click()

    @property
    def text(self) -> str:
        """The words that people see."""
        # An element may go away at any time, because pages load themselves again.
        return str(self._driver.execute_script("return document.body?.innerText ?? ''"))

    def photograph(self, path: Path) -> None:
        """Saves a picture of the whole page."""
        height = "return document.documentElement.scrollHeight + 150"
        self._driver.set_window_size(WIDE, self._driver.execute_script(height))
        self._driver.save_screenshot(path)

    @property
    def overflow(self) -> int:
        """By how many pixels the page is wider than its window."""
        script = "return document.documentElement.scrollWidth - window.innerWidth"
        return int(self._driver.execute_script(script))

    @property
    def background(self) -> str:
        return str(
            self._driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        )

    @property
    def complaints(self) -> list[str]:
        """What the console says, such as that the policy of the page was broken."""
        return [str(each) for each in self._driver.get_log("browser")]

    @property
    def findings(self) -> list[str]:
        """Serious and critical findings of axe-core."""
        from axe_core_python.selenium import Axe

        found = Axe().run(self._driver)
        assert found["passes"], "axe-core looked at nothing"
        return [
            f"{each['id']}: {each['nodes'][0]['html'][:200]}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts the browser; skips the test if there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    pytest.importorskip("axe_core_python", reason="axe-core-python is not installed")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    # The browser gets as little of a busy machine as the other programs of a test, so its scripts have
    # the time that these have, instead of the 30 s of the driver.
    found.set_script_timeout(RUN_S)
    try:
        yield Browser(found)
    finally:
        found.quit()

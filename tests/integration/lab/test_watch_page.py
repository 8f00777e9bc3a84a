"""The page of `vfl watch` in a browser, where there is one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_core_python.selenium import Axe
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.harness.waiting import wait_until
from tests.integration.lab.test_watch import HOSTILE, add, make, metrics, said, served

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")

pytestmark = pytest.mark.skipif(not (BROWSER and DRIVER), reason="no Chromium with its driver")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = str(BROWSER)
    for each in OPTIONS:
        options.add_argument(each)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = Chrome(options=options, service=Service(DRIVER))
    try:
        yield found
    finally:
        found.quit()


def text(browser: Chrome, place: str) -> str:
    found: str = browser.execute_script(f"return document.getElementById('{place}').textContent")
    return found


def run(browser: Chrome, script: str) -> Any:
    return browser.execute_script(script)


def emulate(browser: Chrome, width: int, scheme: str) -> None:
    facts = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", facts)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def test_the_page_shows_text_as_text_and_goes_on_by_itself(browser: Chrome, tmp_path: Path) -> None:
    bank = make(tmp_path / "run")
    add(bank / "metrics.jsonl", metrics(1, auc=0.5, **{HOSTILE: 1.0}) + metrics(2, auc=0.75))
    add(bank / "metrics.jsonl", metrics(3, **{HOSTILE: 2.0}))
    add(
        bank / "log.jsonl",
        said("ready", "ready") + said("note", HOSTILE) + said("waiting", missing=["shop"]),
    )
    with served(tmp_path / "run") as (link, _):
        browser.get(link)
        # The token is in the address no longer.
        wait_until(lambda: browser.current_url, lambda found: "token" not in found)
        wait_until(lambda: text(browser, "state"), lambda found: found == "waiting")
        assert text(browser, "run") == "run"
        assert "awaited: late" in text(browser, "who")
        assert "round 3 of 9" in text(browser, "phases")
        # Neither an element nor a script has come of a name.
        assert "<img src=x" in text(browser, "log")
        assert run(browser, "return document.querySelectorAll('img, body script').length") == 0
        figures = browser.find_elements(By.CSS_SELECTOR, "figure svg[role=img]")
        names = [str(each.get_attribute("aria-label")) for each in figures]
        assert names[0] == "auc of splitnn by round: validation 0.7500 at round 2"
        assert names[1].startswith("<img src=x onerror=alert(1)>")
        said_before = text(browser, "said")
        assert said_before == "waiting, splitnn round 3 of 9"
        for width in (1280, 360):
            for scheme in ("light", "dark"):
                emulate(browser, width, scheme)
                wide = run(browser, "return document.documentElement.scrollWidth")
                assert wide <= width
                found = Axe().run(browser)["violations"]
                assert [(each["id"], each["impact"]) for each in found] == []
        # What comes later is there without a click.
        add(bank / "metrics.jsonl", metrics(4, auc=0.875))
        wait_until(lambda: text(browser, "phases"), lambda found: "round 4 of 9" in found)
        wait_until(lambda: text(browser, "values"), lambda found: "0.8750" in found)
        shutil.rmtree(tmp_path / "run")
        wait_until(lambda: text(browser, "state"), lambda found: found == "no run yet")
        assert text(browser, "log") == ""
        assert browser.get_log("browser") == []
    wait_until(lambda: text(browser, "connection"), lambda found: "The watch has ended" in found)

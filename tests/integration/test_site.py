"""The site of the documentation: it builds without a warning, asks no other machine, and its pages are short."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
DOCS = REPO / "docs"
DECISIONS = DOCS / "contributing" / "decisions"
PAGES = sorted(set(DOCS.rglob("*.md")) - set(DECISIONS.glob("archive/*")))
HOW_TO = [page for page in PAGES if page.is_relative_to(DOCS / "how-to")]
NOT_REFERENCE = [page for page in PAGES if not page.is_relative_to(DOCS / "reference")]
MOST_WORDS_OF_A_TASK, MOST_WORDS, MOST_COLUMNS, MOST_FILES = 1_700, 2_500, 125, 15
BUILD_S = 300
ELSEWHERE = re.compile(r"(?:https?:)?//", re.IGNORECASE)
LOADS = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
}
NEEDS = ("mkdocs", "material", "mkdocstrings", "mkdocs_click")
LACKS = [name for name in NEEDS if importlib.util.find_spec(name) is None]


def named(path: Path) -> str:
    return str(path.relative_to(DOCS))


class Loaded(HTMLParser):
    """What a browser fetches to show a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        address = dict(attrs).get(LOADS.get(tag, ""))
        if address:
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if LACKS:
        pytest.skip(f"{', '.join(LACKS)} not installed: the extra docs")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=REPO,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    return folder


def test_every_page_is_in_the_site(site: Path) -> None:
    wanted = {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in PAGES}
    assert wanted <= {page.relative_to(site).as_posix() for page in site.rglob("*.html")}


def test_no_page_asks_another_machine(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)  # and the page for addresses that are none
    seen = 0
    for page in pages:
        loaded = Loaded(page.read_text()).found
        seen += len(loaded)
        assert [address for address in loaded if ELSEWHERE.match(address)] == [], page.name
    assert seen > len(pages)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), (
            sheet.name
        )


def test_a_link_out_of_the_pages_leads_to_a_file_or_says_its_path(site: Path) -> None:
    page = (site / "how-to" / "plugins" / "package.html").read_text()
    assert "<code>examples/plugin</code>" in page
    assert 'href="../../../' not in page


def test_a_figure_of_a_result_is_shown(site: Path) -> None:
    page = (site / "results" / "fedonce.html").read_text()
    (source,) = re.findall(r'src="([^"]*fedonce-uji\.png)"', page)
    figure = site / "results" / source
    assert figure.read_bytes() == (REPO / "benchmarks" / "results" / figure.name).read_bytes()


@pytest.mark.parametrize("page", HOW_TO, ids=named)
def test_a_guide_is_one_task(page: Path) -> None:
    assert len(page.read_text().split()) < MOST_WORDS_OF_A_TASK


@pytest.mark.parametrize("page", NOT_REFERENCE, ids=named)
def test_no_page_is_long(page: Path) -> None:
    assert len(page.read_text().split()) <= MOST_WORDS


@pytest.mark.parametrize(
    "page", [*NOT_REFERENCE, REPO / "README.md"], ids=lambda page: page.relative_to(REPO).as_posix()
)
def test_lines_of_text_are_short(page: Path) -> None:
    """Rows of tables, and blocks, cannot be broken."""
    text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    long = [
        line
        for line in text.splitlines()
        if len(line) > MOST_COLUMNS and not line.lstrip().startswith("|")
    ]
    assert long == []


def test_a_folder_of_tasks_can_be_looked_over() -> None:
    folders = {page.parent for page in HOW_TO}
    assert len(folders) > 5
    assert [folder.name for folder in folders if len(list(folder.iterdir())) > MOST_FILES] == []

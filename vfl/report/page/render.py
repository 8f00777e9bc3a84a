"""Makes HTML of a page's parts: one file, without scripts and without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vfl.report.page.tables import Part, Tile
from vfl_common.files import private_file
from vfl_common.text import clean

FILE = "report.html"
# Characters of a name, and of a sentence.
_LONGEST, _SENTENCE = 80, 1_000
# Rows of a table.
_MOST_ROWS = 200


@dataclass
class Page:
    """A page. ``lead``: sentences that say it all in short."""

    title: str
    subtitle: str
    lead: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    made: str = ""


def render(page: Page) -> str:
    """Returns the page as HTML. All words are escaped, and cut where nobody would read on."""
    css = _style()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    # The stylesheet is ours.
    return (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            parts=[each for each in page.parts if each.there],
            css=Markup(css),  # noqa: S704
            policy=policy,
        )
    )


def write(page: Page, path: Path) -> Path:
    """Writes a page, for its owner only: it shows scores of people. Returns its path. Raises
    InputError.
    """
    with private_file(path) as file:
        file.write(render(page).encode())
    return path


def word(text: object) -> str:
    """Returns a name or a cell: one line of printable characters, of a length that can be read."""
    return _cut(str(text), _LONGEST)


def sentence(text: object) -> str:
    return _cut(str(text), _SENTENCE)


def _cut(text: str, most: int) -> str:
    found = clean(text, most + 1)
    return found if len(found) <= most else f"{found[: most - 1]}…"


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("vfl.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals["most"] = _MOST_ROWS
    found.filters |= {"word": word, "sentence": sentence}
    return found


@cache
def _style() -> str:
    return files("vfl.report.page").joinpath("templates/page.css").read_text(encoding="utf-8")

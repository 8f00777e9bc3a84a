"""Renders a page as HTML: one file without scripts and without external resources."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vfl_common.files import private_file
from vfl_common.text import clean
from vfl_lab.report.page.tables import PageSection, Tile

FILE = "report.html"
# Maximum number of characters of a name and of a sentence.
_LONGEST, _SENTENCE = 80, 1_000
# Maximum number of rows of a table.
_MAX_ROWS = 200


@dataclass
class ReportPage:
    """A page. ``lead``: sentences that summarize it."""

    title: str
    subtitle: str
    lead: list[str] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    parts: list[PageSection] = field(default_factory=list)
    made: str = ""


def render(page: ReportPage) -> str:
    """Returns the page as HTML. All texts are escaped, and cut if they are too long."""
    css = _read_style()
    digest = base64.b64encode(hashlib.sha256(css.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    # The stylesheet is ours.
    return (
        _make_environment()
        .get_template("page.html")
        .render(
            page=page,
            parts=[part for part in page.parts if part.there],
            css=Markup(css),  # noqa: S704
            policy=policy,
        )
    )


def write(page: ReportPage, path: Path) -> Path:
    """Writes a page that only its owner can read, because it shows scores of people.

    Returns its path. Raises InputError.
    """
    with private_file(path) as file:
        file.write(render(page).encode())
    return path


def cut_word(text: object) -> str:
    """Returns a name or a cell as one line of printable characters of limited length."""
    return _cut(str(text), _LONGEST)


def cut_sentence(text: object) -> str:
    """Returns a sentence as one line of printable characters of limited length."""
    return _cut(str(text), _SENTENCE)


def _cut(text: str, max_characters: int) -> str:
    cleaned = clean(text, max_characters + 1)
    return cleaned if len(cleaned) <= max_characters else f"{cleaned[: max_characters - 1]}…"


@cache
def _make_environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vfl_lab.report.page", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["most"] = _MAX_ROWS
    environment.filters |= {"word": cut_word, "sentence": cut_sentence}
    return environment


@cache
def _read_style() -> str:
    return files("vfl_lab.report.page").joinpath("templates/page.css").read_text(encoding="utf-8")

"""Finds the generated parts of a page, and fills them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "reference"
README = DOCS.parent / "README.md"
_PART = re.compile(
    r"<!-- (api|keys|commands|errors|exchanges|figures|packages|seams) ?(\S*) -->\n.*?<!-- /\1 -->",
    re.DOTALL,
)


def pages() -> list[Path]:
    """Returns the pages that may have generated parts."""
    return [README, *sorted(DOCS.rglob("*.md"))]


def filled(text: str) -> str:
    """Returns a page's text with all of its generated parts made anew."""
    return _PART.sub(
        lambda part: (
            f"{opening(part[1], part[2])}\n\n{made(part[1], part[2])}\n<!-- /{part[1]} -->"
        ),
        text,
    )


def opening(kind: str, of: str) -> str:
    """Returns the comment with which a part begins."""
    return f"<!-- {kind} {of} -->" if of else f"<!-- {kind} -->"


def parts(text: str) -> list[tuple[str, str]]:
    """Returns (kind, of what) of every generated part of a page."""
    return [(part[1], part[2]) for part in _PART.finditer(text)]


def made(kind: str, of: str) -> str:
    """Makes one part, which ends with a line break."""
    from scripts.reference import api, commands, errors, exchanges, keys, tree

    if kind == "keys":
        return table(keys.HEADINGS, keys.rows(named(of)))
    if kind == "commands":
        program = {"vfl": "vfl", "vfl_party": "vfl-party", "vfl_server": "vfl-server"}
        return commands.page(program[of.partition(".")[0]], named(of))
    if kind == "figures":
        text: str = named(of)()
        return text
    if kind == "packages":
        return table(tree.PACKAGE_HEADINGS, tree.packages(of))
    if kind == "seams":
        return table(tree.SEAM_HEADINGS, tree.seams())
    if kind == "api":
        return table(api.HEADINGS, api.rows())
    if kind == "errors":
        return table(errors.HEADINGS, errors.rows())
    return table(exchanges.HEADINGS, exchanges.rows())


def named(place: str) -> Any:
    """Returns the object of ``module:name``."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

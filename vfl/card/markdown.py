"""Markdown of texts that somebody else chose: none of them becomes a tag, a link or a heading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vfl_common.text import LINE, clean, shortened

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$^=])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"})
# What a renderer takes for an address, and makes a link of, without brackets.
_ADDRESS = re.compile(r"://|www\.", re.IGNORECASE)
_TICKS = re.compile(r"`+")


def prose(text: str) -> str:
    """Returns a text that stands in a sentence or a cell as it is."""
    text = _SPECIAL.sub(r"\\\1", clean(text, LINE)).translate(_ENTITIES)
    return _ADDRESS.sub(lambda found: found[0].replace(":", "&#58;").replace(".", "&#46;"), text)


def code(name: str) -> str:
    """Returns a name, or the beginning of a long one, as code; it may stand in a cell."""
    name = shortened(clean(name, LINE)).replace("|", "\\|")
    if not name:
        return ""
    most = max((len(found) for found in _TICKS.findall(name)), default=0)
    fence = "`" * (most + 1)
    # A tick at an end would belong to the fence.
    pad = " " if name.startswith("`") or name.endswith("`") else ""
    return f"{fence}{pad}{name}{pad}{fence}"


def block(text: str, language: str) -> str:
    """Returns a text of several lines as a block of code."""
    most = max((len(found) for found in _TICKS.findall(text)), default=0)
    fence = "`" * max(3, most + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of cells that are Markdown already; '' without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines])

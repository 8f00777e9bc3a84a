"""Escapes untrusted texts for Markdown: none of them becomes a tag, a link or a heading."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from vfl_common.text import LINE, clean, shorten

_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|~$^=])")
_ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "@": "&#64;"})
# Texts that a renderer turns into links without brackets.
_ADDRESS = re.compile(r"://|www\.", re.IGNORECASE)
_TICKS = re.compile(r"`+")


def prose(text: str) -> str:
    """Escapes a text for a sentence or a table cell."""
    text = _SPECIAL.sub(r"\\\1", clean(text, LINE)).translate(_ENTITIES)
    return _ADDRESS.sub(lambda match: match[0].replace(":", "&#58;").replace(".", "&#46;"), text)


def code(name: str) -> str:
    """Returns a name, shortened if it is long, as inline code that is safe in a table cell."""
    name = shorten(clean(name, LINE)).replace("|", "\\|")
    if not name:
        return ""
    longest = max((len(ticks) for ticks in _TICKS.findall(name)), default=0)
    fence = "`" * (longest + 1)
    # A space separates a tick at an end from the fence.
    pad = " " if name.startswith("`") or name.endswith("`") else ""
    return f"{fence}{pad}{name}{pad}{fence}"


def block(text: str, language: str) -> str:
    """Returns a text of several lines as a fenced code block."""
    longest = max((len(ticks) for ticks in _TICKS.findall(text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.strip()}\n{fence}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table of Markdown cells; '' without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    if not lines:
        return ""
    return "\n".join([f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines])

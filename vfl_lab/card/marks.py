"""Writes a card, and keeps the text that a person has written between the marks of an old card.

A card ends with a digest of the text outside of the marks. A different digest shows that a person
has changed this text, which is then not overwritten.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic

TO_WRITE = "TO WRITE:"
_END = "<!-- /yours -->"
_YOURS = re.compile(r"<!-- yours: ([a-z-]+) -->\n(.*?)<!-- /yours -->", re.DOTALL)
_DIGEST = re.compile(r"<!-- vfl card: ([0-9a-f]{64}) -->\n")


def write(path: Path, card: str) -> list[str]:
    """Writes a card, and keeps the text that a person has written between the marks of an existing
    card.

    Returns the names of the places without such a text. Raises InputError if the file is not a
    card, was changed outside of the marks, has text in a place that the new card does not have, or
    cannot be read or written.
    """
    old_places = _read_places(path)
    places = dict(_YOURS.findall(card))
    orphaned = sorted(
        name for name, text in old_places.items() if name not in places and _is_written(text)
    )
    if orphaned:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has text in {orphaned[0]!r}, for which the new card has no place. Move the "
            "file away, or give another --out.",
        )

    def fill(match: re.Match[str]) -> str:
        name, text = match[1], match[2]
        text = old_places[name] if name in old_places and _is_written(old_places[name]) else text
        places[name] = text
        return f"<!-- yours: {name} -->\n{text}{_END}"

    body = _YOURS.sub(fill, card.rstrip("\n") + "\n\n")
    write_atomic(path, f"{body}<!-- vfl card: {_digest(body)} -->\n")
    return [name for name, text in places.items() if not _is_written(text)]


def _read_places(path: Path) -> Mapping[str, str]:
    """Returns {place: its text} of an existing card; empty if there is no card."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read. Move it away, or give another --out."
        ) from None
    # An editor may have written the line ends of another system.
    content = content.replace("\r\n", "\n").rstrip("\n") + "\n"
    match = _DIGEST.search(content)
    body = content[: match.start()] if match is not None else ""
    if match is None or match.end() != len(content) or _digest(body) != match[1]:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has changed text outside of the marks, which would be lost. Give another "
            "--out, and move the text between '<!-- yours: … -->' and '<!-- /yours -->' there.",
        )
    places: list[tuple[str, str]] = _YOURS.findall(body)
    return dict(places)


def _digest(body: str) -> str:
    outside = _YOURS.sub(lambda match: f"<!-- yours: {match[1]} -->", body)
    return hashlib.sha256(outside.encode()).hexdigest()


def _is_written(text: str) -> bool:
    """Whether a person has written this text."""
    return bool(text.strip()) and not text.startswith(TO_WRITE)

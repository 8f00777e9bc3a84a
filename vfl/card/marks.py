"""What a person writes into a card stands between marks, and stays when the card is written again.

A card ends with a digest of all that stands outside of the marks: so words that a person has
written elsewhere are noticed before they would be lost.
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


def yours(name: str, what: str) -> str:
    """Returns a place for a person's words; ``what``: what is to be written there."""
    return f"<!-- yours: {name} -->\n{TO_WRITE} {what}\n{_END}"


def write(path: Path, card: str) -> list[str]:
    """Writes a card, and keeps what a person has written between the marks of the one that is
    there. Returns the names of the places where nobody has written yet.

    Raises InputError if the file is no card of ours, was changed outside of the marks, or has words
    in a place that the new card lacks; and if it cannot be read or written.
    """
    kept = _kept(path)
    places = dict(_YOURS.findall(card))
    lost = sorted(name for name, text in kept.items() if name not in places and _written(text))
    if lost:
        text = f"{path}: has your words in {lost[0]!r}, for which the new card has no place"
        raise InputError(Code.FILE_INVALID, f"{text}; move the file away, or give another --out")

    def filled(found: re.Match[str]) -> str:
        name, text = found[1], found[2]
        text = kept[name] if name in kept and _written(kept[name]) else text
        places[name] = text
        return f"<!-- yours: {name} -->\n{text}{_END}"

    body = _YOURS.sub(filled, card.rstrip("\n") + "\n\n")
    write_atomic(path, f"{body}<!-- vfl card: {_digest(body)} -->\n")
    return [name for name, text in places.items() if not _written(text)]


def _kept(path: Path) -> Mapping[str, str]:
    """Returns {place: what stands there} of the card that is there; nothing if there is none."""
    try:
        before = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError):
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read; move it away, or give another --out"
        ) from None
    # Editors of other systems end lines otherwise.
    before = before.replace("\r\n", "\n").rstrip("\n") + "\n"
    found = _DIGEST.search(before)
    body = before[: found.start()] if found is not None else ""
    if found is None or found.end() != len(before) or _digest(body) != found[1]:
        text = f"{path}: has words outside of the marks, which would be lost"
        text += ": move them between '<!-- yours: … -->' and '<!-- /yours -->' of a new card"
        raise InputError(Code.FILE_INVALID, f"{text}, which --out writes to another file")
    places: list[tuple[str, str]] = _YOURS.findall(body)
    return dict(places)


def _digest(body: str) -> str:
    outside = _YOURS.sub(lambda found: f"<!-- yours: {found[1]} -->", body)
    return hashlib.sha256(outside.encode()).hexdigest()


def _written(text: str) -> bool:
    """Whether a person has written there."""
    return bool(text.strip()) and not text.startswith(TO_WRITE)

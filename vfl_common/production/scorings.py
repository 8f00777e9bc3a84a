"""Which rows were scored when, with which model, and for whom: ``predictions.jsonl`` in a party's
folder of runs.

A line has no id and no value of a row. ``data`` is a digest of the party's rows as the encoders
took them: only who holds the same rows can tell that they are the ones.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from vfl_common.errors import Code, InputError
from vfl_common.files import locked, private_file, unwritable
from vfl_common.process.logs import utc
from vfl_common.production.registry import user
from vfl_common.text import to_json

FILE = "predictions.jsonl"


@dataclass(frozen=True)
class Scoring:
    """One joint prediction, as one party has seen it.

    ``run``: of the prediction; '' if all parties were in one process. ``model``: the trained run.
    ``rows``: in this party's table; ``scored``: of these. ``output``: the file of scores, at the
    active party. ``who``: the system's user who asked.
    """

    at: str
    who: str
    party: str
    recipe: str
    model: str
    run: str
    rows: int
    scored: int
    data: str = ""
    output: str = ""


_KINDS = {each.name: int if each.name in ("rows", "scored") else str for each in fields(Scoring)}


def note(out: Path, **facts: Any) -> None:
    """Adds a line, which is on the disk then. ``facts``: those of ``Scoring``, but ``at`` and
    ``who``. Raises InputError.
    """
    path = out / FILE
    line = to_json(asdict(Scoring(utc(time.time()), user(), **facts))) + "\n"
    with locked(out):
        try:
            with os.fdopen(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b"
            ) as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    # A crash has cut the last line, which must not take this one with it.
                    line = line if file.read(1) == b"\n" else f"\n{line}"
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise unwritable(path, error) from None


def read(out: Path) -> list[Scoring]:
    """Returns all lines, the oldest first, without those that are damaged or were cut short by a
    crash. Raises InputError.
    """
    return [each for line in _lines(out / FILE) if (each := _scoring(line)) is not None]


def remove(out: Path, which: Callable[[Scoring], bool]) -> int:
    """Removes lines, and returns how many; the file is replaced as a whole.

    All others stay as they are, also those that cannot be read, and what a later release has
    written into them. Raises InputError.
    """
    path = out / FILE
    if not path.exists():
        return 0
    with locked(out):
        lines = _lines(path)
        kept = [line for line in lines if (each := _scoring(line)) is None or not which(each)]
        if len(kept) < len(lines):
            with private_file(path) as file:
                file.writelines(line + b"\n" for line in kept)
    return len(lines) - len(kept)


def _lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().split(b"\n") if line]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror})") from None


def _scoring(line: bytes) -> Scoring | None:
    """Reads a line; None if it is damaged."""
    try:
        facts = json.loads(line.decode(errors="replace"))
        found = Scoring(**{key: facts[key] for key in _KINDS.keys() & facts.keys()})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    # true is no number of rows.
    right = all(type(getattr(found, key)) is kind for key, kind in _KINDS.items())
    return found if right else None

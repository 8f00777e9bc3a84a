"""Reads and writes the log of predictions, ``predictions.jsonl`` in a party's folder of runs.

A line says when rows were scored, with which model, and for whom. It has no id and no value of a
row. ``data`` is a digest of the party's rows as its encoder received them: only a process that has
the same rows can recognize it.
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
from vfl_common.files import lock_folder, private_file, write_error
from vfl_common.process.logs import utc
from vfl_common.production.registry import user
from vfl_common.text import to_json

FILE = "predictions.jsonl"


@dataclass(frozen=True)
class Scoring:
    """One joint prediction, as one party has logged it.

    ``run``: the run id of the prediction; '' if all parties were in one process. ``model``: the
    trained run. ``rows``: the number of rows in this party's table, of which ``scored`` were
    scored. ``output``: the file of scores at the active party. ``who``: the user of the system who
    started it.
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


_KINDS = {field.name: int if field.name in ("rows", "scored") else str for field in fields(Scoring)}


def note(out: Path, **facts: Any) -> None:
    """Appends a line and flushes it to disk.

    ``facts``: the fields of ``Scoring`` except ``at`` and ``who``. Raises InputError.
    """
    path = out / FILE
    line = to_json(asdict(Scoring(utc(time.time()), user(), **facts))) + "\n"
    with lock_folder(out):
        try:
            with os.fdopen(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b"
            ) as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    # A last line that a crash has cut must not damage this one.
                    line = line if file.read(1) == b"\n" else f"\n{line}"
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_error(path, error) from None


def read(out: Path) -> list[Scoring]:
    """Returns all lines, the oldest first, without damaged ones. Raises InputError."""
    return [scoring for line in _lines(out / FILE) if (scoring := _scoring(line)) is not None]


def remove(out: Path, which: Callable[[Scoring], bool]) -> int:
    """Removes lines and returns their number; the file is replaced as a whole.

    All other lines are unchanged, also damaged ones and fields that a later release has written.
    Raises InputError.
    """
    path = out / FILE
    if not path.exists():
        return 0
    with lock_folder(out):
        lines = _lines(path)
        staying = [
            line for line in lines if (scoring := _scoring(line)) is None or not which(scoring)
        ]
        if len(staying) < len(lines):
            with private_file(path) as file:
                file.writelines(line + b"\n" for line in staying)
    return len(lines) - len(staying)


def _lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().split(b"\n") if line]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Check its permissions.",
        ) from None


def _scoring(line: bytes) -> Scoring | None:
    """Reads a line; None if it is damaged."""
    try:
        facts = json.loads(line.decode(errors="replace"))
        scoring = Scoring(**{key: facts[key] for key in _KINDS.keys() & facts.keys()})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    # A bool is an int for isinstance, but not a number of rows.
    right = all(type(getattr(scoring, key)) is kind for key, kind in _KINDS.items())
    return scoring if right else None

"""Reads and writes the log of predictions, ``predictions.jsonl`` in a party's folder of runs.

A line records when rows were scored, with which model, and by whom. It contains no id and no value
of a row. ``data`` is a digest of the party's rows as its encoder received them, which only a
process with the same rows can recognise.
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
from vfl_common.registry import get_user_name
from vfl_common.text import to_json

FILE = "predictions.jsonl"


@dataclass(frozen=True)
class Scoring:
    """One line of the log: a joint prediction, as one party has recorded it.

    ``run``: the run id of the prediction; '' if all parties were in one process. ``model``: the id
    of the trained run. ``rows``: the number of rows in this party's table. ``scored``: how many of
    them were scored. ``output``: the active party's file of scores. ``who``: the operating system's
    user who started the prediction.
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
    """Appends a line to the log and flushes it to disk.

    ``facts``: the fields of ``Scoring`` except ``at`` and ``who``. Raises InputError.
    """
    path = out / FILE
    line = to_json(asdict(Scoring(utc(time.time()), get_user_name(), **facts))) + "\n"
    with lock_folder(out):
        try:
            with os.fdopen(
                os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b"
            ) as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    # If a crash has cut the last line, a line break must come before the new line.
                    line = line if file.read(1) == b"\n" else f"\n{line}"
                file.write(line.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise write_error(path, error) from None


def read(out: Path) -> list[Scoring]:
    """Returns all lines of the log, the oldest first, without damaged lines. Raises InputError."""
    return [
        scoring for line in _read_lines(out / FILE) if (scoring := _parse_line(line)) is not None
    ]


def remove(out: Path, which: Callable[[Scoring], bool]) -> int:
    """Removes the lines for which ``which`` returns true, and returns their number. The file is
    replaced as a whole.

    All other lines stay unchanged, including damaged lines and fields of later releases. Raises
    InputError.
    """
    path = out / FILE
    if not path.exists():
        return 0
    with lock_folder(out):
        lines = _read_lines(path)
        kept_lines = [
            line for line in lines if (scoring := _parse_line(line)) is None or not which(scoring)
        ]
        if len(kept_lines) < len(lines):
            with private_file(path) as file:
                file.writelines(line + b"\n" for line in kept_lines)
    return len(lines) - len(kept_lines)


def _read_lines(path: Path) -> list[bytes]:
    try:
        return [line for line in path.read_bytes().split(b"\n") if line]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Check its permissions.",
        ) from None


def _parse_line(line: bytes) -> Scoring | None:
    """Reads a line; None if it is damaged."""
    try:
        facts = json.loads(line.decode(errors="replace"))
        scoring = Scoring(**{key: facts[key] for key in _KINDS.keys() & facts.keys()})
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    # The exact type is compared, because isinstance would accept a bool as a number of rows.
    has_valid_types = all(type(getattr(scoring, key)) is kind for key, kind in _KINDS.items())
    return scoring if has_valid_types else None

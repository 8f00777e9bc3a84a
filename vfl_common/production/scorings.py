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
from vfl_common.files import unwritable, write_atomic
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


def note(out: Path, **facts: Any) -> None:
    """Adds a line, which is on the disk then. ``facts``: those of ``Scoring``, but ``at`` and
    ``who``. Raises InputError.
    """
    path = out / FILE
    line = to_json(asdict(Scoring(utc(time.time()), user(), **facts))) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # One call, so that two programs do not mix their lines.
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        raise unwritable(path, error) from None


def read(out: Path) -> list[Scoring]:
    """Returns all lines, the oldest first; one that a crash has cut short is left out. Raises
    InputError.
    """
    path, known = out / FILE, {each.name for each in fields(Scoring)}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror})") from None
    found = []
    for line in lines:
        try:
            facts = json.loads(line)
            found.append(Scoring(**{key: facts[key] for key in known & facts.keys()}))
        except (ValueError, TypeError, AttributeError, RecursionError):
            continue
    return found


def remove(out: Path, which: Callable[[Scoring], bool]) -> None:
    """Removes lines; the file is replaced as a whole. Raises InputError."""
    kept = [each for each in read(out) if not which(each)]
    write_atomic(out / FILE, "".join(to_json(asdict(each)) + "\n" for each in kept), durable=True)
    (out / FILE).chmod(0o600)

"""Limits how many ids a peer can try out on this party's table: how often a day its rows are
aligned, and with how many rows.
"""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_common.files import unwritable, write_atomic

_DAY_S = 86_400.0
_FEWEST_PEER_ROWS, _MOST_PEER_ROWS, _TIMES = 100_000, 10_000_000, 10


def peer_rows(asked: int | None, own: int | None) -> int:
    """Returns how many rows a party takes of another one.

    Args:
        asked: as the party file has it; None: by default ten times its own with psi, so that nobody
            tries out millions of ids on a small table.
        own: the rows of its table; None: it masks no ids, or its table has only rows to predict,
            which a large table of the other party has.
    """
    tied = max(_FEWEST_PEER_ROWS, _TIMES * own) if own is not None else _MOST_PEER_ROWS
    return asked or min(_MOST_PEER_ROWS, tied)


def count(path: Path, source: str, most: int, now_s: float) -> None:
    """Counts one alignment of the table ``source`` at ``now_s`` (seconds since 1970).

    ``path``: this party's file, {a table's source: when its rows were found}.

    Raises InputError (REFUSED) if there were ``most`` within a day; it counts nothing then.
    """
    try:
        with path.with_suffix(".lock").open("w") as lock:
            # Several processes of this party may begin at once.
            fcntl.flock(lock, fcntl.LOCK_EX)
            _count(path, source, most, now_s)
    except OSError as error:
        raise unwritable(path, error) from None


def _count(path: Path, source: str, most: int, now_s: float) -> None:
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
        # The clock may have been ahead.
        times = [min(float(each), now_s) for each in found.get(source, [])]
        if not all(math.isfinite(each) for each in times):
            raise ValueError
    except (OSError, ValueError, TypeError, AttributeError):
        text = f"{path}: cannot be read; restore it, or remove it to count anew"
        raise InputError(Code.FILE_INVALID, text) from None
    times = [each for each in times if now_s - each < _DAY_S]
    if len(times) >= most:
        wait_min = max(1, round((_DAY_S - (now_s - min(times))) / 60))
        text = (
            f"{source}: its rows were found {most} times within a day, as often as "
            "alignments_a_day allows"
        )
        raise InputError(
            Code.REFUSED,
            f"{text}; wait {wait_min} min, or take those of an earlier run: rows.alignment",
        )
    write_atomic(path, json.dumps({**found, source: [*times, now_s]}))

"""Limits how many ids a peer can guess in this party's table: alignments a day, and rows of an
alignment.
"""

from __future__ import annotations

import fcntl
import json
import math
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic, write_error

_DAY_S = 86_400.0
_MIN_PEER_ROWS, _MAX_PEER_ROWS, _TIMES = 100_000, 10_000_000, 10


def peer_rows(asked: int | None, own: int | None) -> int:
    """Returns the maximum number of rows that a party accepts from another one.

    Args:
        asked: the value of the party file; None for the default: with psi ten times the party's own
            rows, so that millions of ids cannot be guessed on a small table.
        own: the rows of its table; None if it masks no ids, or its table has only rows to predict,
            which a large table of the other party contains.
    """
    tied = max(_MIN_PEER_ROWS, _TIMES * own) if own is not None else _MAX_PEER_ROWS
    return asked or min(_MAX_PEER_ROWS, tied)


def count(path: Path, source: str, max_times: int, now_s: float) -> None:
    """Counts one alignment of the table ``source`` at ``now_s`` (seconds since 1970).

    ``path``: this party's file, {a table's source: times of its alignments}. Raises InputError
    (REFUSED), without counting, if there were ``max_times`` within a day.
    """
    try:
        with path.with_suffix(".lock").open("w") as lock:
            # Several processes of this party may begin at once.
            fcntl.flock(lock, fcntl.LOCK_EX)
            _count(path, source, max_times, now_s)
    except OSError as error:
        raise write_error(path, error) from None


def _count(path: Path, source: str, max_times: int, now_s: float) -> None:
    try:
        counts = json.loads(path.read_text()) if path.exists() else {}
        # The clock may have been ahead.
        times = [min(float(time_s), now_s) for time_s in counts.get(source, [])]
        if not all(math.isfinite(time_s) for time_s in times):
            raise ValueError
    except (OSError, ValueError, TypeError, AttributeError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read. Restore it, or remove it to restart the count.",
        ) from None
    times = [time_s for time_s in times if now_s - time_s < _DAY_S]
    if len(times) >= max_times:
        wait_min = max(1, round((_DAY_S - (now_s - min(times))) / 60))
        raise InputError(
            Code.REFUSED,
            f"{source}: its rows were aligned {max_times} times within a day, the limit of "
            f"alignments_a_day. Wait {wait_min} min, or use the rows of an earlier run with "
            "rows.alignment.",
        )
    write_atomic(path, json.dumps({**counts, source: [*times, now_s]}))

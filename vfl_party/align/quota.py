"""Limits how many ids a peer can test against this party's table: the number of alignments per day,
and the number of rows of an alignment.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_common.files import hold_lock, write_atomic, write_error

_DAY_S = 86_400.0
_MIN_PEER_ROWS, _MAX_PEER_ROWS, _TIMES = 100_000, 10_000_000, 10


def limit_peer_rows(configured_rows: int | None, own_rows: int | None) -> int:
    """Returns the maximum number of rows that a party accepts from another party.

    The default is ten times the party's own rows, so that a peer cannot test millions of ids
    against a small table.

    Args:
        configured_rows: The limit in the party file; None for the default.
        own_rows: The number of rows of the party's table. None if the party masks no ids, or if its
            table has only rows to predict.
    """
    default_limit = (
        max(_MIN_PEER_ROWS, _TIMES * own_rows) if own_rows is not None else _MAX_PEER_ROWS
    )
    return configured_rows or min(_MAX_PEER_ROWS, default_limit)


def count(path: Path, source: str, max_times: int, now_s: float) -> None:
    """Counts one alignment of the table ``source`` at ``now_s`` (seconds since 1970).

    ``path``: This party's file, which holds the times of the alignments of each table. Raises
    InputError (REFUSED) if there were already ``max_times`` alignments within a day.
    """
    try:
        # Several processes of this party may begin an alignment at the same time.
        with path.with_suffix(".lock").open("w") as lock, hold_lock(lock):
            _add_time(path, source, max_times, now_s)
    except OSError as error:
        raise write_error(path, error) from None


def _add_time(path: Path, source: str, max_times: int, now_s: float) -> None:
    try:
        times_by_source = json.loads(path.read_text()) if path.exists() else {}
        # The system clock may have been ahead, so later times count as now.
        times = [min(float(time_s), now_s) for time_s in times_by_source.get(source, [])]
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
    write_atomic(path, json.dumps({**times_by_source, source: [*times, now_s]}))

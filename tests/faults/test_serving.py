"""Parties that are killed, frozen or back while requests keep coming: no request fails, and rows
name who was missing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.served import NAMES, Served, trained
from tests.harness.waiting import wait_until

PHASES: dict[str, dict[str, Any]] = {
    "embeddings": {"kind": "splitnn", "epochs": 1, "batch_size": 24},
    "trees": {"kind": "secureboost", "trees": 3, "depth": 2, "bins": 8, "encryption": "none"},
}
_TIMEOUT_MS = 300
# Of what a request takes beside the wait for a party, on a machine that does much else.
_SLACK_S = 5.0


@contextmanager
def load(served: Served) -> Iterator[list[tuple[float, int, Any]]]:
    """Asks from two threads without a pause while the block runs; fills the list with each
    request's seconds, status and rows.
    """
    found: list[tuple[float, int, Any]] = []
    ended = threading.Event()

    def ask(first: int) -> None:
        number = first
        while not ended.is_set():
            number = (number + 7) % 120
            began_s = time.monotonic()
            status, answer = served.ask("/v1/predict", {"ids": [f"K-{number}", "K-5"]})
            found.append((time.monotonic() - began_s, status, answer.get("rows")))

    threads = [threading.Thread(target=ask, args=(first,)) for first in (0, 3)]
    for each in threads:
        each.start()
    try:
        yield found
    finally:
        ended.set()
        for each in threads:
            each.join()


def seconds_until(happened: Callable[[], object]) -> float:
    """Waits until it has happened; returns the seconds."""
    began_s = time.monotonic()
    wait_until(happened)
    return time.monotonic() - began_s


def missing(row: Any) -> dict[str, str]:
    found: dict[str, str] = row["missing"]
    return found


@pytest.mark.parametrize("kind", PHASES)
def test_no_request_fails_while_parties_die_freeze_and_come_back(kind: str, tmp_path: Path) -> None:
    with trained(tmp_path, PHASES[kind]) as served:
        served.start_all(party_timeout_ms=_TIMEOUT_MS)
        with load(served) as found:

            def last() -> dict[str, str]:
                return missing(found[-1][2][1]) if found else {"": "nothing was asked yet"}

            seconds_until(lambda: last() == {})
            served.program("p1").kill()
            seconds_until(lambda: last() == {"p1": "away"})
            p1 = served.start("p1")
            p1.wait_for("ready")
            back_s = seconds_until(lambda: last() == {})
            served.program("p2").signal(signal.SIGSTOP)
            try:
                seconds_until(lambda: "p2" in last())
            finally:
                served.program("p2").signal(signal.SIGCONT)
            thawed_s = seconds_until(lambda: last() == {})
        assert back_s < 2.0
        assert thawed_s < 2.0
        assert {status for _, status, _ in found} == {200}
        rows = [row for _, _, each in found for row in each]
        assert {*NAMES[1:]} >= {name for row in rows for name in missing(row)}
        # A row without a score says so, and one with a score that misses somebody says whom.
        for row in rows:
            assert (row["score_1"] is None) == (row["state"] == "incomplete")
            assert (row["state"] == "scored") == (missing(row) == {})
        assert max(seconds for seconds, _, _ in found) < _TIMEOUT_MS / 1000 + _SLACK_S
        print(f"{kind}: {len(found)} requests; back {back_s:.2f} s, thawed {thawed_s:.2f} s")

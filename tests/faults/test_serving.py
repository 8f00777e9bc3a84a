"""Parties that are killed, frozen or back while requests keep coming: no request fails, and rows
name who was missing.
"""

from __future__ import annotations

import http.client
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from tests.harness.errors import assert_names
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


@contextmanager
def steady(served: Served, rate: float) -> Iterator[list[tuple[int, str]]]:
    """Asks so often a second while the block runs, whatever the answers take; fills the list with
    each request's status and state. Every second request has a connection of its own, the others
    share connections that are kept.
    """
    found: list[tuple[int, str]] = []
    kept: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()
    ended, at = threading.Event(), urlsplit(served.url).netloc

    def ask(number: int) -> None:
        keeps = number % 2 == 0
        try:
            line = kept.get_nowait() if keeps else http.client.HTTPConnection(at, timeout=30)
        except queue.Empty:
            line = http.client.HTTPConnection(at, timeout=30)
        body = json.dumps({"ids": [f"K-{number % 120}"]})
        try:
            line.request("POST", "/v1/predict", body, {"content-type": "application/json"})
            answer = line.getresponse()
            rows = json.loads(answer.read())["rows"]
            found.append((answer.status, rows[0]["state"]))
        except (OSError, http.client.HTTPException, KeyError) as error:
            found.append((0, repr(error)))
        if keeps:
            kept.put(line)
        else:
            line.close()

    def load() -> None:
        with ThreadPoolExecutor(64) as threads:
            number = 0
            while not ended.wait(1 / rate):
                number += 1
                threads.submit(ask, number)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
        while not kept.empty():
            kept.get().close()


def test_a_restart_of_the_active_party_loses_no_request(tmp_path: Path) -> None:
    """Thirty requests a second, while SIGHUP has a new process take over: for an upgrade, say."""
    with trained(tmp_path, PHASES["embeddings"]) as served:
        # A fork of the launcher has no command of its own.
        served.federation.fresh = True
        served.start_all()
        first = served.program("p0")
        with steady(served, 30.0) as found:
            wait_until(lambda: len(found) > 30)
            first.signal(signal.SIGHUP)
            second = psutil.Process(first.wait_for("handover", 120.0)["pid"])
            try:
                assert first.wait_for("ready", 60.0)["http"] == served.url
                assert first.process.wait(30.0) == 0
                asked = len(found)
                wait_until(lambda: len(found) > asked + 30)
                assert served.get("/healthz")["present"] == [*NAMES[1:]]
            except BaseException:
                second.kill()
                raise
        assert set(found) == {(200, "scored")}
        second.terminate()
        psutil.wait_procs([second], 30.0)
        print(f"{len(found)} requests, none lost")


def test_a_passive_party_is_handed_over_and_attends_again(tmp_path: Path) -> None:
    with trained(tmp_path, PHASES["embeddings"]) as served:
        served.federation.fresh = True
        served.start_all()
        first = served.program("p1")
        first.signal(signal.SIGHUP)
        second = psutil.Process(first.wait_for("handover", 120.0)["pid"])
        try:
            first.wait_for("attending", 60.0)
            assert first.process.wait(30.0) == 0
            wait_until(lambda: served.rows("K-1")[0]["state"] == "scored")
        finally:
            second.kill()


def test_a_new_process_that_cannot_start_changes_nothing(tmp_path: Path) -> None:
    with trained(tmp_path, PHASES["embeddings"]) as served:
        served.federation.fresh = True
        served.start_all()
        active = served.program("p0")
        (served.federation.folder / "p0.toml").write_text("no_such_key = 1")
        active.signal(signal.SIGHUP)
        said = active.wait_for("advice", 120.0)["said"]
        assert_names(said, "exit code 2", "Correct")
        assert "goes on" in said
        (row,) = served.rows("K-1")
        assert row["state"] == "scored"


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
            assert (row["score_1"] is None) == (row["state"] in ("incomplete", "unmeasured"))
            assert (row["state"] == "scored") == (missing(row) == {})
        assert max(seconds for seconds, _, _ in found) < _TIMEOUT_MS / 1000 + _SLACK_S
        print(f"{kind}: {len(found)} requests; back {back_s:.2f} s, thawed {thawed_s:.2f} s")

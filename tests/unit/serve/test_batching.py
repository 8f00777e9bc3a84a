"""Requests that wait together are scored together, and each gets its own rows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import UTC, datetime
from unittest.mock import patch

import numpy as np
import pytest

from vfl_party.predict.run import Quality
from vfl_serve import scorer
from vfl_serve.opening import ServedTally, ServingStanding
from vfl_serve.prometheus import ServeMetrics
from vfl_serve.scored import Counts, RequestPart, ServedScores
from vfl_serve.scorer import Batcher, Busy
from vfl_serve.served import join_scores

PARTS = (RequestPart(("bank", "shop"), {}), RequestPart(("bank",), {"shop": "away"}))


def scores_of(ids: Sequence[str]) -> ServedScores:
    """An id is its own score; those that begin with ``a`` lack the shop."""
    part = np.array([each.startswith("a") for each in ids], np.int64)
    state = ["partly" if each else "scored" for each in part]
    return ServedScores({"score": np.array(ids)}, state, PARTS, part)  # type: ignore[arg-type]


@pytest.fixture
def four_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer, "_MAX_BATCHES", 4)


@pytest.mark.usefixtures("four_at_work")
def test_requests_that_wait_are_scored_at_once() -> None:
    batches: list[list[str]] = []
    begin, under_way = threading.Event(), threading.Semaphore(0)

    def score(ids: Sequence[str], _least: float | None, _columns: object) -> ServedScores:
        batches.append(list(ids))
        under_way.release()
        begin.wait(30)
        return scores_of(ids)

    batcher = Batcher(score, max_rows=4, wait_s=0.0)
    # One for each thread, so that all are at work.
    first = []
    for number in range(4):
        first.append(batcher.submit([f"first-{number}"]))
        assert under_way.acquire(timeout=30)
    waiting = [batcher.submit([f"a{number}", f"b{number}"]) for number in range(3)]
    other = batcher.submit(["c"], 0.5)
    begin.set()
    for number, each in enumerate(waiting):
        found = each.result(30)
        assert found.columns["score"].tolist() == [f"a{number}", f"b{number}"]
        assert [found.part(row) for row in range(2)] == [PARTS[1], PARTS[0]]
    assert other.result(30).columns["score"].tolist() == ["c"]
    assert [each.result(30).columns["score"].tolist() for each in first] == [
        [f"first-{number}"] for number in range(4)
    ]
    batcher.close()
    assert sorted(batches[4:]) == [["a0", "b0", "a1", "b1"], ["a2", "b2"], ["c"]]


def test_beyond_a_few_under_way_the_next_batch_waits_for_others() -> None:
    batches: list[list[str]] = []
    begin, under_way = threading.Event(), threading.Semaphore(0)

    def score(ids: Sequence[str], _least: float | None, _columns: object) -> ServedScores:
        batches.append(list(ids))
        under_way.release()
        assert begin.wait(30)
        return scores_of(ids)

    with patch.multiple(scorer, _A_FEW=2, _PACE_S=30.0):
        batcher = Batcher(score, max_rows=2, wait_s=0.0)
        for number in range(2):
            batcher.submit([f"first-{number}"])
            assert under_way.acquire(timeout=30)
        # Full, it waits no longer.
        waiting = [batcher.submit([each]) for each in ("a", "b")]
        assert under_way.acquire(timeout=30)
        begin.set()
        assert [each.result(30).columns["score"].tolist() for each in waiting] == [["a"], ["b"]]
        batcher.close()
    assert batches == [["first-0"], ["first-1"], ["a", "b"]]


def test_an_error_reaches_all_who_wait_and_nobody_else() -> None:
    def score(ids: Sequence[str], _least: float | None, _columns: object) -> ServedScores:
        if "bad" in ids:
            raise ValueError("bad")
        return scores_of(ids)

    batcher = Batcher(score, max_rows=1, wait_s=0.0)
    bad, good = batcher.submit(["bad"]), batcher.submit(["good"])
    with pytest.raises(ValueError, match="bad"):
        bad.result(30)
    assert good.result(30).columns["score"].tolist() == ["good"]
    batcher.close()


@pytest.mark.usefixtures("four_at_work")
def test_a_caller_who_has_gone_ends_no_thread() -> None:
    begin = threading.Event()

    def score(ids: Sequence[str], _least: float | None, _columns: object) -> ServedScores:
        begin.wait(30)
        if "bad" in ids:
            raise ValueError("bad")
        return scores_of(ids)

    batcher = Batcher(score, max_rows=1, wait_s=0.0)
    under_way = [batcher.submit(["bad"]) for _ in range(4)]
    gone = [batcher.submit(["bad"]) for _ in range(8)]
    assert all(each.cancel() for each in gone)
    begin.set()
    assert batcher.submit(["good"]).result(30).columns["score"].tolist() == ["good"]
    assert all(isinstance(each.exception(30), ValueError) for each in under_way)
    batcher.close()
    # What is queued after the end would wait for ever.
    with pytest.raises(Busy):
        batcher.submit(["late"])


def test_parts_of_a_request_are_put_together() -> None:
    ids = [f"{'ab'[number % 2]}{number}" for number in range(9)]
    found = join_scores([scores_of(ids[:4]), scores_of(ids[4:5]), scores_of(ids[5:])])
    whole = scores_of(ids)
    assert found.columns["score"].tolist() == ids
    assert found.state == whole.state
    assert [found.part(row) for row in range(9)] == [whole.part(row) for row in range(9)]


def test_rows_are_counted_by_state_and_by_absent_party() -> None:
    port, tally = Counts(), ServedTally("case", "run")
    tally.standing = lambda: ServingStanding({"shop": False, "lab": True}, 3)
    ends = {"bank": datetime(2027, 1, 2, tzinfo=UTC)}
    ready = [True]
    metrics = ServeMetrics({"version": "1"}, {"run": tally}, port, lambda: ready[0], lambda: ends)
    tally.counts.count_scored(scores_of(["a1", "b1", "a2"]), 0.003)
    port.count_answered(200)
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.families()
        for sample in family.samples
    }
    assert found["vfl_serve_rows_total", "case", "run", "partly"] == 2
    assert found["vfl_serve_rows_total", "case", "run", "scored"] == 1
    assert found["vfl_serve_rows_without_total", "case", "run", "shop", "away"] == 2
    assert found["vfl_serve_requests_total", "200"] == 1
    assert found["vfl_serve_seconds_bucket", "case", "run", "0.002"] == 0
    assert found["vfl_serve_seconds_bucket", "case", "run", "0.004"] == 1
    assert found["vfl_serve_seconds_bucket", "case", "run", "+Inf"] == 1
    assert found["vfl_serve_present", "case", "run", "shop"] == 0
    assert found["vfl_serve_present", "case", "run", "lab"] == 1
    assert found["vfl_serve_waiting_requests", "case", "run"] == 3
    assert found["vfl_certificate_not_after_timestamp_seconds", "bank"] == ends["bank"].timestamp()
    assert found["vfl_party_info", "1"] == 1
    assert found["vfl_serve_ready",] == 1
    assert metrics.state() == "running"
    tally.standing = lambda: ServingStanding({"shop": False})
    assert metrics.state() == "waiting"
    ready[0] = False
    assert metrics.state() == "failed"


@pytest.mark.parametrize(
    ("metric", "value", "least", "enough"),
    [("auc", 0.8, 0.7, True), ("auc", 0.6, 0.7, False), ("rmse", 3.0, 4.0, True)],
)
def test_enough_goes_by_the_metric(
    metric: str, value: float, least: float, *, enough: bool
) -> None:
    assert Quality(metric, metric == "rmse").enough(value, least) is enough

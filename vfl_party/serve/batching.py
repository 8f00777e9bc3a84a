"""Puts requests that wait together, so that many are scored at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vfl_party.serve.scored import ServedScores
from vfl_party.serve.telling import RequestTrace, get_current_request, record_stages

# Batches under way: while some wait for the passive parties, the next is gathered. Near parties
# seldom have more than a few; for far ones each further batch waits a little, for others to share
# its question.
_UNDER_WAY, _A_FEW = 12, 4
_PACE_S = 0.004
# Requests that wait; more are refused.
MAX_WAITING = 2_000

# A request's own columns: {name: values}.
RequestColumns = Mapping[str, Sequence[Any]]
Score = Callable[[Sequence[str], float | None, RequestColumns | None], ServedScores]


class Busy(Exception):  # noqa: N818 - a state of the program, not a fault
    """More requests wait than will be scored in time."""


class BatcherClosed(Busy):
    """The run takes no more requests: another one answers."""


@dataclass
class _WaitingRequest:
    ids: Sequence[str]
    min_quality: float | None
    columns: RequestColumns | None
    answer: Future[ServedScores] = field(default_factory=Future)
    trace: RequestTrace | None = field(default_factory=get_current_request)
    since_ns: int = field(default_factory=time.time_ns)


class Batcher:
    """Scores requests, those that wait at the same time together.

    Args:
        score: scores ids, with the minimum quality and the active party's columns
            of these rows, if the caller gives them.
        max_rows: rows that are scored at once. A larger request is scored by itself, in parts.
        wait_s: how long a request waits for others.
    """

    def __init__(self, score: Score, max_rows: int, wait_s: float) -> None:
        self._score, self._max_rows, self._wait_s = score, max_rows, wait_s
        self._queue: queue.Queue[_WaitingRequest | None] = queue.Queue(MAX_WAITING)
        self._taking, self._counting = threading.Lock(), threading.Lock()
        self._ending = threading.Lock()
        self._under_way, self._closed = 0, False
        self._next: _WaitingRequest | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"score-{number}", daemon=True)
            for number in range(_UNDER_WAY)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Requests that wait to be scored."""
        return self._queue.qsize()

    def submit(
        self,
        ids: Sequence[str],
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> Future[ServedScores]:
        """Queues a request; one with columns is scored by itself. Raises Busy if too many wait, and
        BatcherClosed if it takes no more.
        """
        request = _WaitingRequest(ids, min_quality, columns)
        try:
            # A request that is queued after the end waits forever.
            with self._ending:
                if self._closed:
                    raise BatcherClosed
                self._queue.put_nowait(request)
        except queue.Full:
            raise Busy from None
        return request.answer

    def close(self) -> None:
        """Scores what waits, then ends."""
        with self._ending:
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._taking:
                batch = self._gather_batch()
            if not batch:
                return
            self._count(1)
            self._answer(batch)
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._counting:
            self._under_way += more

    def _gather_batch(self) -> list[_WaitingRequest]:
        """Returns the requests to score next; none at the end."""
        first, self._next = self._next, None
        if first is None:
            first = self._queue.get()
        if first is None:
            return []
        batch, rows = [first], len(first.ids)
        pace_s = _PACE_S if self._under_way >= _A_FEW else 0.0
        until_s = time.monotonic() + max(self._wait_s, pace_s)
        while rows < self._max_rows and first.columns is None:
            left_s = until_s - time.monotonic()
            try:
                more = self._queue.get(timeout=left_s) if left_s > 0 else self._queue.get_nowait()
            except queue.Empty:
                break
            if more is None:
                # The end is for another thread.
                self._queue.put(None)
                break
            # What is asked for differs, or it is too much at once.
            differs = more.columns is not None or more.min_quality != first.min_quality
            if differs or rows + len(more.ids) > self._max_rows:
                self._next = more
                break
            batch.append(more)
            rows += len(more.ids)
        return batch

    def _answer(self, batch: Sequence[_WaitingRequest]) -> None:
        # The caller may be gone.
        batch = [request for request in batch if request.answer.set_running_or_notify_cancel()]
        ids = [name for request in batch for name in request.ids]
        if not ids:
            return
        try:
            with record_stages([(request.trace, request.since_ns) for request in batch]):
                scores = self._score(ids, batch[0].min_quality, batch[0].columns)
        except Exception as error:  # noqa: BLE001 - whoever waits hears of it
            for request in batch:
                request.answer.set_exception(error)
            return
        start = 0
        for request in batch:
            end = start + len(request.ids)
            request.answer.set_result(scores.slice_rows(slice(start, end)))
            start = end

"""Combines waiting requests into batches, so that many rows are scored at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vfl_serve.scored import ServedScores
from vfl_serve.telling import RequestTrace, get_current_request, record_stages

# Maximum number of current batches: while some wait for the passive parties, the next is gathered.
# Parties on a fast network rarely need more than a few. Beyond these, a batch waits _PACE_S for
# more requests, so that they share its question.
_MAX_BATCHES, _A_FEW = 12, 4
_PACE_S = 0.004
# Maximum number of waiting requests; further ones are refused.
MAX_WAITING = 2_000

# The columns in a request: {name: values}.
RequestColumns = Mapping[str, Sequence[Any]]
Score = Callable[[Sequence[str], float | None, RequestColumns | None], ServedScores]


class Busy(Exception):  # noqa: N818 - a state of the program, not a fault
    """Too many requests are waiting."""


class BatcherClosed(Busy):
    """The run is closed and accepts no more requests."""


@dataclass
class _WaitingRequest:
    ids: Sequence[str]
    min_quality: float | None
    columns: RequestColumns | None
    answer: Future[ServedScores] = field(default_factory=Future)
    trace: RequestTrace | None = field(default_factory=get_current_request)
    since_ns: int = field(default_factory=time.time_ns)


class Batcher:
    """Scores requests in batches of those that wait at the same time.

    Args:
        score: Scores ids, with the minimum quality and the columns of the request, or None.
        max_rows: The maximum number of rows of a batch.
        wait_s: How long a request waits for others to join its batch.
    """

    def __init__(self, score: Score, max_rows: int, wait_s: float) -> None:
        self._score, self._max_rows, self._wait_s = score, max_rows, wait_s
        self._queue: queue.Queue[_WaitingRequest | None] = queue.Queue(MAX_WAITING)
        self._gathering, self._counting = threading.Lock(), threading.Lock()
        self._closing = threading.Lock()
        self._current_batches, self._closed = 0, False
        self._next: _WaitingRequest | None = None
        self._threads = [
            threading.Thread(target=self._work, name=f"score-{number}", daemon=True)
            for number in range(_MAX_BATCHES)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Returns the number of waiting requests."""
        return self._queue.qsize()

    def submit(
        self,
        ids: Sequence[str],
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> Future[ServedScores]:
        """Queues a request. A request with columns is a batch by itself.

        Raises Busy if too many requests wait, and BatcherClosed after ``close``.
        """
        request = _WaitingRequest(ids, min_quality, columns)
        try:
            # A request that is queued after ``close`` would wait forever.
            with self._closing:
                if self._closed:
                    raise BatcherClosed
                self._queue.put_nowait(request)
        except queue.Full:
            raise Busy from None
        return request.answer

    def close(self) -> None:
        """Scores the waiting requests, then ends the threads."""
        with self._closing:
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._gathering:
                batch = self._gather_batch()
            if not batch:
                return
            self._count_batches(1)
            self._answer(batch)
            self._count_batches(-1)

    def _count_batches(self, more: int) -> None:
        with self._counting:
            self._current_batches += more

    def _gather_batch(self) -> list[_WaitingRequest]:
        """Returns the next batch; an empty list after ``close``."""
        first_request, self._next = self._next, None
        if first_request is None:
            first_request = self._queue.get()
        if first_request is None:
            return []
        batch, rows = [first_request], len(first_request.ids)
        pace_s = _PACE_S if self._current_batches >= _A_FEW else 0.0
        until_s = time.monotonic() + max(self._wait_s, pace_s)
        while rows < self._max_rows and first_request.columns is None:
            remaining_s = until_s - time.monotonic()
            try:
                next_request = (
                    self._queue.get(timeout=remaining_s)
                    if remaining_s > 0
                    else self._queue.get_nowait()
                )
            except queue.Empty:
                break
            if next_request is None:
                # Each None ends one thread, so put it back for another thread.
                self._queue.put(None)
                break
            # The request has other settings, or the batch would be too large.
            differs = (
                next_request.columns is not None
                or next_request.min_quality != first_request.min_quality
            )
            if differs or rows + len(next_request.ids) > self._max_rows:
                self._next = next_request
                break
            batch.append(next_request)
            rows += len(next_request.ids)
        return batch

    def _answer(self, batch: Sequence[_WaitingRequest]) -> None:
        # Callers that are gone have cancelled their requests.
        batch = [request for request in batch if request.answer.set_running_or_notify_cancel()]
        ids = [name for request in batch for name in request.ids]
        if not ids:
            return
        try:
            with record_stages([(request.trace, request.since_ns) for request in batch]):
                scores = self._score(ids, batch[0].min_quality, batch[0].columns)
        except Exception as error:  # noqa: BLE001 - the callers get the error
            for request in batch:
                request.answer.set_exception(error)
            return
        start = 0
        for request in batch:
            end = start + len(request.ids)
            request.answer.set_result(scores.slice_rows(slice(start, end)))
            start = end

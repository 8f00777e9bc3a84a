"""Counts and times steps: the training loop writes, other threads may read."""

from __future__ import annotations

from bisect import bisect_left

# Upper bounds in seconds: from a small MLP on one machine to a large network over a slow line.
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Steps:
    """The steps of one phase that this process has made, including those repeated after an interruption.

    The first step of a round is timed from the round's beginning, so evaluation and checkpoints belong to no step.
    ``counts``: how many took at most each of BOUNDS_S (and more than the one before it); the last: longer than all.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0
        self._finished = self._under_way = 0
        self._since_s = 0.0
        self.last_s = 0.0

    @property
    def made(self) -> int:
        return self._finished + self._under_way

    def begin(self, now_s: float) -> None:
        """Begins a round."""
        self._finished, self._under_way = self.made, 0
        self._since_s = now_s

    def tick(self, now_s: float) -> None:
        """Counts a finished step; does little, because the training loop calls it."""
        took_s = now_s - self._since_s
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.seconds += took_s
        self._since_s = self.last_s = now_s
        self._under_way += 1

    def end(self, steps: int) -> None:
        """Ends a round of ``steps`` steps, by its own report: in some phases the loop ticks only once an epoch."""
        self._finished, self._under_way = self._finished + max(steps, self._under_way), 0

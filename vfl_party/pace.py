"""How many steps were made, and how long they took: kept by the training loop, read by whoever asks."""

from __future__ import annotations

from bisect import bisect_left

# Upper bounds in seconds: from a small MLP on one machine to a large network over a slow line.
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Steps:
    """The steps of one phase that this process has made, those included that were repeated after an interruption.

    The first step of a round is timed from the round's beginning, so evaluation and checkpoints belong to none.
    ``counts``: how many took at most each of BOUNDS_S (and more than the one before it); last, those above all.
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
        """A round begins."""
        self._finished, self._under_way = self.made, 0
        self._since_s = now_s

    def tick(self, now_s: float) -> None:
        """A step is done; in the training loop, so it does as little as that."""
        took_s = now_s - self._since_s
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.seconds += took_s
        self._since_s = self.last_s = now_s
        self._under_way += 1

    def end(self, steps: int) -> None:
        """A round is done, with so many steps as it says: of some phases the loop reports epochs only."""
        self._finished, self._under_way = self._finished + max(steps, self._under_way), 0

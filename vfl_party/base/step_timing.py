"""Counts and times steps, and what their time is spent on: the training loop writes, other threads
may read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import wraps
from time import perf_counter, process_time
from typing import Any, TypeVar, cast

from vfl_common.summary import PhaseTimes

Method = TypeVar("Method", bound=Callable[..., Any])

# Upper bounds in seconds: from a small MLP on one machine to a large network over a slow line.
BOUNDS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


class Steps:
    """The steps of one phase that this process has made, including those repeated after an
    interruption.

    The first step of a round is timed from the round's beginning, so evaluation and checkpoints
    belong to no step. ``counts``: how many took at most each of BOUNDS_S (and more than the one
    before it); the last: longer than all.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0
        self._finished = self._under_way = 0
        self._since_s = 0.0
        self.last_s = 0.0

    @property
    def made(self) -> int:
        """The number of steps made so far."""
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
        """Ends a round of ``steps`` steps, by its own report: in some phases the loop ticks only
        once an epoch.
        """
        self._finished += max(steps, self._under_way)
        self._under_way = 0


# The activities among which a party's time is divided.
ENCODE, WAIT, DECODE, COMPUTE = "encode", "wait", "decode", "compute"


class Clock:
    """Divides the time of a phase's rounds among ENCODE, WAIT, DECODE and COMPUTE (all else); of
    the main thread.

    Each moment belongs to one of them, so they add up to the whole. ``spent``: {phase: {what:
    seconds}}; ``steps``: {phase: steps}; both of this process, with what it repeated. A switch
    takes less than a microsecond.

    ``used``: the processor time of the process so far, in seconds; ``cpu``: {phase: what its rounds
    took of it}. None: the parties of this process take turns while they wait, so all time
    without waiting is a party's processor time.
    """

    def __init__(self, used: Callable[[], float] | None = process_time) -> None:
        self.cpu: dict[str, float] = {}
        self._used, self._used_s = used, 0.0
        self.spent: dict[str, dict[str, float]] = {}
        self.steps: dict[str, int] = {}
        # Time between rounds is counted for no phase.
        self._now: dict[str, float] = _nothing()
        self._at, self._since_s = COMPUTE, perf_counter()

    def begin(self, phase: str) -> None:
        """Begins a round."""
        self._now = self.spent.setdefault(phase, _nothing())
        self._at, self._since_s = COMPUTE, perf_counter()
        self._used_s = self._used() if self._used is not None else 0.0

    def to(self, what: str) -> None:
        """Ends what this party did so far, and begins ``what``."""
        now_s = perf_counter()
        self._now[self._at] += now_s - self._since_s
        self._at, self._since_s = what, now_s

    def end(self, phase: str, steps: int) -> None:
        """Ends a round of ``steps`` steps."""
        self.to(COMPUTE)
        self._now = _nothing()
        if self._used is not None:
            self.cpu[phase] = self.cpu.get(phase, 0.0) + self._used() - self._used_s
        self.steps[phase] = self.steps.get(phase, 0) + steps

    def _cpu_s(self, phase: str) -> float:
        if self._used is not None:
            return self.cpu.get(phase, 0.0)
        return sum(seconds for what, seconds in self.spent[phase].items() if what != WAIT)

    def times(self) -> list[PhaseTimes]:
        """Returns the phases in the order in which they began."""
        return [
            PhaseTimes(
                phase=phase,
                steps=self.steps.get(phase, 0),
                encode_s=round(spent[ENCODE], 6),
                wait_s=round(spent[WAIT], 6),
                decode_s=round(spent[DECODE], 6),
                compute_s=round(spent[COMPUTE], 6),
                cpu_s=round(self._cpu_s(phase), 6),
            )
            for phase, spent in self.spent.items()
        ]


def spends(what: str) -> Callable[[Method], Method]:
    """Marks a method of an object with a ``clock``: its time is ``what``; afterwards its caller
    computes.
    """

    def mark(method: Method) -> Method:
        @wraps(method)
        def measure(self: Any, *args: Any, **more: Any) -> Any:
            clock: Clock = self.clock
            clock.to(what)
            try:
                return method(self, *args, **more)
            finally:
                clock.to(COMPUTE)

        return cast(Method, measure)

    return mark


def _nothing() -> dict[str, float]:
    return {ENCODE: 0.0, WAIT: 0.0, DECODE: 0.0, COMPUTE: 0.0}

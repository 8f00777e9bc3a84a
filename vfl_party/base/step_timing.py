"""Counts and times the steps of training, and divides their time among activities. The training
loop writes the times; other threads may read them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import wraps
from time import perf_counter, process_time
from typing import Any, TypeVar, cast

from vfl_common.summary import PhaseTimes

Method = TypeVar("Method", bound=Callable[..., Any])

# Upper bounds of the histogram of step times, in seconds.
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
    """The number and the times of a phase's steps in this process, including steps repeated after
    an interruption.

    The first step of a round is timed from the beginning of the round, so evaluation and
    checkpoints belong to no step. ``counts``: A histogram of the step times with the upper bounds
    ``BOUNDS_S``; the last bin has the longer steps.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0
        self._finished_steps = self._round_steps = 0
        self._since_s = 0.0
        self.last_s = 0.0

    @property
    def made(self) -> int:
        """The number of finished steps."""
        return self._finished_steps + self._round_steps

    def begin(self, now_s: float) -> None:
        """Begins a round."""
        self._finished_steps, self._round_steps = self.made, 0
        self._since_s = now_s

    def tick(self, now_s: float) -> None:
        """Counts a finished step. It must be fast, because the training loop calls it."""
        took_s = now_s - self._since_s
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.seconds += took_s
        self._since_s = self.last_s = now_s
        self._round_steps += 1

    def end(self, steps: int) -> None:
        """Ends a round. ``steps``: The number of steps in the round's report, because some phases
        call ``tick`` only once per epoch.
        """
        self._finished_steps += max(steps, self._round_steps)
        self._round_steps = 0


# The activities of a party that are timed separately.
ENCODE, WAIT, DECODE, COMPUTE = "encode", "wait", "decode", "compute"


class Clock:
    """Divides the main thread's time in the rounds of a phase among ENCODE, WAIT, DECODE and
    COMPUTE.

    COMPUTE is all time that belongs to no other activity, so the four times add up to the whole. A
    switch takes less than a microsecond.

    ``spent``: For each phase, the seconds of each activity in this process. ``steps``: For each
    phase, the number of steps in this process. Both include repeated rounds. ``cpu``: For each
    phase, the processor time of its rounds in seconds.

    Args:
        used: Returns the processor time of the process so far, in seconds. None if the parties of
            this process take turns: all time without waiting is then processor time.
    """

    def __init__(self, used: Callable[[], float] | None = process_time) -> None:
        self.cpu: dict[str, float] = {}
        self._read_cpu_s, self._cpu_at_start_s = used, 0.0
        self.spent: dict[str, dict[str, float]] = {}
        self.steps: dict[str, int] = {}
        # Time between rounds belongs to no phase.
        self._phase_times: dict[str, float] = _make_zero_times()
        self._activity, self._since_s = COMPUTE, perf_counter()

    def begin(self, phase: str) -> None:
        """Begins a round."""
        self._phase_times = self.spent.setdefault(phase, _make_zero_times())
        self._activity, self._since_s = COMPUTE, perf_counter()
        self._cpu_at_start_s = self._read_cpu_s() if self._read_cpu_s is not None else 0.0

    def to(self, what: str) -> None:
        """Ends the current activity, and begins the activity ``what``."""
        now_s = perf_counter()
        self._phase_times[self._activity] += now_s - self._since_s
        self._activity, self._since_s = what, now_s

    def end(self, phase: str, steps: int) -> None:
        """Ends a round of ``steps`` steps."""
        self.to(COMPUTE)
        self._phase_times = _make_zero_times()
        if self._read_cpu_s is not None:
            self.cpu[phase] = self.cpu.get(phase, 0.0) + self._read_cpu_s() - self._cpu_at_start_s
        self.steps[phase] = self.steps.get(phase, 0) + steps

    def _compute_cpu_s(self, phase: str) -> float:
        if self._read_cpu_s is not None:
            return self.cpu.get(phase, 0.0)
        return sum(seconds for what, seconds in self.spent[phase].items() if what != WAIT)

    def times(self) -> list[PhaseTimes]:
        """Returns the times of all phases, in the order in which the phases began."""
        return [
            PhaseTimes(
                phase=phase,
                steps=self.steps.get(phase, 0),
                encode_s=round(spent[ENCODE], 6),
                wait_s=round(spent[WAIT], 6),
                decode_s=round(spent[DECODE], 6),
                compute_s=round(spent[COMPUTE], 6),
                cpu_s=round(self._compute_cpu_s(phase), 6),
            )
            for phase, spent in self.spent.items()
        ]


def count_time_as(what: str) -> Callable[[Method], Method]:
    """Returns a decorator that counts the time of a method as the activity ``what``. Afterwards the
    clock counts COMPUTE again. The method's object must have a ``clock``.
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


def _make_zero_times() -> dict[str, float]:
    return {ENCODE: 0.0, WAIT: 0.0, DECODE: 0.0, COMPUTE: 0.0}

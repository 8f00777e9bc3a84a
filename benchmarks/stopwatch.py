"""One clock for every contestant: the rate over the measured steps, and the rate of their quiet
quarter.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from typing import Any

from benchmarks.task import Task


class Stopwatch:
    """Times steps: call `lap` when a step of the task begins and `stop` after the last one."""

    def __init__(self, task: Task) -> None:
        self._warmup = task.warmup
        self._begins_s: list[float] = []
        self._cpu_s = 0.0

    def lap(self) -> None:
        """Note that a step begins."""
        if len(self._begins_s) == self._warmup:
            self._cpu_s = _cpu_s()
        self._begins_s.append(time.perf_counter())

    def stop(self) -> dict[str, Any]:
        """Return the fields of a ``done`` line.

        ``steps_per_s``: the rate over all measured steps. ``quiet_steps_per_s``: one over the lower
        quartile of a step's time, which other work on the machine disturbs little.
        ``cpu_s_per_step``: CPU time of this process.
        """
        marks_s = [*self._begins_s[self._warmup :], time.perf_counter()]
        steps = len(marks_s) - 1
        laps_s = [end - begin for begin, end in itertools.pairwise(marks_s)]
        quiet_s = statistics.quantiles(laps_s, n=4)[0] if steps > 1 else laps_s[0]
        return {
            "steps_per_s": steps / (marks_s[-1] - marks_s[0]),
            "quiet_steps_per_s": 1 / quiet_s,
            "cpu_s_per_step": (_cpu_s() - self._cpu_s) / steps,
        }


def _cpu_s() -> float:
    """Return the CPU seconds of this process so far, user and system, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime

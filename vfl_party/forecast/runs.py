"""Groups the steps of a phase into runs: successive steps of the same exchange in a round."""

from __future__ import annotations

from collections import Counter

from vfl_common.bundle import StepKey
from vfl_common.frames import BundleSizes
from vfl_party.forecast.result import StepRun
from vfl_party.outbound.declared import Occurrence


class Runs:
    """Groups the exchanges of one phase, which are added in their order.

    Args:
        in_flight: The maximum number of concurrent steps of the main exchange, or 0 if the phase
            trains nothing.
        parts: The number of steps of the main exchange that make up one batch.
        trains: The name of the main exchange. '' means the first exchange.
    """

    def __init__(self, in_flight: int, parts: int, trains: str = "") -> None:
        self._in_flight, self._parts = in_flight, parts
        # {(exchange, number of steps, byte and message totals): number of rounds}.
        self._counts: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
        self._trains = trains
        self._last_step: tuple[StepKey, str] | None = None
        # The current run: exchange, peer and round.
        self._run: tuple[str, str, int] | None = None
        self._steps = 0
        # The current run's bytes up and down, and messages up and down.
        self._sums = [0, 0, 0, 0]

    def begin(self, occurrence: Occurrence, peer: str) -> None:
        """Begins a new step, unless the exchange belongs to the same step as the previous one."""
        if self._last_step == (occurrence.step, peer):
            return
        self._last_step = occurrence.step, peer
        self._trains = self._trains or occurrence.exchange.name
        run = (occurrence.exchange.name, peer, occurrence.step.round)
        if run != self._run:
            self._end_run()
            self._run = run
        self._steps += 1

    def add(self, size: BundleSizes, parties: int, up: bool) -> None:
        """Adds a message to or from each of ``parties`` parties."""
        place = 0 if up else 1
        self._sums[place] += parties * size.message_bytes
        self._sums[2 + place] += parties * size.messages

    def finish(self) -> tuple[StepRun, ...]:
        """Returns all different runs, with the number of rounds for each."""
        self._end_run()
        is_main = {
            exchange: self._in_flight > 0 and exchange == self._trains
            for exchange, _, _ in self._counts
        }
        return tuple(
            StepRun(
                exchange=exchange,
                trains=is_main[exchange],
                times=times,
                steps=steps,
                in_flight=self._in_flight if is_main[exchange] else 1,
                parts=self._parts if is_main[exchange] else 1,
                up_bytes=sums[0],
                down_bytes=sums[1],
                up_messages=sums[2],
                down_messages=sums[3],
            )
            for (exchange, steps, sums), times in self._counts.items()
        )

    def _end_run(self) -> None:
        if self._run is not None:
            self._counts[self._run[0], self._steps, tuple(self._sums)] += 1
        self._run, self._steps, self._sums = None, 0, [0, 0, 0, 0]

"""Reports a party's progress to the server, to the person at the terminal, and to
``metrics.jsonl``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vfl_common.bundle import Ledger
from vfl_common.files import append
from vfl_common.process.logs import Console, utc
from vfl_common.rpc.messages import Membership, ProgressUpdate, Start
from vfl_common.text import to_json
from vfl_party.base.phase import RoundReport
from vfl_party.base.step_timing import Clock, Steps

log = logging.getLogger(__name__)

# The minimum seconds between two reports within a round.
_TICK_S = 1.0
# The minimum seconds between reports of short rounds. The last round is always reported.
_REPORT_S = 0.25


@dataclass
class RoundStanding:
    """This party's progress so far. Other threads may read it, because values are replaced and
    never changed in place.

    ``round``: The number of finished rounds of ``phase``. ``run_steps``: The training steps since
    the run began, as of the last round. ``reported``: The last phase that had metrics, and these
    metrics. ``without``: The parties that came too late. ``steps``: {phase: the times of its
    steps}.
    """

    generation: int = 0
    phase: str = ""
    round: int = 0
    rounds: int = 0
    run_steps: int = 0
    reported: tuple[str, dict[str, dict[str, float]]] = ("", {})
    without: tuple[str, ...] = ()
    steps: dict[str, Steps] = field(default_factory=dict)


class Progress:
    """Writes one line of ``metrics.jsonl`` for each round, and reports it.

    The line has ``time``, ``generation``, ``phase``, ``round``, ``steps``, ``seconds`` since this
    generation began, ``metrics`` (of split training: the active party's), ``drift`` (see
    ``RoundReport``), and the message bytes sent and received so far.
    """

    def __init__(
        self,
        console: Console,
        session: Membership,
        ledger: Ledger,
        is_active: bool,
        clock: Clock | None = None,
    ) -> None:
        self.standing = RoundStanding()
        # Functions that are called after each round.
        self.watchers: list[Callable[[str, int, int, dict[str, dict[str, float]]], None]] = []
        self.clock = clock if clock is not None else Clock()
        self._steps = Steps()
        self.console, self._session, self._ledger, self._is_active = (
            console,
            session,
            ledger,
            is_active,
        )
        self._path: Path | None = None
        self._generation = 0
        self._began_s = time.monotonic()
        self._next_tick_s = self._began_s + _TICK_S
        self._next_report_s = self._began_s
        self._phase = ""
        self._metrics: dict[str, float] = {}

    def begin(self, path: Path, start: Start) -> None:
        """Begins a generation."""
        self._path, self._generation = path, start.generation
        self.standing.generation, self.standing.without = start.generation, ()
        self._began_s = time.monotonic()
        self.console.emit(
            "started",
            run_id=start.run_id,
            generation=start.generation,
            checkpoint=start.checkpoint or None,
        )

    def begin_round(self, phase: str, round_: int, rounds: int) -> None:
        """Begins a round of the phase. ``round_``: The number of finished rounds."""
        standing = self.standing
        if phase not in standing.steps:
            standing.steps = {**standing.steps, phase: Steps()}
        self._steps = standing.steps[phase]
        self._steps.begin(time.monotonic())
        self.clock.begin(phase)
        standing.phase, standing.round, standing.rounds = phase, round_, rounds

    def tick(self, phase: str, round_: int, rounds: int, batch: int, batches: int) -> None:
        """Counts a step and reports to the server at most once a second. ``round_``: The number of
        finished rounds.
        """
        if phase != self._phase:
            self._phase, self._metrics = phase, {}
        now_s = time.monotonic()
        self._steps.tick(now_s)
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + _TICK_S
            # The run's steps are counted only at the end of a round.
            so_far = self.standing.run_steps
            self._report(
                ProgressUpdate(phase, round_, rounds, batch, batches, so_far, self._metrics)
            )

    def observe(
        self, phase: str, round_: int, rounds: int, steps: int, report: RoundReport
    ) -> None:
        """Writes the line of a finished round, and reports the round if there was no report
        recently.
        """
        self._next_tick_s = time.monotonic() + _TICK_S
        self.clock.end(phase, report.steps)
        named_values = {
            f"{split} {name}": value
            for split, split_metrics in report.metrics.items()
            for name, value in split_metrics.items()
        }
        self._steps.end(report.steps)
        standing = self.standing
        standing.round, standing.run_steps = round_, steps
        standing.reported = (phase, report.metrics) if report.metrics else standing.reported
        standing.without = tuple(dict.fromkeys((*standing.without, *report.without)))
        self._phase = phase
        judged_name = f"validation {report.judged}"
        self._metrics = {
            name: value
            for name, value in named_values.items()
            if name == judged_name or name.partition(" ")[2] in _SHOWN_METRICS
        }
        sent, received = 0, 0
        for entry in self._ledger.entries():
            if entry.direction == "sent":
                sent += entry.message_bytes
            else:
                received += entry.message_bytes
        line: dict[str, Any] = {
            "time": utc(time.time()),
            "generation": self._generation,
            "phase": phase,
            "round": round_,
            "rounds": rounds,
            "steps": steps,
            "seconds": round(time.monotonic() - self._began_s, 4),
            "metrics": report.metrics,
            **({"drift": dict(report.drift)} if report.drift else {}),
            **({"note": report.note} if report.note else {}),
            "sent_bytes": sent,
            "received_bytes": received,
        }
        if self._path is not None:
            append(self._path, to_json(line) + "\n")
        facts = {"phase": phase, "round": round_, "rounds": rounds, "steps": steps}
        log.info("round %d of %d done", round_, rounds, extra={"event": "round", **facts})
        for watch in self.watchers:
            watch(phase, round_, rounds, report.metrics)
        if report.note:
            log.info(report.note, extra={"event": "note", "phase": phase})
        is_empty = not (report.steps or report.metrics or report.note)
        # An idle active party reports nothing, so that the working parties determine the reported
        # progress.
        is_idle = self._is_active and is_empty and rounds > 1
        if (
            report.done
            or report.note
            or round_ == rounds
            or time.monotonic() >= self._next_report_s
        ):
            progress = ProgressUpdate(
                phase, round_, rounds, steps=steps, metrics=self._metrics, note=report.note
            )
            self._report(progress, idle=is_idle)

    def _report(self, progress: ProgressUpdate, *, idle: bool = False) -> None:
        self._next_report_s = time.monotonic() + _REPORT_S
        # A passive party's progress is the active party's, so it is sent only with metrics or a
        # note.
        if (self._is_active and not idle) or progress.metrics or progress.note:
            self._session.progress(progress)
        self.console.emit("progress", **asdict(progress))


_SHOWN_METRICS = frozenset({"loss", "accuracy", "auc", "rmse", "variance_kept"})

"""Contestants take turns on a task (A B C A B C …); medians, ratios, one table, one JSON file."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.task import Task
from vfl_party.base.arithmetic import describe_arithmetic


@dataclass(frozen=True)
class Measurement:
    """The measurement of one contestant's run, after the warm-up, in the process that owns the
    labels.
    """

    steps_per_s: float
    # None: not comparable, the contestant draws its own weights.
    last_loss: float | None
    extra: Mapping[str, float] = field(default_factory=dict)


def measurement(done: Mapping[str, Any]) -> Measurement:
    """Return the measurement in the ``done`` line of a process: the fields of
    `benchmarks.stopwatch` and ``loss``.
    """
    numbers = {
        name: value for name, value in done.items() if name not in ("kind", "steps_per_s", "loss")
    }
    return Measurement(done["steps_per_s"], done["loss"], numbers)


Contestant = Callable[[Task, Path], Measurement]
"""Solves a task in fresh processes, with an empty directory of its own, and returns how fast it was."""


@dataclass(frozen=True)
class Score:
    """All the turns of one contestant on one task."""

    contestant: str
    task: Task
    turns: tuple[Measurement, ...]

    @property
    def steps_per_s(self) -> float:
        """The median over the turns."""
        return statistics.median(turn.steps_per_s for turn in self.turns)

    @property
    def quiet_steps_per_s(self) -> float | None:
        """The median over the turns of the rate in the quiet quarter of the steps; None if it was
        not measured.
        """
        rates = [
            turn.extra["quiet_steps_per_s"]
            for turn in self.turns
            if "quiet_steps_per_s" in turn.extra
        ]
        return statistics.median(rates) if rates else None

    @property
    def spread(self) -> tuple[float, float]:
        """The slowest and the fastest turn, steps per second."""
        rates = [turn.steps_per_s for turn in self.turns]
        return min(rates), max(rates)


def compete(
    contestants: Mapping[str, Contestant],
    tasks: Sequence[Task],
    repeats: int,
    workdir: Path,
    say: Callable[[str], None],
) -> list[Score]:
    """Let every contestant run every task ``repeats`` times, in turns, so that a noisy minute hits
    all alike.

    ``workdir`` receives one directory a run. Raises `RuntimeError` if two contestants end with
    different losses: they did not train the same network.
    """
    # Unwinds, so that a run ends the processes it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scores = []
    for task in tasks:
        turns: dict[str, list[Measurement]] = {name: [] for name in contestants}
        for turn in range(repeats):
            for name, contestant in contestants.items():
                home = workdir / f"{task.name}-{turn}-{name}"
                home.mkdir(parents=True)
                measured = contestant(task, home)
                turns[name].append(measured)
                say(
                    f"{task.name} turn {turn + 1}/{repeats} {name}: "
                    f"{measured.steps_per_s:.1f} steps/s"
                )
        scores += [Score(name, task, tuple(measured)) for name, measured in turns.items()]
        _require_same_losses(task, turns)
    return scores


def _require_same_losses(task: Task, turns: Mapping[str, Sequence[Measurement]]) -> None:
    """Raise if the last loss of any turn is not that of the others, to the noise of float32 sums in
    another order.
    """
    losses = {
        name: measured[0].last_loss
        for name, measured in turns.items()
        if measured and measured[0].last_loss is not None
    }
    # BatchNorm over 64 rows amplifies the rounding of another thread count; the MLP has nothing
    # that does.
    tolerance = 1e-4 if task.bottom == "mlp" else 5e-2
    if losses and max(losses.values()) - min(losses.values()) > tolerance:
        raise RuntimeError(
            f"{task.name}: contestants trained different networks, last losses {losses}"
        )


def print_table(scores: Sequence[Score], reference: str, console: Console) -> None:
    """Print one row a score: median, spread, and the ratio to ``reference`` on the same task."""
    table = Table(
        title="Split learning, steps per second (median of the turns)", title_justify="left"
    )
    for heading in ("task", "K", "B", "E", "contestant"):
        left = heading in ("task", "contestant")
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    for heading in ("steps/s", "min–max", f"vs {reference}", "quiet", f"vs {reference}"):
        table.add_column(heading, justify="right", no_wrap=True)
    references = {score.task: score for score in scores if score.contestant == reference}
    for score in scores:
        task, (low, high) = score.task, score.spread
        base = references.get(task)
        # Fmt: skip.
        table.add_row(
            task.name,
            str(task.parties),
            str(task.batch),
            str(task.embedding),
            score.contestant,
            f"{score.steps_per_s:.2f}",
            f"{low:.1f}–{high:.1f}",
            _ratio(score.steps_per_s, base and base.steps_per_s),
            f"{score.quiet_steps_per_s:.2f}" if score.quiet_steps_per_s else "–",
            _ratio(score.quiet_steps_per_s, base and base.quiet_steps_per_s),
        )
    console.print(table)


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value and base else "–"


def print_bytes(scores: Sequence[Score], console: Console) -> None:
    """Print, for contestants that account for their bytes, the ledger against the payload and
    against the kernel.
    """
    for score in scores:
        extra = score.turns[-1].extra
        if "tcp_over_message" in extra:
            console.print(
                f"{score.task.name}, {score.contestant}: messages / payload "
                f"{extra['message_over_payload']:.4f}, "
                f"kernel's TCP bytes / messages {extra['tcp_over_message']:.4f}"
            )


def to_json(scores: Sequence[Score], costs: Mapping[str, Any]) -> dict[str, Any]:
    """Return every turn of every score and what is needed to judge them, ready for `json.dumps`."""
    return {
        "footprint": dict(costs),
        "machine": {
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "computed_with": str(describe_arithmetic(torch.device("cpu"))),
        },
        "scores": [
            {
                "contestant": score.contestant,
                "task": score.task.to_json(),
                "payload_bytes_per_step": score.task.payload_bytes,
                "steps_per_s": score.steps_per_s,
                "turns": [asdict(turn) for turn in score.turns],
            }
            for score in scores
        ],
    }


def write_json(scores: Sequence[Score], costs: Mapping[str, Any], path: Path) -> None:
    """Write `to_json` to ``path``."""
    path.write_text(json.dumps(to_json(scores, costs), indent=2) + "\n")

"""Shows a federation's progress on standard error: a progress bar at a terminal, otherwise lines of
text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from vfl_common.config.recipe import Recipe
from vfl_common.process.logs import format_interruption
from vfl_common.text import list_names, number

Event = dict[str, Any]
# The validation metrics to show without early stopping; the first available metric is used.
_METRICS = ("accuracy", "rmse", "auc", "loss")
_DOING = {"ready": "starting", "started": "beginning", "lost": "waiting", "restarted": "waiting"}
# Seconds between two lines of progress.
_LINE_S = 1.0


@dataclass
class Track:
    """Tracks the progress of a run by the server's events.

    Args:
        rounds: {phase: its rounds}, if known; events add other phases.
        judged: {phase: the metric of its early stopping}.
    """

    rounds: dict[str, int] = field(default_factory=dict)
    judged: dict[str, str] = field(default_factory=dict)
    phase: str = ""
    # The number of finished rounds of the phase, including the fraction of the current round.
    done: float = 0.0
    # The time of the phase's first event, and ``done`` at that time.
    _began: tuple[float, float] = (0.0, 0.0)
    _within: str = ""
    _metrics: dict[str, float] = field(default_factory=dict)
    # {party: its metrics}, for phases in which each party has a loss.
    _parties: dict[str, dict[str, float]] = field(default_factory=dict)

    def update(self, event: Event, now_s: float) -> None:
        """Processes a progress event. An event within a round has batches, and its ``round`` counts
        from 0. An event after a round counts from 1.
        """
        phase, round_, batches = event["phase"], int(event["round"]), int(event.get("batches") or 0)
        if event.get("rounds"):
            self.rounds[phase] = int(event["rounds"])
        done = round_ + int(event["batch"]) / batches if batches else float(round_)
        # A lower value means that the run has gone back to a checkpoint.
        if phase != self.phase or done < self.done:
            self.phase, self._began = phase, (now_s, done)
        self.done, self._metrics = done, _to_numbers(event.get("metrics", {}))
        parties = event.get("parties", {}).items()
        self._parties = {name: _to_numbers(metrics) for name, metrics in parties}
        self._within = f"batch {event['batch']}/{batches}" if batches else ""

    @property
    def total(self) -> int | None:
        """The rounds of this phase, if known."""
        return self.rounds.get(self.phase)

    def estimate_left_s(self, now_s: float) -> float | None:
        """Estimates the seconds left in the phase at its pace so far; None if unknown."""
        began_s, begin = self._began
        if self.total is None or self.done <= begin or now_s <= began_s:
            return None
        return (now_s - began_s) / (self.done - begin) * max(0.0, self.total - self.done)

    def _format_self_supervised(self) -> list[str]:
        """Returns texts such as ``local loss a -0.71 b -0.69`` and ``variance kept 93%``: the loss
        of each party, and the smallest share of variance that embeddings kept.
        """
        texts, shares = [], []
        for step in ("cross", "local"):
            losses = {n: m[f"{step} loss"] for n, m in self._parties.items() if f"{step} loss" in m}
            if losses:
                text = " ".join(f"{name} {loss:.3g}" for name, loss in losses.items())
                texts.append(f"{step} loss {text}")
                shares += [
                    self._parties[name][f"{step} variance_kept"]
                    for name in losses
                    if f"{step} variance_kept" in self._parties[name]
                ]
        return [*texts, f"variance kept {min(shares):.0%}"] if shares else texts

    def text(self, now_s: float) -> str:
        """Returns the progress as text: ``round 3/20  batch 5/22  validation accuracy 0.94  2 s
        left``.
        """
        current_round = math.ceil(self.done) if self._within else int(self.done)
        texts = [
            f"round {current_round}/{self.total}" if self.total else f"round {current_round}",
            self._within,
        ]
        stopping_metric = self.judged.get(self.phase)
        names = _METRICS if stopping_metric is None else (stopping_metric, *_METRICS)
        shown_names = [
            "train loss",
            *(name for name in (f"validation {m}" for m in names) if name in self._metrics),
        ][:2]
        texts += [
            f"{name} {self._metrics[name]:.3g}" for name in shown_names if name in self._metrics
        ]
        texts += self._format_self_supervised()
        left_s = self.estimate_left_s(now_s)
        if left_s is not None and self.done < (self.total or 0):
            texts.append(f"{left_s:.0f} s left")
        return "  ".join(part for part in texts if part)


def _to_numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: number(value) for name, value in metrics.items()}


def describe_event(event: Event) -> str | None:
    """Returns a sentence about an event; None for progress and for events that are not shown."""
    kind = event["event"]
    if kind == "ready":
        return f"the server listens on {event['address']}; the parties start"
    if kind == "waiting":
        return f"waiting for {list_names(event['missing'])} (at most {event['left_s']:.0f} s more)"
    if kind == "started":
        if event.get("checkpoint"):
            return f"all parties have joined; they resume from checkpoint {event['checkpoint']}"
        return "all parties have joined; they begin"
    if kind == "interrupted":
        return format_interruption(event)
    if kind == "lost":
        return f"{event['party']} {event['how']}"
    if kind == "away":
        return f"{event['party']} {event['how']}; the others go on without it"
    if kind == "back":
        return f"{event['party']} is back"
    if kind == "restarted":
        return f"{event['party']} {event['how']}; restarting it"
    if kind == "note":
        return str(event["note"])
    return None


class View(AbstractContextManager["View"]):
    """The base class of views, which shows nothing."""

    def __init__(self, recipe: Recipe) -> None:
        epochs = {phase.name: phase.settings.get("epochs") for phase in recipe.phases}
        stops = {phase.name: phase.settings.get("early_stopping") for phase in recipe.phases}
        self.track = Track(
            {name: count for name, count in epochs.items() if isinstance(count, int)},
            {
                name: str(rule.get("metric", "loss"))
                for name, rule in stops.items()
                if isinstance(rule, dict)
            },
        )

    def say(self, text: str) -> None:
        """Shows a sentence that stays on the screen."""

    def show(self, event: Event) -> None:
        """Shows one of the server's events."""

    def tick(self) -> None:
        """Updates the estimate of the remaining seconds; called regularly."""

    def __exit__(self, *_: object) -> None:
        """Ends the view at the end of the run."""


class Lines(View):
    """Writes a line for each event, and at most one line per second for progress. It is used if
    standard error is not a terminal.
    """

    def __init__(self, recipe: Recipe, write: Callable[[str], None]) -> None:
        super().__init__(recipe)
        self._write = write
        self._next_s = 0.0

    def say(self, text: str) -> None:
        self._write(text)

    def show(self, event: Event) -> None:
        if event["event"] != "progress":
            text = describe_event(event)
            if text is not None:
                self._write(text)
                # After another event, the earlier pace cannot be used for the estimate.
                self.track.phase = ""
            return
        now_s, before = time.monotonic(), self.track.phase
        self.track.update(event, now_s)
        last = self.track.done == self.track.total
        if now_s >= self._next_s or last or before != self.track.phase:
            self._next_s = now_s + _LINE_S
            self._write(f"{self.track.phase}  {self.track.text(now_s)}")


class Live(View):
    """Shows a spinner, the phase and a progress bar with its numbers at a terminal."""

    def __init__(self, recipe: Recipe, console: Console) -> None:
        super().__init__(recipe)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, text="")
        self._bar.start()

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def show(self, event: Event) -> None:
        if event["event"] == "progress":
            self.track.update(event, time.monotonic())
            self._bar.update(
                self._task,
                description=self.track.phase,
                total=self.track.total,
                completed=self.track.done,
            )
            self.tick()
            return
        text = describe_event(event)
        if text is None:
            return
        if event["event"] in ("interrupted", "lost", "away", "back", "restarted", "note"):
            self.say(text)
        self.track.phase = ""
        self._bar.update(
            self._task,
            description=_DOING.get(event["event"], event["event"]),
            total=None,
            text=text,
        )

    def tick(self) -> None:
        if self.track.phase:
            self._bar.update(self._task, text=self.track.text(time.monotonic()))

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def make_view(recipe: Recipe) -> View:
    """Returns a view for standard error: ``Live`` at a terminal, otherwise ``Lines``."""
    console = Console(stderr=True)
    if console.is_terminal:
        return Live(recipe, console)
    return Lines(
        recipe, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
    )

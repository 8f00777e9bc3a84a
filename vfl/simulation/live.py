"""What a person sees while a federation runs: a moving bar at a terminal, plain lines elsewhere, on standard error."""

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

Event = dict[str, Any]
_METRICS = ("accuracy", "rmse", "auc", "loss")  # of the validation rows, the first that there is
_DOING = {"ready": "starting", "started": "beginning", "lost": "waiting", "restarted": "waiting"}
_LINE_S = 1.0  # between two plain lines of progress


@dataclass
class Track:
    """How far the run is, from the server's progress events.

    Args:
        rounds: {phase: its rounds}, as far as they are known; events tell the others.
    """

    rounds: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    done: float = 0.0  # rounds of the phase, with the fraction of the one under way
    _began: tuple[float, float] = (0.0, 0.0)  # when the phase was first seen, and how far it was then
    _within: str = ""
    _metrics: dict[str, float] = field(default_factory=dict)
    _parties: dict[str, dict[str, float]] = field(default_factory=dict)  # where each has losses of its own

    def update(self, event: Event, now_s: float) -> None:
        """One progress event. Within a round ``round`` counts from 0 and has batches; after a round, from 1."""
        phase, round_, batches = event["phase"], int(event["round"]), int(event.get("batches") or 0)
        if event.get("rounds"):
            self.rounds[phase] = int(event["rounds"])
        done = round_ + int(event["batch"]) / batches if batches else float(round_)
        if phase != self.phase or done < self.done:  # the next phase, or a rollback
            self.phase, self._began = phase, (now_s, done)
        self.done, self._metrics = done, dict(event.get("metrics", {}))
        self._parties = dict(event.get("parties", {}))
        self._within = f"batch {event['batch']}/{batches}" if batches else ""

    @property
    def total(self) -> int | None:
        """Rounds of this phase, where they are known."""
        return self.rounds.get(self.phase)

    def left_s(self, now_s: float) -> float | None:
        """Seconds that the phase still takes at its pace so far; None where nobody can tell."""
        began_s, begin = self._began
        if self.total is None or self.done <= begin or now_s <= began_s:
            return None
        return (now_s - began_s) / (self.done - begin) * max(0.0, self.total - self.done)

    def _self_supervised(self) -> list[str]:
        """``local loss a -0.71 b -0.69  variance kept 93%``: each party's loss, and the least of the others."""
        parts, kept = [], []
        for step in ("cross", "local"):
            found = {name: each for name, each in self._parties.items() if f"{step} loss" in each}
            if found:
                losses = " ".join(f"{name} {each[f'{step} loss']:.3g}" for name, each in found.items())
                parts.append(f"{step} loss {losses}")
                kept += [each[f"{step} variance_kept"] for each in found.values() if f"{step} variance_kept" in each]
        return [*parts, f"variance kept {min(kept):.0%}"] if kept else parts

    def text(self, now_s: float) -> str:
        """``round 3/20  batch 5/22  train loss 0.31  validation accuracy 0.94  2 s left``."""
        under_way = math.ceil(self.done) if self._within else int(self.done)
        parts = [f"round {under_way}/{self.total}" if self.total else f"round {under_way}", self._within]
        shown = ["train loss", *(name for name in (f"validation {m}" for m in _METRICS) if name in self._metrics)][:2]
        parts += [f"{name} {self._metrics[name]:.3g}" for name in shown if name in self._metrics]
        parts += self._self_supervised()
        left_s = self.left_s(now_s)
        if left_s is not None and self.done < (self.total or 0):
            parts.append(f"{left_s:.0f} s left")
        return "  ".join(part for part in parts if part)


def sentence(event: Event) -> str | None:
    """An event that is no progress, in words; None for those that say nothing to a person."""
    kind = event["event"]
    if kind == "ready":
        return f"the server listens on {event['address']}; the parties start"
    if kind == "waiting":
        return f"waiting for {', '.join(event['missing'])} (at most {event['left_s']:.0f} s more)"
    if kind == "started":
        if event.get("checkpoint"):
            return f"all parties are here; they go on from checkpoint {event['checkpoint']}"
        return "all parties are here; they begin"
    if kind == "interrupted":
        return f"interrupted: {event['reason']}; the others wait at most {event['deadline_s']:.0f} s"
    if kind == "lost":
        return f"{event['party']} {event['how']}"
    if kind == "restarted":
        return f"{event['party']} {event['how']}; starting it again"
    if kind == "note":
        return str(event["note"])
    return None


class View(AbstractContextManager["View"]):
    """Shows events; ``tick`` keeps the seconds going between them."""

    def __init__(self, recipe: Recipe) -> None:
        epochs = {phase.name: phase.settings.get("epochs") for phase in recipe.phases}
        self.track = Track({name: count for name, count in epochs.items() if isinstance(count, int)})

    def say(self, text: str) -> None:
        """One sentence that stays."""

    def show(self, event: Event) -> None:
        """One of the server's events."""

    def tick(self) -> None:
        """Now and then."""

    def __exit__(self, *_: object) -> None:
        """The run has ended."""


class Lines(View):
    """A line for each thing that happens, and at most one a second for progress: for files and pipes."""

    def __init__(self, recipe: Recipe, write: Callable[[str], None]) -> None:
        super().__init__(recipe)
        self._write = write
        self._next_s = 0.0

    def say(self, text: str) -> None:
        self._write(text)

    def show(self, event: Event) -> None:
        if event["event"] != "progress":
            text = sentence(event)
            if text is not None:
                self._write(text)
                self.track.phase = ""  # whatever it was, the pace so far says nothing any more
            return
        now_s, before = time.monotonic(), self.track.phase
        self.track.update(event, now_s)
        last = self.track.done == self.track.total
        if now_s >= self._next_s or last or before != self.track.phase:
            self._next_s = now_s + _LINE_S
            self._write(f"{self.track.phase}  {self.track.text(now_s)}")


class Live(View):
    """A spinner, the phase, a bar and its numbers, for a person at a terminal."""

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
                self._task, description=self.track.phase, total=self.track.total, completed=self.track.done
            )
            self.tick()
            return
        text = sentence(event)
        if text is None:
            return
        if event["event"] in ("interrupted", "lost", "restarted", "note"):
            self.say(text)
        self.track.phase = ""
        self._bar.update(self._task, description=_DOING.get(event["event"], event["event"]), total=None, text=text)

    def tick(self) -> None:
        if self.track.phase:
            self._bar.update(self._task, text=self.track.text(time.monotonic()))

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def view(recipe: Recipe) -> View:
    """The view that standard error can show."""
    console = Console(stderr=True)
    if console.is_terminal:
        return Live(recipe, console)
    return Lines(recipe, lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))

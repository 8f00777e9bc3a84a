"""The runs of a model: which of them answers, and how another takes its place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from vfl_common.errors import VflError
from vfl_common.registry import FILE, PRODUCTION, WORDS, ModelRegistry
from vfl_common.text import list_names

# Steps until the previous run answers again; about a second.
STEPS_BEHIND = 5
# Seconds between two checks of the registry, and until a failed load is repeated.
_CHECK_S, _RETRY_S = 0.2, 5.0
# Maximum seconds to wait for the thread at the end.
_END_S = 2.0

log = logging.getLogger(__name__)


class LoadedRun(Protocol):
    """A run that is loaded."""

    @property
    def run_id(self) -> str: ...

    def present(self) -> Sequence[str]:
        """Returns the passive parties that are connected for it; empty at a passive party."""
        ...

    def close(self) -> None:
        """Answers the pending requests and frees the run."""
        ...


R = TypeVar("R", bound=LoadedRun)
Say = Callable[..., None]


class Lineage(Generic[R]):
    """The runs of one model. One thread changes them; any thread may read.

    Args:
        name: The recipe's name.
        runs: The loaded runs; the first answers.
        before: The ids of those of ``runs`` that answered before, with the latest first.
        keep: How many of these stay loaded. Runs that never answered stay too.
        say: Reports an event.
    """

    def __init__(
        self, name: str, runs: Sequence[R], before: Sequence[str], keep: int, say: Say
    ) -> None:
        self.name, self._keep, self._say = name, keep, say
        self._runs = {run.run_id: run for run in runs}
        # The run that answers.
        self.now = runs[0]
        self._recent = [self.now.run_id, *before]
        self._stays = frozenset(self._runs).difference(self._recent)
        self._next: R | None = None
        # The parties that have been connected since the current run started to answer.
        self._attended: set[str] = set()
        self._behind = 0
        self._advice = ""

    @property
    def runs(self) -> Sequence[R]:
        """Returns all loaded runs; the run that answers is the first."""
        current = self.now
        return (current, *(run for run in self._runs.values() if run is not current))

    @property
    def next(self) -> R | None:
        """Returns the run that waits to answer."""
        return self._next

    def find(self, run_id: str) -> R | None:
        """Returns a loaded run by its id; None if it is not loaded."""
        return self._runs.get(run_id)

    def want(self, run_id: str, load: Callable[[], R]) -> None:
        """Makes a run the next one, which answers once ``step`` finds it ready.

        ``load``: Loads the run if it is not loaded. If it raises, nothing changes.
        """
        if run_id == (self._next or self.now).run_id:
            return
        run = self._runs.get(run_id)
        if run is None:
            run = load()
            self._runs = {**self._runs, run_id: run}
        self._next = run if run is not self.now else None

    def step(self) -> None:
        """Switches to the next run once all passive parties of the current run serve it.

        Then closes old runs. Switches back to the previous run if a party connects only for that
        run, because it has not promoted the current one yet.
        """
        self._return_to_previous()
        next_run = self._next
        if next_run is not None:
            attending = next_run.present()
            missing = [party for party in self.now.present() if party not in attending]
            if missing:
                self._wait(next_run.run_id, missing)
                return
            self._switch(next_run, None)
        self._close_old()

    def _return_to_previous(self) -> None:
        """Switches back if a party serves only the previous run for ``STEPS_BEHIND`` steps.

        One step is not enough: a party that starts connects for one run after the other.
        """
        self._attended.update(self.now.present())
        previous = self._runs.get(self._recent[1]) if len(self._recent) > 1 else None
        if self._next is not None or previous is None or set(previous.present()) <= self._attended:
            self._behind = 0
            return
        self._behind += 1
        if self._behind >= STEPS_BEHIND:
            self._switch(previous, self.now)

    def _switch(self, run: R, following: R | None) -> None:
        previous_id, self.now, self._next = self.now.run_id, run, following
        recent = [name for name in self._recent if name != run.run_id]
        self._recent, self._advice = [run.run_id, *recent], ""
        self._attended, self._behind = set(), 0
        self._say("switched", model=self.name, run=run.run_id, before=previous_id)

    def _wait(self, run_id: str, missing: Sequence[str]) -> None:
        serve = "serves" if len(missing) == 1 else "serve"
        text = (
            f"run {run_id} waits until {list_names(missing)} {serve} it; {self.now.run_id} answers"
        )
        if text != self._advice:
            self._advice = text
            self._say("advice", said=text)

    def _close_old(self) -> None:
        self._recent = self._recent[: self._keep + 1]
        next_ids = [self._next.run_id] if self._next is not None else []
        kept_ids = {*self._recent, *self._stays, *next_ids}
        closing = [run for run_id, run in self._runs.items() if run_id not in kept_ids]
        # From here on, no request finds the closed runs.
        self._runs = {run_id: run for run_id, run in self._runs.items() if run_id in kept_ids}
        for run in closing:
            run.close()

    def close(self) -> None:
        """Closes all runs."""
        for run in self.runs:
            run.close()


class Follower(Generic[R]):
    """Watches the registry and switches models to their runs in production.

    Args:
        load: Loads a run by its id. Raises VflError.
        say: Reports an event.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        lines: Sequence[Lineage[R]],
        load: Callable[[str], R],
        say: Say,
    ) -> None:
        self._registry, self._lines, self._load, self._say = registry, lines, load, say
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        # The state of the registry's file at the last check, and when to check again in any case.
        self._file_state: tuple[int, int] | None = None
        self._check_at_s = 0.0
        self._advice = ""

    def watch(self) -> None:
        """Starts a thread that checks the registry."""
        if self._lines:
            self._thread = threading.Thread(target=self._watch, name="follow", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stops the thread, and waits for it for a short time: a run may take long to load."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _watch(self) -> None:
        while not self._ended.wait(_CHECK_S):
            try:
                self.look()
            except Exception:
                # The served runs must continue after any error.
                log.exception("internal error", extra={"event": "failed"})

    def look(self) -> None:
        """Reads which runs are in production, and calls ``step`` for each model."""
        try:
            about = (self._registry.out / FILE).stat()
            file_state: tuple[int, int] | None = (about.st_mtime_ns, about.st_ino)
        except OSError:
            file_state = None
        now_s = time.monotonic()
        if file_state != self._file_state or now_s >= self._check_at_s:
            self._file_state = file_state
            self._check_at_s = float("inf") if self._want_all() else now_s + _RETRY_S
        for line in self._lines:
            line.step()

    def _want_all(self) -> bool:
        """Requests the run in production for each model; returns whether all succeeded."""
        text = ""
        for line in self._lines:
            try:
                self._want_current(line)
            except VflError as error:
                text = f"run {line.now.run_id} answers as before ({error})"
        if text and text != self._advice:
            log.warning("%s", text, extra={"event": "follow"})
            self._say("advice", said=text)
        self._advice = text
        return not text

    def _want_current(self, line: Lineage[R]) -> None:
        registered = self._registry.lines().get(line.name)
        # Without a run in production, the current run continues to answer.
        if registered is None or registered.current is None:
            return
        run_id = registered.current
        line.want(run_id, lambda: self._load(run_id))


@dataclass(frozen=True)
class ChosenRun:
    """A run to serve.

    ``folder``: The run's folder. ``follows``: The recipe's name if the run in production was
    requested: a promoted run replaces it. '' for a run that stays.
    """

    folder: Path
    follows: str = ""


def choose(registry: ModelRegistry, text: str, recipe: Callable[[], str]) -> ChosenRun:
    """Returns the run for an id, a folder, ``production``, ``latest``, ``NAME:production`` or
    ``NAME:latest``. Raises InputError if it does not exist.

    ``recipe``: Returns the name of the recipe that is used without NAME.
    """
    name, _, word = text.rpartition(":")
    if word not in WORDS:
        return ChosenRun(registry.folder(text))
    recipe_name = name or recipe()
    return ChosenRun(registry.folder(word, recipe_name), recipe_name if word == PRODUCTION else "")

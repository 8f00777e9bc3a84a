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
from vfl_common.production.registry import FILE, PRODUCTION, WORDS, ModelRegistry
from vfl_common.text import list_names

# About a second of looks at the registry.
STEPS_BEHIND = 5
# Between two looks, and until a run that could not be loaded is tried again.
_LOOK_S, _AGAIN_S = 0.2, 5.0
_END_S = 2.0

log = logging.getLogger(__name__)


class LoadedRun(Protocol):
    """A run that is loaded."""

    @property
    def run_id(self) -> str: ...

    def present(self) -> Sequence[str]:
        """Returns the passive parties that attend it now; none, if that is not known here."""
        ...

    def close(self) -> None:
        """Answers what was asked, and frees the run."""
        ...


R = TypeVar("R", bound=LoadedRun)
Say = Callable[..., None]


class Lineage(Generic[R]):
    """The runs of one model. One thread changes them; any thread may read.

    Args:
        name: of the recipe.
        runs: those that are loaded: the first answers.
        before: runs of ``runs`` that answered before, the last first.
        keep: how many of these stay ready. What is neither of them nor has ever answered, stays.
        say: reports an event.
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
        # The parties that have attended the run that answers since it does.
        self._attended: set[str] = set()
        self._behind = 0
        self._advice = ""

    @property
    def runs(self) -> Sequence[R]:
        """All runs that are loaded; the one that answers is the first."""
        now = self.now
        return (now, *(run for run in self._runs.values() if run is not now))

    @property
    def next(self) -> R | None:
        """The run that waits to answer."""
        return self._next

    def find(self, run_id: str) -> R | None:
        """Returns a run that is loaded."""
        return self._runs.get(run_id)

    def want(self, run_id: str, load: Callable[[], R]) -> None:
        """Has a run answer as soon as ``step`` finds it ready; loads it, unless it is here.

        Raises what ``load`` does; then all stays as it is.
        """
        if run_id == (self._next or self.now).run_id:
            return
        run = self._runs.get(run_id)
        if run is None:
            run = load()
            self._runs = {**self._runs, run_id: run}
        self._next = run if run is not self.now else None

    def step(self) -> None:
        """Has the next run answer, if all passive parties that attend the present one attend it;
        then closes the runs that are kept no longer. The run before answers again if a party comes
        that attends only that one: it has not promoted the present one yet.
        """
        self._return_to_previous()
        following = self._next
        if following is not None:
            attending = following.present()
            missing = [party for party in self.now.present() if party not in attending]
            if missing:
                self._wait(following.run_id, missing)
                return
            self._switch(following, None)
        self._close_old()

    def _return_to_previous(self) -> None:
        """Has the run before answer again, and the present one wait, if a party that has never
        attended the present one attends that, in ``STEPS_BEHIND`` successive steps: a party that
        starts attends one run after the other.
        """
        self._attended.update(self.now.present())
        before = self._runs.get(self._recent[1]) if len(self._recent) > 1 else None
        if self._next is not None or before is None or set(before.present()) <= self._attended:
            self._behind = 0
            return
        self._behind += 1
        if self._behind >= STEPS_BEHIND:
            self._switch(before, self.now)

    def _switch(self, run: R, following: R | None) -> None:
        before, self.now, self._next = self.now.run_id, run, following
        recent = [name for name in self._recent if name != run.run_id]
        self._recent, self._advice = [run.run_id, *recent], ""
        self._attended, self._behind = set(), 0
        self._say("switched", model=self.name, run=run.run_id, before=before)

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
        following = [self._next.run_id] if self._next is not None else []
        stay = {*self._recent, *self._stays, *following}
        gone = [run for run_id, run in self._runs.items() if run_id not in stay]
        # Nobody finds them any more from here on.
        self._runs = {run_id: run for run_id, run in self._runs.items() if run_id in stay}
        for run in gone:
            run.close()

    def close(self) -> None:
        """Closes all runs."""
        for run in self.runs:
            run.close()


class Follower(Generic[R]):
    """Has lines follow their runs in production.

    Args:
        load: loads the run with this id. Raises VflError.
        say: reports an event.
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
        # As the file was seen last, and until when that is good.
        self._seen: tuple[int, int] | None = None
        self._until_s = 0.0
        self._advice = ""

    def watch(self) -> None:
        """Looks from now on, in a separate thread."""
        if self._lines:
            self._thread = threading.Thread(target=self._watch, name="follow", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the watch, and waits for it, but not for a run that takes long to load."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self.look()
            except Exception:
                # Whatever it is, the runs that are served go on.
                log.exception("internal error", extra={"event": "failed"})

    def look(self) -> None:
        """Looks which runs are in production, and has each line take a step."""
        try:
            about = (self._registry.out / FILE).stat()
            seen: tuple[int, int] | None = (about.st_mtime_ns, about.st_ino)
        except OSError:
            seen = None
        now_s = time.monotonic()
        if seen != self._seen or now_s >= self._until_s:
            self._seen = seen
            self._until_s = float("inf") if self._want_all() else now_s + _AGAIN_S
        for line in self._lines:
            line.step()

    def _want_all(self) -> bool:
        """Returns whether all lines have, or will have, their run in production."""
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
        of = self._registry.lines().get(line.name)
        # If none is in production any more, there is nothing better than what answers now.
        if of is None or of.current is None:
            return
        run_id = of.current
        line.want(run_id, lambda: self._load(run_id))


@dataclass(frozen=True)
class Chosen:
    """A run to serve.

    ``folder``: of the run. ``follows``: the name of the recipe whose run in production this is, so
    that another takes its place when it is promoted; '' for a run that stays.
    """

    folder: Path
    follows: str = ""


def choose(registry: ModelRegistry, text: str, recipe: Callable[[], str]) -> Chosen:
    """Returns the run that is given as an id, a folder, ``production``, ``latest``, or as
    ``NAME:production`` or ``NAME:latest``. Raises InputError if there is none.

    ``recipe``: returns the name of the recipe that is meant without NAME.
    """
    name, _, word = text.rpartition(":")
    if word not in WORDS:
        return Chosen(registry.folder(text))
    of = name or recipe()
    return Chosen(registry.folder(word, of), of if word == PRODUCTION else "")

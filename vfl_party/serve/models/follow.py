"""Follows the registry of models: what is promoted there, or rolled back, is served."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic

from vfl_common.errors import VflError
from vfl_common.production.registry import FILE, ModelRegistry
from vfl_party.serve.models.lineage import Lineage, R, Say

# Between two looks, and until a run that could not be loaded is tried again.
_LOOK_S, _AGAIN_S = 0.2, 5.0
_END_S = 2.0

log = logging.getLogger(__name__)


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
            self._until_s = float("inf") if self._want() else now_s + _AGAIN_S
        for line in self._lines:
            line.step()

    def _want(self) -> bool:
        """Returns whether all lines have, or will have, their run in production."""
        text = ""
        for line in self._lines:
            try:
                self._want_of(line)
            except VflError as error:
                text = f"run {line.now.run_id} answers as before ({error})"
        if text and text != self._advice:
            log.warning("%s", text, extra={"event": "follow"})
            self._say("advice", said=text)
        self._advice = text
        return not text

    def _want_of(self, line: Lineage[R]) -> None:
        of = self._registry.lines().get(line.name)
        # If none is in production any more, there is nothing better than what answers now.
        if of is None or of.current is None:
            return
        run_id = of.current
        line.want(run_id, lambda: self._load(run_id))

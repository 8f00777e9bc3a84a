"""Memory of the processes below this one while a benchmark runs."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from types import TracebackType

import psutil

EVERY_S = 1.0
# Pid: {"pss_mib": the largest, "rss_mib": the largest}.
Seen = dict[str, dict[str, float]]


class Watch:
    """Writes a JSON file at the end: the largest PSS and RSS seen of each process, and of all
    together.

    PSS counts a page that n processes share as 1/n of it, so that the sum over all is what the
    machine must have; RSS counts it whole in each. ``total``: the largest sum. The file keeps what
    an earlier watch has written to it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._ended = path, threading.Event()
        self._seen: Seen = json.loads(path.read_text()) if path.exists() else {}
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._seen, indent=1))

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            total = {"pss_mib": 0.0, "rss_mib": 0.0}
            for process in psutil.Process().children(recursive=True):
                # It has ended.
                with contextlib.suppress(psutil.Error):
                    memory = process.memory_full_info()
                    found = {"pss_mib": memory.pss / 2**20, "rss_mib": memory.rss / 2**20}
                    self._note(str(process.pid), found)
                    total = {key: value + found[key] for key, value in total.items()}
            self._note("total", total)

    def _note(self, name: str, found: dict[str, float]) -> None:
        before = self._seen.get(name, found)
        self._seen[name] = {key: max(value, before[key]) for key, value in found.items()}

"""Start a contestant's processes afresh (never fork), wait for their ready lines, and leave none
behind.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def announce(kind: str, **fields: Any) -> None:
    """Print one line that `Processes.expect` waits for, for example ``{"kind": "ready", "port":
    4711}``.
    """
    print(json.dumps({"kind": kind, **fields}), flush=True)


class Processes:
    """The processes of one run: a context manager that ends, within ``timeout_s``, whatever it
    started.
    """

    def __init__(self, workdir: Path, timeout_s: float) -> None:
        self._workdir = workdir
        self._deadline_s = time.monotonic() + timeout_s
        self._running: dict[str, subprocess.Popen[str]] = {}
        self._lines: dict[str, queue.SimpleQueue[str | None]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for process in self._running.values():
            if error is None:
                try:
                    process.wait(timeout=min(10.0, self._left_s()))
                except subprocess.TimeoutExpired:
                    process.terminate()
            else:
                process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start ``python -m module arguments`` as ``name`` with ``threads`` compute threads; stderr
        goes to a file.
        """
        variables = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        with (self._workdir / f"{name}.err").open("w") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                stdin=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env={**os.environ, **variables, **(environment or {})},
            )
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._running[name], self._lines[name] = process, lines
        threading.Thread(target=_pump, args=(process, lines), daemon=True).start()

    def expect(self, name: str, kind: str) -> dict[str, Any]:
        """Return the next line of ``kind`` that ``name`` announces.

        Raises `RuntimeError` with the last words of the process at fault if it ends before, if
        another process of the run fails, or if the run's time is over.
        """
        while True:
            try:
                line = self._lines[name].get(timeout=min(1.0, self._left_s()))
            except queue.Empty:
                self._require_health(name, kind)
                continue
            if line is None:
                raise RuntimeError(
                    f"{name} ended before it said {kind!r}; {self._last_words(name)}"
                )
            if line.startswith("{"):
                fields: dict[str, Any] = json.loads(line)
                if fields.get("kind") == kind:
                    return fields

    def _require_health(self, name: str, kind: str) -> None:
        """Raise if a process of the run failed or the time is over."""
        for other, process in self._running.items():
            if process.poll() not in (None, 0):
                raise RuntimeError(
                    f"{other} failed while {name} was to say {kind!r}; {self._last_words(other)}"
                )
        if time.monotonic() > self._deadline_s:
            raise RuntimeError(f"{name} did not say {kind!r} in time; {self._last_words(name)}")

    def _last_words(self, name: str) -> str:
        words = (self._workdir / f"{name}.err").read_text()[-2000:]
        return f"its stderr ends with:\n{words}"

    def _left_s(self) -> float:
        return max(0.01, self._deadline_s - time.monotonic())


def _pump(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Move a process's output into a queue; None marks its end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line.strip())
    lines.put(None)

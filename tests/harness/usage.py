"""Measures processes on Linux: memory, open files and threads, from /proc."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PROC = Path("/proc")


@dataclass(frozen=True)
class Usage:
    """What one process uses. ``rss_mib`` counts shared pages whole, ``pss_mib`` divided by those
    who share them.
    """

    # Of the monotonic clock.
    time_s: float
    rss_mib: float
    pss_mib: float
    files: int
    threads: int


def usage(pid: int) -> Usage | None:
    """Measures a process; None if it has ended."""
    process = PROC / str(pid)
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()[1:]
        kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        files = len([*(process / "fd").iterdir()])
        threads = len([*(process / "task").iterdir()])
    except (FileNotFoundError, ProcessLookupError):
        return None
    # It is ending.
    if "Rss" not in kib:
        return None
    return Usage(time.monotonic(), kib["Rss"] / 1024, kib["Pss"] / 1024, files, threads)


def descendants(pid: int) -> dict[int, list[str]]:
    """Returns {process: its arguments} of a process and of all that it, and those, have started."""
    children: dict[int, list[int]] = {}
    arguments: dict[int, list[str]] = {}
    for process in PROC.iterdir():
        if not process.name.isdigit():
            continue
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(process.name))
        arguments[int(process.name)] = words
    found, left = {}, [pid]
    while left:
        each = left.pop()
        found[each] = arguments.get(each, [])
        left += children.get(each, [])
    return found


def folder_mib(folder: Path) -> float:
    """Returns the size of all files in a folder; a file that goes away meanwhile does not count."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total / 2**20


class Sampler:
    """Measures processes again and again in a thread, while the block runs.

    ``of``: returns {name: process} of those that are there now. ``samples``: {name: what was
    measured}.
    """

    def __init__(self, of: Callable[[], Mapping[str, int]], every_s: float) -> None:
        self._of, self._every_s = of, every_s
        self.samples: dict[str, list[Usage]] = {}
        # Of all together.
        self.peak_pss_mib = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            found = {name: usage(pid) for name, pid in self._of().items()}
            together = 0.0
            for name, each in found.items():
                if each is not None:
                    self.samples.setdefault(name, []).append(each)
                    together += each.pss_mib
            self.peak_pss_mib = max(self.peak_pss_mib, together)

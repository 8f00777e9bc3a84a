"""Runs of a party that only write into its record, for tests of the account."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vfl_common.bundle import Buffer, Bundle, DType, Kind, StepKey
from vfl_party.base.mechanism import Mechanism
from vfl_party.record.book import RecordBook
from vfl_party.record.heads import HeadExchange
from vfl_party.record.recorder import RecordedRun, Recorder

WIDTH = 2


class Run:
    """One generation of a run. ``ids``: of its table, in the order of the rows' numbers."""

    def __init__(
        self, folder: Path, run: str, ids: Iterable[str], *, generation: int = 1, **more: Any
    ) -> None:
        book = RecordBook(folder, "p1")
        self.recorder = Recorder(
            book,
            HeadExchange(book, _no_credentials),
            RecordedRun(run, generation, more.pop("job", "train"), "0" * 64),
            keys={},
            **more,
        )
        self.recorder.people(ids, "aligned")

    def send(
        self,
        rows: Sequence[int] | None,
        *,
        cost: Mechanism | None = None,
        to: str = "p0",
        exchange: str = "embedding",
        width: int = WIDTH,
    ) -> None:
        """Tells of rows, with ``width`` numbers of each."""
        count = (len(rows) if rows is not None else 1) * width
        data = memoryview(bytearray(np.zeros(count, np.float32).tobytes()))
        self.recorder.leaves(
            (exchange, "up", "z", "chain", "", cost.text if cost is not None else ""),
            StepKey("splitnn", 0, 0),
            Bundle(Kind.EMBEDDING, {"z": Buffer(DType.FLOAT32, (count,), data)}),
            (to,),
            numbers=count,
            rows=rows,
        )

    def step(self, cost: Mechanism, steps: int, of: str, to: Sequence[str] = ("p0", "p2")) -> None:
        """Takes the private step with this number."""
        self.recorder.spends("head", cost.text, steps, of, to)

    def close(self) -> None:
        self.recorder.book.close()


def _no_credentials() -> Any:
    raise AssertionError("nothing is signed here")


def in_process(work: Callable[[], None]) -> int:
    """Runs ``work`` in a process of its own; returns how it ended, as ``os.waitpid`` says."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - a fork must not go on in the test
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def die() -> None:
    """Ends this process as a kill from outside would."""
    os.kill(os.getpid(), signal.SIGKILL)

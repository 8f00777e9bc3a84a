"""One private alignment of two tables, by a server and two parties in processes of their own, and
what it costs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vfl.simulation.federation import Federation
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.files import read_lines
from vfl_common.summary import load_summary
from vfl_party.align import state
from vfl_party.psi.curve import POINT_BYTES

ACTIVE, PASSIVE = "bank", "shop"
PARTIES = (ACTIVE, PASSIVE)
RUN = "run"
POLL_S = 0.25
_LIMIT_S = 7200.0


@dataclass(frozen=True)
class Cost:
    """What an alignment took.

    ``seconds``: from the first party's start of the run, when it has read its table and met the
    others, to the last party's end of the alignment. It holds the start of the workers, and all
    rounds, tags and comparisons. ``run_s``: until all processes have ended, from their start.
    ``bytes_an_id``: of all messages, each counted once. ``peak_mib``: {process: its largest
    resident memory in the run}, of workers too; ``anonymous_mib``: likewise, what the kernel cannot
    take back, as it is seen every quarter of a second. ``masked``: ids that the parties gave to be masked,
    over those that have to be; 0 if not counted.
    """

    ids: int
    seconds: float
    run_s: float
    bytes_an_id: float
    peak_mib: dict[str, float]
    masked: float
    anonymous_mib: dict[str, float]


def write_tables(ids: int, folder: Path, **settings: Any) -> dict[str, DataSettings]:
    """Writes two tables, half in common, each in an order of its own; returns {party: its data},
    with the same ``settings`` for both.
    """
    found = {}
    for number, name in enumerate(PARTIES):
        drawn = np.random.default_rng(number)
        rows = drawn.permutation(ids) + number * (ids // 2)
        columns: dict[str, Any] = {
            "id": [f"customer-{row:09d}" for row in rows.tolist()],
            f"x{number}": drawn.standard_normal(ids).astype(np.float32),
        }
        label = {"label": "y"} if name == ACTIVE else {}
        if label:
            columns["y"] = drawn.integers(0, 2, ids)
        path = folder / f"{name}.parquet"
        pq.write_table(pa.table(columns), path)
        found[name] = parse(
            DataSettings, {"source": str(path), "id": "id", **label, **settings}, name
        )
    return found


def recipe(ids: int, engine: str = "x25519") -> dict[str, Any]:
    """Returns tables of a recipe that aligns, and then does as little as it can: one step, of few
    rows, so that the largest memory is that of the alignment.
    """
    few = min(256, ids // 2)
    return {
        "name": "psi",
        "seed": 1,
        "task": {"kind": "binary"},
        "rows": {
            "align": "psi",
            "psi": {"engine": engine},
            "validation": 0.0,
            "test": 0.0,
            "labelled": few,
        },
        "parties": [{"name": ACTIVE, "role": "active"}, {"name": PASSIVE, "role": "passive"}],
        "model": {"embedding_size": 1, "encoder": {"kind": "mlp", "hidden": [1]}},
        "phases": [
            {
                "kind": "splitnn",
                "epochs": 1,
                "batch_size": few,
                "optimizer": {"kind": "sgd", "lr": 0.1},
            }
        ],
        "run": {"rejoin_deadline_s": 60.0},
        "simulate": {"parties": {}},
    }


class Run:
    """The processes of one run: a context manager that ends them all."""

    def __init__(
        self,
        ids: int,
        data: dict[str, DataSettings],
        folder: Path,
        engine: str = "x25519",
        *,
        count: bool = False,
    ) -> None:
        self._ids, self._folder, self._out = ids, folder, folder / "runs"
        self._counted = folder / "masked" if count else None
        tables = recipe(ids, engine)
        tables["simulate"]["parties"] = {
            name: each.model_dump(exclude_defaults=True) for name, each in data.items()
        }
        self._files = Federation(
            parse(Recipe, tables, "recipe"), self._out, folder / "federation", data, folder
        )
        self._files.write(tables)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._began_s, self._address = time.monotonic(), ""
        self._peaks: dict[tuple[str, int], float] = {}
        self._anonymous: dict[tuple[str, int], float] = {}
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._watching, daemon=True)

    def __enter__(self) -> Run:
        self._watch.start()
        self._start_server()
        for name in PARTIES:
            self.start(name)
        return self

    def _start_server(self) -> None:
        address = self._address or "127.0.0.1:0"
        args = ["vfl-server", "run", str(self._files.recipe_path), "--listen", address]
        args += [
            "--ca",
            str(self._files.folder / "certs" / "ca.pem"),
            "--out",
            str(self._out),
            "--run-id",
            RUN,
        ]
        server = self._start("server", ["vfl.launcher.child", *args], stdout=subprocess.PIPE)
        assert server.stdout is not None
        for line in server.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                self._address = event["address"]
                break
        threading.Thread(target=server.stdout.read, daemon=True).start()

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._watch.join()
        for process in self._processes.values():
            process.kill()
            process.wait()

    def start(self, name: str) -> None:
        """Starts a party, or the server again; it resumes if it was killed."""
        if name == "server":
            self._start_server()
            return
        self._files.write_party(name, self._address)
        program = (
            ["vfl.launcher.child"]
            if self._counted is None
            else ["benchmarks.psi_counted", str(self._counted)]
        )
        self._start(name, [*program, "vfl-party", "run", str(self._files.party_path(name))])

    def _start(
        self, name: str, args: Sequence[str], stdout: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.err").open("ab") as errors:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", *args],
                # It ends when we are gone.
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        return self._processes[name]

    def kill(self, name: str) -> None:
        """Kills a party as a power cut does."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def is_running(self) -> bool:
        """Whether a process has not ended."""
        return any(process.poll() is None for process in self._processes.values())

    def find_workers(self, name: str) -> list[int]:
        """Returns the processes that a party has started."""
        pids: list[int] = []
        # The party may have ended.
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self._processes[name].pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        return pids

    def share(self, name: str) -> float:
        """Returns the share of a party's masking that is done and kept."""
        points = sum(each.stat().st_size for each in self._kept(name).glob("*.points"))
        return points / POINT_BYTES / (len(PARTIES) * self._ids)

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until ``until`` holds. Raises RuntimeError if a process fails, or if it takes too
        long.
        """
        give_up_s = time.monotonic() + _LIMIT_S
        while True:
            is_over = until()
            failed = [
                name for name, each in self._processes.items() if each.poll() not in (None, 0)
            ]
            if failed:
                raise RuntimeError(
                    f"{failed[0]}: {(self._folder / f'{failed[0]}.err').read_text()[-2000:]}"
                )
            if is_over:
                return
            if time.monotonic() >= give_up_s:
                raise RuntimeError("the run does not end")
            time.sleep(POLL_S / 5)

    def finish(self) -> Cost:
        """Waits for all to end. Raises RuntimeError if the rows that were found are not those in
        common.
        """
        self.wait(lambda: all(each.poll() is not None for each in self._processes.values()))
        run_s = time.monotonic() - self._began_s
        self._verify()
        # A party removes its secrets when the alignment is over, which is the last change to the
        # folder.
        ended_s = max(self._kept(name).stat().st_mtime for name in PARTIES)
        summary = load_summary(self._out / RUN / "summary.json")
        asked = 0
        if self._counted is not None:
            asked = sum(map(int, self._counted.read_text().split()))
        return Cost(
            self._ids,
            ended_s - min(map(self._started_s, PARTIES)),
            run_s,
            summary.bytes.by_phase["align"].message_bytes / self._ids,
            {f"{name} {pid}": peak for (name, pid), peak in self._peaks.items()},
            asked / (len(PARTIES) ** 2 * self._ids),
            {f"{name} {pid}": most for (name, pid), most in self._anonymous.items()},
        )

    def _verify(self) -> None:
        """The ids sort by their number: the second half of the one table is the first half of the
        other.
        """
        half = self._ids // 2
        for name in PARTIES:
            bits = np.frombuffer((self._kept(name) / "common.bits").read_bytes()[32:], np.uint8)
            expected = np.zeros(self._ids, bool)
            expected[slice(half, None) if name == ACTIVE else slice(0, self._ids - half)] = True
            if not np.array_equal(np.unpackbits(bits, count=self._ids).astype(bool), expected):
                raise RuntimeError(f"{name} has found other rows than those in common")

    def _started_s(self, name: str) -> float:
        events = (json.loads(line) for line in read_lines(self._out / RUN / name / "log.jsonl"))
        return next(
            datetime.fromisoformat(each["time"]).timestamp()
            for each in events
            if each["event"] == "started"
        )

    def _kept(self, name: str) -> Path:
        return self._out / RUN / name / state.FOLDER

    # -- memory
    # ----------------------------------------------------------------------

    def _watching(self) -> None:
        """Notes each process's largest resident memory, as the kernel counts it."""
        while not self._ended.wait(POLL_S):
            for name, process in list(self._processes.items()):
                self._note(name, process.pid)
                for below in self.find_workers(name):
                    self._note(f"{name}'s worker", below)

    def _note(self, name: str, pid: int) -> None:
        # It has ended.
        with contextlib.suppress(OSError, StopIteration):
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            for key, found in (("VmHWM:", self._peaks), ("RssAnon:", self._anonymous)):
                now = next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))
                found[name, pid] = max(now, found.get((name, pid), 0.0))

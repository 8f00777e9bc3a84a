"""Real runs of ``benchmarks.wan``: processes, whose passive parties reach the active one through an
emulated link.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.studies import ACTIVE, Tables
from benchmarks.wan_tasks import PHASE, Line, Setting, Tasks
from vfl.forecasting.network import BatchWork
from vfl.launcher.forks import Launcher
from vfl.launcher.processes import Process, end_all
from vfl.simulation.federation import Federation
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe, divide
from vfl_common.files import read_lines
from vfl_common.summary import Summary, load_summary

_START_S, _RUN_S = 120.0, 1500.0


@dataclass(frozen=True)
class Timed:
    """One real run over a link. ``share``: payload bytes of the fuller direction, as a share of
    what the link carries.

    ``step_s``: mean of the epochs after the first; ``seconds``: of the whole training, connecting
    included; ``forecast_s``: what ``vfl forecast`` says of the same steps, with the computation
    that was measured, and the cores of this machine, which all parties and the emulated link share.
    """

    task: str
    line: str
    setting: str
    epochs: int
    steps: int
    seconds: float
    step_s: float
    step_bytes: float
    share: float
    forecast_s: float
    # Share of the active party's time.
    waits: float


@dataclass
class Emulated:
    """A link's address; ``cpu_s``: the processor time that it took, once it has ended."""

    address: str
    cpu_s: float = 0.0


@contextmanager
def slow_link(line: Line, target: str) -> Iterator[Emulated]:
    """Runs the emulated link as a process of its own."""
    command = [sys.executable, "-m", "benchmarks.link", "--target", target]
    command += ["--rate", line.rate, "--latency", line.latency]
    root = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    link = Emulated(json.loads(process.stdout.readline())["address"])
    process.stdin.write("counts\n")
    process.stdin.flush()
    before_s = json.loads(process.stdout.readline())["cpu_s"]
    try:
        yield link
    finally:
        # It ends by itself then.
        process.stdin.close()
        said = process.stdout.read().splitlines()
        link.cpu_s = json.loads(said[-1])["cpu_s"] - before_s
        process.wait(timeout=10)
        process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Run:
    """The processes of one run, of which the passive parties reach the active one through a
    link.
    """

    def __init__(self, tables: Tables, folder: Path, launcher: Launcher) -> None:
        self.out, self._logs, self._launcher = folder / "runs", folder / "logs", launcher
        recipe = parse(Recipe, tables, "recipe")
        self._names = [party.name for party in recipe.parties]
        self._files = Federation(
            recipe, self.out, folder / "federation", divide(recipe, folder), folder
        )
        self._files.write(tables)

    def through(self, line: Line) -> tuple[Summary, Emulated]:
        """Runs to the end; returns the link, too. Raises RuntimeError if a process fails, or if it
        takes too long.
        """
        target, processes = f"127.0.0.1:{free_port()}", dict[str, Process]()
        with slow_link(line, target) as link:
            try:
                events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
                args = [
                    "vfl-server",
                    "run",
                    str(self._files.recipe_path),
                    "--listen",
                    "127.0.0.1:0",
                    "--fresh",
                ]
                args += [
                    "--ca",
                    str(self._files.folder / "certs" / "ca.pem"),
                    "--out",
                    str(self.out),
                ]
                processes["server"] = self._process("server", [*args, "--run-id", "run"], events)
                while (event := events.get(timeout=_START_S))["event"] != "ready":
                    pass
                for name in self._names:
                    self._write_party(name, event["address"], target, link.address)
                    path = self._files.party_path(name)
                    processes[name] = self._process(
                        name, ["vfl-party", "run", str(path), "--fresh"]
                    )
                self._wait(list(processes.values()))
            finally:
                end_all(list(processes.values()))
        return load_summary(self.out / "run" / "summary.json"), link

    def rounds(self) -> list[tuple[int, float]]:
        """Returns (steps so far, seconds since the generation began) at the end of each epoch."""
        lines = map(json.loads, read_lines(self.out / "run" / ACTIVE / "metrics.jsonl"))
        return [(line["steps"], line["seconds"]) for line in lines if line["phase"] == PHASE]

    def _write_party(self, name: str, server: str, target: str, address: str) -> None:
        """Writes a party file; the active party listens at ``target`` and names ``address`` to the
        others.
        """
        self._files.write_party(name, server)
        if name == ACTIVE:
            path = self._files.party_path(name)
            path.write_text(f'listen = "{target}"\nadvertise = "{address}"\n{path.read_text()}')

    def _process(
        self, name: str, args: list[str], events: queue.SimpleQueue[dict[str, Any]] | None = None
    ) -> Process:
        return Process(
            name, args, self._logs / name, threads=1, events=events, launcher=self._launcher
        )

    @staticmethod
    def _wait(processes: Sequence[Process]) -> None:
        give_up_s = time.monotonic() + _RUN_S
        while any(each.status is None for each in processes):
            failed = [each for each in processes if each.status not in (None, 0)]
            if failed or time.monotonic() >= give_up_s:
                raise RuntimeError(
                    f"{failed[0].name}: {failed[0].sentence()}"
                    if failed
                    else "the run does not end"
                )
            time.sleep(0.05)


def time_run(
    tasks: Tasks, name: str, setting: Setting, line: Line, epochs: int, launcher: Launcher
) -> Timed:
    """Runs seed 1 over the link for ``epochs`` epochs, and reads what it took."""
    epochs = max(2, epochs)
    tables = tasks.tables(name, setting, 1, epochs, held_out=False)
    with tempfile.TemporaryDirectory(prefix="vfl-wan-") as folder:
        run = Run(tables, Path(folder), launcher)
        summary, link = run.through(line)
        rounds = run.rounds()
    (first_steps, first_s), (steps, seconds) = rounds[0], rounds[-1]
    step_s = (seconds - first_s) / (steps - first_steps)
    links = [link for link in summary.bytes.by_link if link.phase == PHASE]
    fuller = max(
        sum(link.payload_bytes for link in links if (link.sender == ACTIVE) is down)
        for down in (True, False)
    )
    network = line.network
    times = {
        party.name: next(each for each in party.times if each.phase == PHASE)
        for party in summary.parties[1:]
    }
    busy = {party: of.busy_s / of.steps for party, of in times.items()}
    others = max(each for party, each in busy.items() if party != ACTIVE)
    own = times[ACTIVE]
    cpu_s = sum(of.cpu_s for of in times.values()) / own.steps + link.cpu_s / steps
    return Timed(
        name,
        line.name,
        setting.name,
        epochs,
        steps,
        seconds,
        step_s,
        sum(link.message_bytes for link in links) / steps,
        fuller / steps * 8 / network.bandwidth / step_s,
        tasks.forecast_s(
            name, setting, line, epochs, BatchWork(busy[ACTIVE] + others, max(busy.values()), cpu_s)
        ),
        own.wait_s / (own.busy_s + own.wait_s),
    )

"""Starts the real programs as processes, on loopback and free ports, and waits for their events.

    with Federation(tmp_path, recipe) as federation:
        federation.start_all()
        summary = federation.finish()

Every wait is bounded; only processes started here are ended, by their own handle.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from torch import Tensor

from tests.harness import ports
from tests.harness.errors import error_line
from tests.harness.preloaded import float64
from tests.harness.sharing import (
    ADDRESS,
    FRESH,
    HERE,
    MACHINES,
    Joined,
    preloaded,
    program_environment,
)
from vfl.certs.authority import create_authority, issue
from vfl.launcher.child import PROGRAMS
from vfl.launcher.forks import Forked, Launcher
from vfl_common.bundle import Entry, load_entries
from vfl_party.base.checkpoint import CheckpointStore

# They bound a wait that never ends. Nothing is promised of the time that a busy machine needs: with ten
# processes a core, three installed programs took more than 120 s to start.
START_S = 180.0
RUN_S = 300.0
BIN = Path(sys.executable).parent
# See ``preloaded``.
FORKED = (*PROGRAMS, "ip", "torchrun", "vfl")


@functools.cache
def launcher(machine: str = HERE) -> Launcher:
    """Makes the one launcher of a machine for all tests of a process."""
    path = os.environ.get(ADDRESS[machine])
    found = Joined(path) if path is not None else preloaded(machine)
    atexit.register(found.close)
    return found


class Program:
    """One process; ``events`` has the JSON lines of its standard output as they come, ``stderr``
    all of its errors.
    """

    def __init__(
        self,
        name: str,
        args: list[str],
        cwd: Path,
        *,
        fresh: bool = True,
        environment: dict[str, str] | None = None,
        machine: str = HERE,
    ) -> None:
        self.name, self.args = name, args
        self.events: list[dict[str, Any]] = []
        self._new: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._stderr = (cwd / f"{name}.stderr").open("w+")
        self.process: subprocess.Popen[bytes] | Forked
        self._alive: int | None = None
        ours, stdout = os.pipe()
        if fresh or Path(args[0]).name not in FORKED:
            self.process = subprocess.Popen(
                float64.started_with_it(args) if float64.is_on() else args,
                cwd=cwd,
                stdout=stdout,
                stderr=self._stderr,
                env=(environment or program_environment()) | MACHINES[machine],
            )
        else:
            stdin, self._alive = os.pipe()
            stderr = self._stderr.fileno()
            words = ["plugged", environment["PYTHONPATH"], *args] if environment else args
            words = ["float64", *words] if float64.is_on() else words
            self.process = launcher(machine).start(
                words, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr
            )
            os.close(stdin)
        os.close(stdout)
        self._stdout: TextIO = os.fdopen(ours, encoding="utf-8")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._stdout:
            try:
                self._new.put(json.loads(line))
            except json.JSONDecodeError:
                self._new.put({"event": "text", "text": line})
        self._new.put(None)

    def wait_for(self, event: str, timeout_s: float = RUN_S, **facts: Any) -> dict[str, Any]:
        """Waits for the next event of this name that has at least these facts; fails if the program
        ends first.
        """
        give_up_s = time.monotonic() + timeout_s
        while True:
            try:
                found = self._new.get(timeout=max(0.0, give_up_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"{self.name}: no {event} within {timeout_s} s; {self.stderr}"
                ) from None
            if found is None:
                self._new.put(None)
                raise AssertionError(f"{self.name} ended before {event}: {self.stderr}")
            self.events.append(found)
            if found["event"] == event and all(
                found.get(key) == value for key, value in facts.items()
            ):
                return found

    @property
    def pid(self) -> int:
        """The process's number; only the launcher knows that of a fork."""
        assert isinstance(self.process, subprocess.Popen)
        return self.process.pid

    def wait(self, timeout_s: float = RUN_S) -> int:
        """Waits for the exit code and returns it."""
        return self.process.wait(timeout=timeout_s)

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process is gone."""
        self.process.kill()
        self.process.wait(timeout=10)

    def stop(self) -> None:
        """Ends the process if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.kill()

    def close(self) -> None:
        self.stop()
        self._reader.join(timeout=5)
        self._stdout.close()
        self._stderr.close()
        if self._alive is not None:
            os.close(self._alive)
            self._alive = None

    def signal(self, number: int) -> None:
        """Sends a signal, such as SIGSTOP or SIGCONT."""
        self.process.send_signal(number)

    def seen(self) -> list[dict[str, Any]]:
        """Returns all events of a program that has ended."""
        self._reader.join(timeout=5)
        with contextlib.suppress(queue.Empty):
            while (found := self._new.get_nowait()) is not None:
                self.events.append(found)
            self._new.put(None)
        return self.events

    @property
    def stderr(self) -> str:
        return Path(self._stderr.name).read_text()


def refused(program: Program, *names: str, code: int = 2) -> str:
    """Expects a program to end with one sentence, worded as before; returns the sentence.

    Args:
        program: the program, which may still run.
        names: what the sentence names: files, keys, parties, values.
        code: the exit code.
    """
    assert program.wait(START_S) == code, program.stderr
    assert program.stderr.count("\n") == 1, program.stderr
    sentence = error_line(program.stderr)
    for name in names:
        assert name in sentence, f"{name!r} is not in: {sentence}"
    return sentence


def reason_to_wait(program: Program, party: str) -> str:
    """Waits until a program says why it waits for ``party`` alone; returns the reason."""
    while not (why := program.wait_for("waiting", missing=[party]).get("why")):
        pass
    return str(why)


def toml(value: Any) -> str:
    """Writes nested dicts, lists and scalars as a TOML document (with inline tables below the top
    level).
    """
    return "\n".join(f"{key} = {_inline(item)}" for key, item in value.items()) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{json.dumps(str(key))} = {_inline(item)}" for key, item in value.items())
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return json.dumps(value)


@dataclass
class Federation:
    """A server and the parties of ``recipe`` (a dict, as in TOML), in ``folder``.

    ``data``: {party: its [data] table}; ``extra``: {party: more keys of its party file}. The
    programs are forked from one process that has imported them (see ``vfl.launcher.forks``) unless
    ``fresh``. ``machines``: {party: the machine on which it is started next}, see ``sharing``.
    """

    folder: Path
    recipe: dict[str, Any]
    data: dict[str, dict[str, Any]]
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)
    address: str = ""
    server_options: tuple[str, ...] = ()
    fresh: bool = FRESH
    machines: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        return [party["name"] for party in self.recipe["parties"]]

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        certs = self.folder / "certs"
        if not certs.exists():
            create_authority(certs, "test")
            for name in [*self.names, "server"]:
                issue(certs, name)
        (self.folder / "recipe.toml").write_text(toml(self.recipe))
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.programs.values():
            program.close()

    def write_party(self, name: str) -> Path:
        """Writes the party file, with the server's current address."""
        file: dict[str, Any] = {
            "name": name,
            "recipe": "recipe.toml",
            "server": self.address,
            "tls": {
                "ca": "certs/ca.pem",
                "certificate": f"certs/{name}.pem",
                "key": f"certs/{name}.key",
            },
            "data": self.data[name],
            # So that runs can be compared.
            "init": "recipe",
        }
        if any(
            each["name"] == name and each["role"] == "active" for each in self.recipe["parties"]
        ):
            file["listen"] = ports.address()
        if any(phase.get("key_bits") == 1024 for phase in self.recipe["phases"]):
            # A trial on one machine may have short keys.
            file["trees"] = {"least_key_bits": 1024}
        path = self.folder / f"{name}.toml"
        path.write_text(toml(file | self.extra.get(name, {})))
        return path

    def start_server(self, listen: str | None = None) -> Program:
        args = [
            str(BIN / "vfl-server"),
            "run",
            "recipe.toml",
            "--listen",
            listen or ports.address(),
            *self.server_options,
        ]
        program = self._start("server", args)
        self.address = program.wait_for("ready", START_S)["address"]
        return program

    def start_party(self, name: str, *options: str) -> Program:
        path = self.write_party(name)
        return self._start(name, [str(BIN / "vfl-party"), "run", path.name, *options])

    def start_all(self) -> None:
        """Starts the server, then all parties."""
        self.start_server()
        for name in self.names:
            self.start_party(name)

    def start(self, name: str, *args: str, environment: dict[str, str] | None = None) -> Program:
        """Starts a program under a name of its own; ``environment``: with PYTHONPATH, as
        ``plugins.environment``.
        """
        return self._start(name, [str(BIN / args[0]), *args[1:]], environment)

    def _start(
        self, name: str, args: list[str], environment: dict[str, str] | None = None
    ) -> Program:
        if name in self.programs:
            self.programs[name].close()
        self.programs[name] = Program(
            name,
            args,
            self.folder,
            fresh=self.fresh,
            environment=environment,
            machine=self.machines.get(name, HERE),
        )
        return self.programs[name]

    def finish(self, timeout_s: float = RUN_S) -> dict[str, Any]:
        """Waits for all to end well; returns the run's summary."""
        for name, program in self.programs.items():
            code = program.wait(timeout_s)
            assert code == 0, f"{name} ended with {code}: {program.stderr}"
        found: dict[str, Any] = json.loads((self.run_folder / "summary.json").read_text())
        return found

    @property
    def run_folder(self) -> Path:
        """The folder of the one run."""
        (folder,) = (path for path in (self.folder / "runs").glob("[!.]*") if path.is_dir())
        return folder

    def parameters(self, name: str) -> dict[str, Tensor]:
        """Returns {``encoder.0.weight``: tensor}: all weights and buffers of a party's newest
        checkpoint.
        """
        models = self.checkpoint(name)["job"]["models"]
        return {
            f"{model}.{key}": value
            for model, state in models.items()
            for key, value in state.items()
        }

    def checkpoint(self, name: str, which: int = -1) -> Any:
        """Loads one of a party's checkpoints, by default the newest, as the runner wrote it."""
        return self._store(name).load(self.checkpoint_labels(name)[which])

    def checkpoint_labels(self, name: str) -> list[str]:
        return self._store(name).labels()

    def wait_for_checkpoint(self, label: str, timeout_s: float = RUN_S) -> None:
        """Waits until every party has written this checkpoint: one that is ahead proves nothing
        about the others.
        """
        give_up_s = time.monotonic() + timeout_s
        while missing := [name for name in self.names if label not in self.checkpoint_labels(name)]:
            ended = [name for name in missing if self.programs[name].process.poll() is not None]
            assert not ended, (
                f"{ended[0]} ended before checkpoint {label}: {self.programs[ended[0]].stderr}"
            )
            assert time.monotonic() < give_up_s, (
                f"{', '.join(missing)}: no checkpoint {label} within {timeout_s} s"
            )
            time.sleep(0.01)

    def _store(self, name: str) -> CheckpointStore:
        return self.store(self.run_folder, name)

    def store(self, run: Path, name: str) -> CheckpointStore:
        """Opens a party's checkpoints of a run."""
        return CheckpointStore(run / name / "checkpoints", keep=2)

    def ledger(self, name: str) -> list[Entry]:
        return load_entries(self.run_folder / name / "ledger.json")

"""The programs that ``benchmarks.serve`` measures: a served model of scikit-learn's digits, whose
columns two parties hold, and the same model in two FastAPI processes written by hand.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from sklearn.datasets import load_digits

import vfl

PARTIES = ("p0", "p1")
ROWS = 1_797
IDS = [f"K-{number}" for number in range(ROWS)]
_TICKS_S = 1 / os.sysconf("SC_CLK_TCK")


def trained(folder: Path) -> vfl.Run:
    """Trains two parties of 32 columns each; writes their files. Returns the run."""
    images = load_digits()
    data = {}
    for at, name in enumerate(PARTIES):
        columns = range(32 * at, 32 * at + 32)
        frame = pd.DataFrame(images.data[:, columns], columns=[f"pixel_{j}" for j in columns])
        frame.insert(0, "id", IDS)
        if name == "p0":
            frame["label"] = images.target
        source = folder / f"{name}.csv"
        frame.to_csv(source, index=False)
        data[name] = vfl.Data(str(source), id="id", label="label" if name == "p0" else None)
    recipe: dict[str, Any] = {
        "name": "served",
        "seed": 1,
        "task": {"kind": "multiclass", "classes": 10},
        "parties": [{"name": "p0", "role": "active"}, {"name": "p1", "role": "passive"}],
        "model": {"embedding_size": 32, "encoder": {"kind": "mlp", "hidden": [128]}},
        "phases": [{"kind": "splitnn", "epochs": 5, "batch_size": 64}],
    }
    vfl.Recipe.from_dict(recipe).save(folder / "recipe.toml")
    return vfl.simulate(recipe, data=data, out=folder / "f" / "runs", quiet=True)


@dataclass
class Programs:
    """What answers at ``url``; ``by_name``: {party: its program}."""

    url: str = ""
    by_name: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, name: str, words: list[str], cwd: Path, stack: ExitStack) -> Any:
        """Starts a program, which ends with ``stack``; returns it."""
        program = subprocess.Popen(
            [sys.executable, "-m", *words], cwd=cwd, stdout=subprocess.PIPE, text=True
        )
        self.by_name[name] = program

        def end() -> None:
            # It may be frozen.
            program.send_signal(signal.SIGCONT)
            program.terminate()
            program.wait(20)

        stack.callback(end)
        return program

    def cpu_s(self) -> float:
        """Returns the processor time of all programs."""
        found = 0.0
        for each in self.by_name.values():
            told = Path(f"/proc/{each.pid}/stat").read_text().rpartition(")")[2].split()
            found += _TICKS_S * (int(told[11]) + int(told[12]))
        return found

    def rss_mib(self) -> dict[str, float]:
        """Returns the resident memory of each program."""
        found = {}
        for name, each in self.by_name.items():
            lines = Path(f"/proc/{each.pid}/status").read_text().splitlines()
            (kib,) = [line.split()[1] for line in lines if line.startswith("VmRSS")]
            found[name] = int(kib) / 1024
        return found


@dataclass
class Ours:
    """Starts both parties' programs, as often as is wanted.

    ``latency_ms``: one way, between the two; 0: they are next to each other.
    """

    folder: Path
    run: vfl.Run
    stack: ExitStack
    latency_ms: int = 0
    programs: Programs = field(default_factory=Programs)

    def start_all(self) -> Programs:
        """Starts both, and waits until they answer together."""
        listen = f"127.0.0.1:{random.SystemRandom().randint(10_000, 32_000)}"
        if not (self.folder / "certs").exists():
            for making in (["ca"], ["issue", *PARTIES, "server"]):
                where = ["--out" if making == ["ca"] else "--ca", "certs"]
                words = [sys.executable, "-m", "vfl", "certs", *making, *where]
                subprocess.run(words, cwd=self.folder, check=True, capture_output=True)
        dialled = self._link(listen) if self.latency_ms else listen
        roles = {"p0": f'listen = "{listen}"', "p1": f'active = "{dialled}"'}
        for name in PARTIES:
            self._write(name, roles[name])
        self.programs.url = self.start("p0")["http"]
        self.start("p1")
        return self.programs

    def start(self, name: str) -> dict[str, Any]:
        """Starts a party's program; returns what it says when it is ready."""
        words = ["vfl_party", "serve", f"{name}.toml", "--run", self.run.folder.name]
        program = self.programs.start(name, words, self.folder, self.stack)
        wanted = "ready" if name == "p0" else "attending"
        event: dict[str, Any] = {}
        while event.get("event") != wanted:
            event = json.loads(program.stdout.readline())
        return event

    def _link(self, target: str) -> str:
        """Starts a slow link to an address; returns its own address."""
        words = ["benchmarks.link", "--target", target, "--rate", "1Gbit/s"]
        program = subprocess.Popen(
            [sys.executable, "-m", *words, "--latency", f"{self.latency_ms}ms"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.stack.callback(program.wait, 20)
        self.stack.callback(program.stdin.close)  # type: ignore[union-attr]
        told: dict[str, str] = json.loads(program.stdout.readline())  # type: ignore[union-attr]
        return told["address"]

    def _write(self, name: str, role: str) -> None:
        label = ', label = "label"' if name == "p0" else ""
        (self.folder / f"{name}.toml").write_text(
            f'name = "{name}"\nrecipe = "recipe.toml"\nserver = "127.0.0.1:1"\n{role}\n'
            f'out = "f/runs"\n'
            f'tls = {{ ca = "certs/ca.pem", certificate = "certs/{name}.pem", '
            f'key = "certs/{name}.key" }}\n'
            f'data = {{ source = "{name}.csv", id = "id"{label} }}\n'
            'serve = { http = "127.0.0.1:0", asked_a_day = 1_000_000_000 }\n'
        )


def by_hand(folder: Path, stack: ExitStack) -> Programs:
    """Starts the two programs that were written by hand."""
    found = Programs()
    for name in reversed(PARTIES):
        words = ["benchmarks.serve_by_hand", name, str(folder)]
        program = found.start(
            name, [*words, *([found.url] if found.url else [])], Path.cwd(), stack
        )
        found.url = json.loads(program.stdout.readline())["url"]
    return found

"""docs/tutorials/first-federation.md as it stands: from two raw tables in two folders to a model,
scores and a report.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import vfl
from tests.harness.federation import BIN, Program
from tests.harness.here import vfl_here
from tests.harness.sharing import FRESH, program_environment
from vfl.launcher.child import PROGRAMS

REPO = Path(__file__).parents[2]
GUIDE = REPO / "docs" / "tutorials" / "first-federation.md"
# SHOP_AS_EXCEL in it: which file the shop has.
DATA = REPO / "examples" / "first-federation" / "make_data.py"
PLACES = ("bank", "shop")
PORT = "127.0.0.1:7000"
MOST_COMMANDS = 12
# Of a party file.
MOST_LINES = 12
COMMAND_S = 120.0
RUN_S = 240.0


@dataclass(frozen=True)
class Command:
    """A line of a block of the guide. ``background``: the terminal goes on at once."""

    place: str
    line: str

    @property
    def background(self) -> bool:
        return self.line.endswith("&")

    @property
    def goes_on(self) -> bool:
        """Whether the command waits for others, so that the person goes to the other terminal
        meanwhile.
        """
        return self.background or re.match(r"vfl-party (run|predict)", self.line) is not None


def commands() -> list[Command]:
    block = r'^```sh title="(\w+)"\n(.*?)^```'
    blocks = re.findall(block, GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [Command(place, line) for place, text in blocks for line in text.splitlines()]


def shown() -> list[str]:
    """The lines of output that the guide shows."""
    blocks = re.findall(r"^```text\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


@dataclass
class Terminals:
    """A terminal in each folder; ``port`` takes the place of the guide's if that one is in use on
    this machine.
    """

    folder: Path
    port: str = PORT
    said: str = ""
    foreground: dict[str, Program] = field(default_factory=dict)
    background: list[Program] = field(default_factory=list)
    programs: list[Program] = field(default_factory=list)

    def type(self, command: Command) -> None:
        """Types a command: first the terminal's own command must have ended, and a server before
        the next one.
        """
        if command.place in self.foreground:
            finish([self.foreground.pop(command.place)])
        if command.background:
            finish(self.background)
        words = shlex.split(command.line.removesuffix("&").replace(PORT, self.port))
        cwd = self.folder / command.place
        if not command.goes_on:
            done = run_here(words, cwd)
            assert done.returncode == 0, (
                f"{command.place}$ {command.line}\n{done.stdout}{done.stderr}"
            )
            self.said += done.stdout
            return
        fresh = FRESH or words[0] not in PROGRAMS
        program = Program(
            f"terminal-{len(self.programs)}", [str(BIN / words[0]), *words[1:]], cwd, fresh=fresh
        )
        self.programs.append(program)
        if command.background:
            self.background.append(program)
        else:
            self.foreground[command.place] = program

    def close(self) -> None:
        for program in self.programs:
            program.close()


def run_here(words: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end: in this process, which has imported all, unless programs are to be
    fresh.
    """
    if not FRESH and words[0] == "vfl":
        return vfl_here(*words[1:], cwd=cwd)
    return subprocess.run(
        [str(BIN / words[0]), *words[1:]],
        cwd=cwd,
        env=program_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


def finish(programs: list[Program]) -> None:
    for program in programs:
        assert program.wait(RUN_S) == 0, program.stderr
    programs.clear()


def free(address: str) -> str:
    """Returns the address, or another one on this machine if it is in use."""
    host, _, port = address.partition(":")
    for wanted in (int(port), 0):
        with socket.socket() as listener:
            try:
                listener.bind((host, wanted))
            except OSError:
                continue
            return f"{host}:{listener.getsockname()[1]}"
    raise AssertionError("no port is free")


def alone(folder: Path) -> float:
    """The AUC of the active party by itself, on the rows of the federation."""
    tables: dict[str, Any] = tomllib.loads((folder / "bank" / "recipe.toml").read_text())
    data = {
        name: tomllib.loads((folder / name / f"{name}.toml").read_text())["data"] for name in PLACES
    }
    own = {
        name: settings | {"source": str(folder / name / settings["source"])}
        for name, settings in data.items()
    }
    run = vfl.simulate(tables | {"simulate": {"parties": own}}, baseline="alone", quiet=True)
    return run.metrics["test"]["auc"]


def test_the_guide_is_short() -> None:
    found = commands()
    assert {command.place for command in found} == set(PLACES)
    assert 8 <= len(found) <= MOST_COMMANDS
    # Nothing is written by hand.
    assert "```toml" not in GUIDE.read_text()
    for command in found:
        assert not set(command.line) & set(";|>"), "one command a line"
        assert "&&" not in command.line


@pytest.mark.slow
def test_from_two_tables_to_scores(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DATA)], cwd=tmp_path, timeout=COMMAND_S, check=True)
    given = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert given == {tmp_path / place / f"{place}.csv" for place in PLACES}
    terminals = Terminals(tmp_path, free(PORT))
    try:
        for command in commands():
            terminals.type(command)
        finish([*terminals.foreground.values(), *terminals.background])
    finally:
        terminals.close()

    said = terminals.said.splitlines()
    assert [line for line in shown() if line not in said] == []
    digests = re.findall(r"digest ([0-9a-f]{64}) ", terminals.said)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    for place in PLACES:
        assert len((tmp_path / place / f"{place}.toml").read_text().splitlines()) <= MOST_LINES
    assert not (tmp_path / "shop" / "certs" / "ca.key").exists()

    run = vfl.Run.load(tmp_path / "bank" / "runs" / "first")
    joint, own = run.metrics["test"]["auc"], alone(tmp_path)
    (together,) = re.findall(r"`(vfl simulate bank\.toml \S+)`", GUIDE.read_text())
    tried = run_here([*shlex.split(together), "--json"], tmp_path / "bank")
    assert tried.returncode == 0, tried.stderr
    # A rehearsal divides the rows alike and grows the same trees, up to rounding.
    assert json.loads(tried.stdout.splitlines()[-1])["metrics"]["test"]["auc"] > 0.81
    assert joint > 0.81
    assert own < 0.78
    assert (run.folder / "report.html").exists()
    # In the report.
    assert re.search(rf"^test .* {joint:.4g}", terminals.said, re.MULTILINE)

    with (tmp_path / "bank" / "scores.csv").open(newline="") as file:
        scores = list(csv.DictReader(file))
    with (tmp_path / "bank" / "bank.csv").open(newline="") as file:
        assert [row["customer"] for row in scores] == [
            row["customer"] for row in csv.DictReader(file)
        ]
    scored = [row for row in scores if row["state"] == "scored"]
    assert len({row["matched_customer"] for row in scored}) == len(scored) == 1_600
    assert {row["class"] for row in scored} == {"yes", "no"}
    assert {row["class"] for row in scores} == {"yes", "no", ""}

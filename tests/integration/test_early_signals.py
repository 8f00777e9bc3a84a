"""A program that is signalled while it still starts: it ends as one that was stopped.

Python reports each import as it ends (``-X importtime``), so a test knows how far the program is.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import cases
from tests.harness.federation import Federation
from tests.harness.sharing import program_environment

# Imports that have ended since click's, which come after ``end_at_once``; a party has about 1800.
MOMENTS = (0, 40, 90, 150, 230, 330, 470, 640, 850, 1100, 1350, 1600)

# A signal between the opening of a file and its ``with`` leaves the file to the garbage collector,
# in Python's own library, too; users see no warning of it.
HUSHED = {"PYTHONWARNINGS": "default,ignore::ResourceWarning"}


@pytest.fixture(scope="module")
def party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a party whose server does not answer."""
    folder = tmp_path_factory.mktemp("early")
    with Federation(folder, cases.recipe(2), cases.digits(2)) as federation:
        federation.address = "127.0.0.1:9"
        return federation.write_party("p1")


def signalled(args: list[str], cwd: Path, after: int, number: signal.Signals) -> tuple[int, str]:
    """Runs a program and signals it after some imports; returns the exit code and what it said."""
    command = [sys.executable, "-X", "importtime", *args]
    with subprocess.Popen(
        command,
        cwd=cwd,
        env=program_environment() | HUSHED,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            said, imported = "", -1
            for line in process.stderr:
                if not line.startswith("import time:"):
                    said += line
                elif imported >= 0 or line.split("|")[-1].strip() == "click":
                    imported += 1
                    if imported == after:
                        process.send_signal(number)
        finally:
            process.kill()
    assert imported >= after, f"the program has ended before: {said}"
    return process.returncode, said


@pytest.mark.parametrize("after", MOMENTS)
def test_a_party_that_is_signalled_while_it_starts_was_stopped(after: int, party: Path) -> None:
    number = (signal.SIGINT, signal.SIGTERM)[MOMENTS.index(after) % 2]
    args = ["-m", "vfl_party", "run", party.name, "--wait", "3"]
    code, said = signalled(args, party.parent, after, number)
    assert (code, said.strip()) in ((-number, ""), (130, "stopped")) or (
        code == 130 and said.strip().startswith("stopped: ")
    ), said


@pytest.mark.parametrize("after", [0, 60, 200])
def test_ctrl_c_at_once_leaves_no_traceback_of_vfl(after: int, party: Path) -> None:
    code, said = signalled(["-m", "vfl", "demo"], party.parent, after, signal.SIGINT)
    assert code in (-signal.SIGINT, 130)
    assert "Traceback" not in said


SWALLOWS = """
import os, signal, sys, click
from pathlib import Path
from vfl_common.process.program import run_program

Path("loses.py").write_text('''
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
    sum(range(1000))
except BaseException:
    print("lost", flush=True)
finally:
    print("whole", flush=True)
''')
sys.path.insert(0, ".")

@click.command()
def command():
    import loses
    signal.pause()

run_program(command, "program")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_an_import_comes_after_it(number: signal.Signals, tmp_path: Path) -> None:
    """A module that catches everything would lose it, and one that does not would stay half."""
    program = [sys.executable, "-c", SWALLOWS.format(name=number.name)]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (130, "whole\n")
    assert ended.stderr.strip() == "stopped"


LONG = """
import signal, sys, click
from pathlib import Path
from vfl_common.process import signals
from vfl_common.process.program import run_program

# As on a machine on which an import takes longer than signals are delayed.
signals._MAX_IMPORT_S = 0.0
Path("catches.py").write_text('''
import os, signal
try:
    os.kill(os.getpid(), signal.{name})
    sum(range(1000))
except BaseException:
    print("caught", flush=True)
''')
sys.path.insert(0, ".")

@click.command()
def command():
    try:
        import catches
        signal.pause()
    finally:
        sum(range(50_000_000))
        print("cleaned up", flush=True)

run_program(command, "program")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_long_import_catches_is_raised_again(
    number: signal.Signals, tmp_path: Path
) -> None:
    """It does not interrupt what a program does at its end."""
    program = [sys.executable, "-c", LONG.format(name=number.name)]
    ended = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (130, "caught\ncleaned up\n")
    assert ended.stderr.strip() == "stopped"


TURNS = """
import os, signal, click
from vfl_common.process.program import run_program

class Names:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), signal.{name})
        sum(range(1000))

@click.command()
def command():
    type("Made", (), {{"names": Names()}})

run_program(command, "program")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_which_python_makes_another_error_is_a_stop(number: signal.Signals) -> None:
    program = [sys.executable, "-c", TURNS.format(name=number.name)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr.strip()) == (130, "stopped")

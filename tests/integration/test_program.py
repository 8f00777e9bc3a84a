"""How a program ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.errors import assert_names
from vfl_common.errors import Code, PeerError
from vfl_common.process.program import explain_resuming, run_for_status
from vfl_common.process.signals import Stopped

EVIL = "p1 sent\x1b[2J\r\nerror: forged"
PROGRAM = """
import atexit, click, os
from vfl_common.process.program import do_last, run_program
from vfl_common.process.signals import Stopped

@click.command()
def command():
    print("said", end="")
    atexit.register(print, ", taken down")
    do_last(lambda: os.write(1, b", noted"))
    {end}

run_program(command, "program")
"""


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [("return 3", 3, ""), ("raise Stopped('a rank is lost')", 130, "stopped: a rank is lost\n")],
)
def test_a_program_leaves_the_interpreter_as_it_is_and_keeps_what_was_said(
    end: str, code: int, told: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "said, noted", told)


@pytest.mark.parametrize(("private", "modes"), [(True, "0o700 0o600"), (False, "0o755 0o644")])
def test_what_a_program_makes_is_its_user_s_alone_and_its_memory_is_dumped_nowhere(
    private: bool, modes: str, tmp_path: Path
) -> None:
    make = "os.mkdir('runs'); open('log', 'w'); print(*(oct(os.stat(each).st_mode & 0o777) for each in ('runs', 'log')))"
    end = f"{make}; import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
    text = PROGRAM.format(end=end).replace('"program")', f'"program", private={private})')
    shell = ["sh", "-c", 'umask 022; ulimit -c hard; exec "$0" -c "$1"', sys.executable, text]
    ended = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.stdout == f"said{modes}\n(0, 0)\n, noted", ended.stderr


def test_a_program_without_standard_output_ends_with_its_code() -> None:
    shell = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, PROGRAM.format(end="return 3")]
    ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize(
    "error", [PeerError(Code.STEP_OUT_OF_ORDER, EVIL, party="p1"), ValueError(EVIL)]
)
def test_an_error_is_one_line_whatever_a_peer_wrote_into_it(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert run_for_status(fail) == (1 if isinstance(error, ValueError) else 2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.isprintable()
    assert last.startswith("error: ")
    assert last.endswith("p1 sent [2J  error: forged")


def test_too_little_memory_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise MemoryError

    assert run_for_status(fail) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert_names(said, "columns")


@pytest.mark.parametrize(
    ("stop", "fresh", "said"),
    [
        (KeyboardInterrupt(), False, "stopped: the same command resumes the run"),
        (Stopped(), True, "stopped: the same command without --fresh resumes the run"),
        (Stopped("a rank is lost"), False, "stopped: a rank is lost"),
    ],
)
def test_who_stops_a_program_reads_how_the_run_goes_on(
    stop: BaseException, fresh: bool, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        with explain_resuming(fresh=fresh):
            raise stop

    assert run_for_status(run) == 130
    assert capsys.readouterr().err == f"{said}\n"


WAITS = """
import click, queue, signal
from vfl_common.process.program import run_program

@click.command()
def command():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])  # another thread gets it: the wait is not interrupted
    print("waiting", flush=True)
    queue.SimpleQueue().get()

run_program(command, "program")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_does_not_interrupt_the_wait_of_the_main_thread_is_heeded(
    number: signal.Signals,
) -> None:
    """As one does not that comes just before the wait begins, which no test can time."""
    program = [sys.executable, "-c", WAITS.format(name=number.name)]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(number)
            _, told = process.communicate(timeout=30)
        finally:
            process.kill()
    # After Ctrl-C click begins a new line.
    assert (process.returncode, told.strip()) == (130, "stopped")

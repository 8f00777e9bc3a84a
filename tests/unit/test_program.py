"""How a program ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from vfl_common.errors import Code, PeerError
from vfl_common.program import Stopped, exit_status, resumable

EVIL = "p1 sent\x1b[2J\r\nerror: forged"
PROGRAM = """
import atexit, click, os
from vfl_common.program import Stopped, do_last, run_program

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
def test_a_program_leaves_the_interpreter_as_it_is_and_keeps_what_was_said(end: str, code: int, told: str) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "said, noted", told)


def test_a_program_without_standard_output_ends_with_its_code() -> None:
    shell = ["sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, PROGRAM.format(end="return 3")]
    ended = subprocess.run(shell, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize("error", [PeerError(Code.STEP_OUT_OF_ORDER, EVIL, party="p1"), ValueError(EVIL)])
def test_an_error_is_one_line_whatever_a_peer_wrote_into_it(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert exit_status(fail) == (1 if isinstance(error, ValueError) else 2)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.isprintable()
    assert last.startswith("error: ")
    assert last.endswith("p1 sent [2J  error: forged")


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
        with resumable(fresh=fresh):
            raise stop

    assert exit_status(run) == 130
    assert capsys.readouterr().err == f"{said}\n"


WAITS = """
import click, queue, signal
from vfl_common.program import run_program

@click.command()
def command():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])  # another thread gets it: the wait is not interrupted
    print("waiting", flush=True)
    queue.SimpleQueue().get()

run_program(command, "program")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_does_not_interrupt_the_wait_of_the_main_thread_is_heeded(number: signal.Signals) -> None:
    """As one does not that comes just before the wait begins, which no test can time."""
    program = [sys.executable, "-c", WAITS.format(name=number.name)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(number)
            _, told = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, told.strip()) == (130, "stopped")  # after Ctrl-C click begins a new line

"""Settings of all tests."""

import os

# Read when a library is loaded. Several workers share the cores: with a thread a core each, all
# take twice as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.core import OPTIONAL, REPO, is_left_out

# Machines are shared: how long drawing an example takes says nothing about our code.
settings.register_profile(
    "shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared machine")

# The modules and test items of a worker live until its end. Looking through them again and again
# for garbage would take a fifth of the time of collecting, and some of every test's.
gc.set_threshold(20_000, 20, 50)

# A shell starts background jobs with SIGINT ignored, and so would be every program that a test
# sends one.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns two workers more than there are cores: they wait for programs. Two cores then idle
    for a twentieth. Tests of units wait for nothing: ``make unit`` asks for as many as there are
    logical cores.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return cores if config.option.numprocesses == "logical" else cores + 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--core",
        action="store_true",
        help="leave out the tests of satellites, documents and deployment files that did not change",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    # None lets other plug-ins decide.
    return (config.option.core and is_left_out(collection_path)) or None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = [name for name in OPTIONAL if is_left_out(REPO / name)]
    if terminalreporter.config.option.core and left_out:
        terminalreporter.write_line(
            f"--core left out, because nothing changed there: {', '.join(left_out)}. Run them with make test-all."
        )


def pytest_configure(config: pytest.Config) -> None:
    """Lets workers share a launcher. In a process that runs tests, tables are read once."""
    fresh = "VFL_TEST_FRESH" in os.environ
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput") and not fresh:
        from tests.harness.sharing import MACHINES, Shared

        for machine in MACHINES:
            config.add_cleanup(Shared(machine).close)
    else:
        from tests.harness.preloaded.remembered import remember

        remember()


def pytest_sessionstart() -> None:
    """Computes on several threads, if ``scripts/try-machines`` asks for them."""
    if "VFL_TESTS_THREADS" in os.environ:
        from tests.harness.preloaded.threads import several_threads

        several_threads()


def pytest_collection_finish() -> None:
    """Keeps the garbage collector away from all that is there before the first test."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def float64() -> Iterator[None]:
    """Computes and exchanges in float64, in this process and in the programs that it starts."""
    from tests.harness.preloaded import float64

    with float64.float64():
        yield


@pytest.fixture(autouse=True)
def _onednn_as_it_was() -> Iterator[None]:
    """Turns oneDNN on again: bfloat16 on a CPU turns it off for the process, and a reference would
    differ then.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is not None and not torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.set_flags(True)

"""Runs ``make test-all`` for CI, and repeats the tests that failed, if they are few.

    python3 -m scripts.ci_tests

At most three failed tests run again, alone in one process, twice. If they pass both times, the exit code is 0 and the
last lines name them as unstable. Every other failure gives exit code 1: more failed tests, a test that fails again, an
error in collection, a worker that crashed, a check that failed, a time limit that passed.

The same module is the plug-in of pytest that records node ids: ``make test-all`` loads it through ``PYTEST_REPORT``.
The first part therefore imports the standard library alone: it runs before ``make`` has created the environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

FAILED_MAX, REPEATS = 3, 2
SUITE_S, REPEAT_S = 62 * 60.0, 8 * 60.0  # CI ends after 90 minutes, installation included.
END_S = 30.0  # The time that an interrupted pytest gets to print its summary.


@dataclass
class Outcome:
    """The result of one pytest run.

    Attributes:
        passed: node ids of the tests that passed.
        failed: node ids of the tests that failed, in setup and teardown, too.
        broken: errors beside failed tests: in collection, in pytest itself, of workers.
        closing: the counts of pytest's closing line.
    """

    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    closing: str = ""


class Recorder:
    """Records the outcome of a pytest run, in the process that controls the workers."""

    def __init__(self, path: Path) -> None:
        self._path, self._outcome, self._began_s = path, Outcome(), time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._outcome.failed.append(report.nodeid)
        elif report.passed and report.when == "call":
            self._outcome.passed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._outcome.broken.append(f"collection of {report.nodeid or 'the tests'}")

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        if error:
            self._outcome.broken.append(f"worker {node.gateway.id}: {error}")

    def pytest_internalerror(self, excrepr: object) -> None:
        self._outcome.broken.append(f"pytest: {excrepr}")

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        outcome = self._outcome
        if exitstatus not in (0, 1):
            outcome.broken.append(f"pytest ended with exit status {int(exitstatus)}")
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        counts = ", ".join(text for text, _ in reporter.build_summary_stats_line()[0])
        outcome.closing = f"{counts} in {time.monotonic() - self._began_s:.2f}s"
        outcome.failed = list(dict.fromkeys(outcome.failed))
        outcome.passed = [test for test in outcome.passed if test not in outcome.failed]
        self._path.write_text(json.dumps(asdict(outcome)))


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--outcome", type=Path, help="write the outcome of the run into this file")


def pytest_configure(config: Any) -> None:
    if config.option.outcome and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.option.outcome))


def run(
    command: Sequence[str],
    outcome: Path,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    output: IO[bytes] | None = None,
) -> Outcome:
    """Runs a command that runs pytest; returns the outcome that the plug-in has recorded.

    The command starts a session: the processes that it has started end with it, also after ``limit_s`` seconds.
    """
    outcome.unlink(missing_ok=True)
    process = subprocess.Popen(
        command, start_new_session=True, env=environment, stdout=output, stderr=output
    )
    errors = []
    try:
        code = process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        errors = [f"{shlex.join(command[:3])} took longer than {limit_s:g} s"]
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=END_S)
        code = 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result = Outcome(**json.loads(outcome.read_text())) if outcome.exists() else Outcome()
    result.broken += errors
    if code != 0 and not (result.failed or result.broken):
        result.broken.append(
            f"{shlex.join(command[:3])} ended with exit code {code}, and no test failed"
        )
    return result


def verdict(first: Outcome, repeats: Sequence[Outcome]) -> list[str]:
    """Returns why the run fails; nothing if all that failed first has passed in each repeat."""
    reasons = [error for outcome in (first, *repeats) for error in outcome.broken]
    if len(first.failed) > FAILED_MAX:
        reasons.append(f"{len(first.failed)} tests failed; at most {FAILED_MAX} are repeated")
    for number, outcome in enumerate(repeats, 1):
        missing = [test for test in first.failed if test not in outcome.passed]
        reasons += [f"repeat {number}: {test} did not pass" for test in missing]
    return reasons


def main() -> int:
    repeats: list[Outcome] = []
    python = str(Path(os.environ.get("VENV", ".venv"), "bin", "python"))  # As in the Makefile.
    with tempfile.TemporaryDirectory(prefix="ci-tests-") as folder:
        path = Path(folder, "outcome.json")
        options = ["-p", "scripts.ci_tests", f"--outcome={path}"]
        first = run(["make", "test-all", f"PYTEST_REPORT={shlex.join(options)}"], path, SUITE_S)
        reasons = verdict(first, ())
        while first.failed and not reasons and len(repeats) < REPEATS:
            print(f"repeat {len(repeats) + 1} of {REPEATS}: {first.failed}", flush=True)
            again = [python, "-m", "pytest", "--numprocesses", "0", *options, *first.failed]
            repeats.append(run(again, path, REPEAT_S))
            reasons = verdict(first, repeats)
    if not (first.failed or reasons):
        return 0
    lines = [f"{'failed' if reasons else 'unstable'}: {test}" for test in first.failed]
    lines += [f"error: {reason}" for reason in reasons]
    if not reasons:
        lines.append(f"All of them passed {REPEATS} times alone. See tests/unstable.md.")
    print(*lines, first.closing, sep="\n", flush=True)
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())

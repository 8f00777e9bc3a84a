"""A plug-in of pytest: tells each test's end at once, so that the end of the time loses no failure."""

from __future__ import annotations

import pytest

from benchmarks.gpu.tell import tell


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tells how a test has ended, what it recorded, and why it failed."""
    if report.when == "call" or report.outcome != "passed":
        why = {"why": report.longreprtext[-3000:]} if report.failed else {}
        seconds, found = round(report.duration, 1), dict(report.user_properties)
        tell("test", test=report.nodeid, ended=report.outcome, seconds=seconds, found=found, **why)

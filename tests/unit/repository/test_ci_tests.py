"""CI repeats the tests that failed, if they are few, and passes only if each repeat passes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import ci_tests

# A test that fails fails for good, unless its function begins with `flaky`, which fails once.
FLAKY = """
from pathlib import Path

def flaky(name):
    mark = Path(__file__).with_name(name)
    first = not mark.exists()
    mark.touch()
    assert not first
"""
ODD = ["a/b::c", "[two words]", "--é$HOME"]
SUITES = {
    "green": (["def test_1(): pass"], 0, "", "1 passed"),
    "three are unstable": (
        [
            FLAKY,
            "import pytest",
            f"@pytest.mark.parametrize('number', range(3), ids={ODD!r})",
            "def test_1(number): flaky(str(number))",
            "def test_2(): pass",
        ],
        0,
        r"(unstable: .*\n){3}All of them passed 2 times alone.*",
        "3 failed, 1 passed",
    ),
    "two fail for good": (
        [FLAKY, "def test_1(): assert 0", "def test_2(): flaky('2')", "def test_3(): assert 0"],
        1,
        r"failed: .*_1\nfailed: .*_2\nfailed: .*_3\nerror: repeat 1: .*_1 .*\nerror: .*_3 .*",
        "3 failed",
    ),
    "one passes once": (
        [
            "from pathlib import Path",
            "def test_1():",
            "    log = Path(__file__).with_name('log')",
            "    log.write_text((log.read_text() if log.exists() else '') + 'x')",
            "    assert len(log.read_text()) == 2",
        ],
        1,
        r"failed: .*_1\nerror: repeat 2: .*_1 did not pass",
        "1 failed",
    ),
    "one is skipped in its repeat": (
        [
            "from pathlib import Path",
            "import pytest",
            "def test_1():",
            "    mark = Path(__file__).with_name('mark')",
            "    mark.exists() and pytest.skip()",
            "    mark.touch()",
            "    assert 0",
        ],
        1,
        r"failed: .*_1\nerror: repeat 1: .*_1 did not pass",
        "1 failed",
    ),
    "four are unstable": (
        [FLAKY, *[f"def test_{n}(): flaky('{n}')" for n in range(4)]],
        1,
        r"(failed: .*\n){4}error: 4 tests failed; at most 3 are repeated",
        "4 failed",
    ),
    "a teardown fails": (
        [
            FLAKY,
            "import pytest",
            "@pytest.fixture",
            "def ended(): yield; flaky('1')",
            "def test_1(ended): pass",
        ],
        0,
        r"unstable: .*_1\n.*",
        "1 passed, 1 error",
    ),
    "collection": (
        ["import there_is_no_such_module", "def test_1(): pass"],
        1,
        r"error: collection of test_toy.py\n?.*",
        "1 error",
    ),
    "a crash": (
        [
            "import os",
            "from pathlib import Path",
            "def test_1():",
            "    mark = Path(__file__).with_name('mark')",
            "    if not mark.exists():",
            "        mark.touch()",
            "        os._exit(9)",
            "def test_2(): pass",
        ],
        1,
        r"failed: .*_1\nerror: worker gw\d: .*",
        "1 failed, 1 passed",
    ),
}


def run_ci(folder: Path, checks: str = "true") -> subprocess.CompletedProcess[str]:
    """Runs the script in a folder whose ``make test-all`` runs ``checks`` and then pytest, which
    loads no plug-in but xdist: a start takes half a second, not three.
    """
    workers = 1 if "_exit" in (folder / "test_toy.py").read_text() else 0
    (folder / "Makefile").write_text(
        f"test-all:\n\t{checks}\n\t$(VENV)/bin/python -m pytest --numprocesses {workers} $(PYTEST_REPORT)\n"
    )
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -q -p xdist -p no:cacheprovider\n")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        [sys.executable, "-m", "scripts.ci_tests"],
        cwd=folder,
        env=inherited | {"VENV": sys.prefix, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("lines", "code", "names", "closing"), SUITES.values(), ids=SUITES.keys())
def test_ci_passes_only_with_few_tests_that_pass_when_repeated(
    lines: list[str], code: int, names: str, closing: str, tmp_path: Path
) -> None:
    (tmp_path / "test_toy.py").write_text("\n".join(lines))
    done = run_ci(tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    end = re.escape(closing) + r" in \d+\.\d+s.*\n"
    assert re.search(rf"(^|\n){names}\n?{end}\Z", done.stdout), done.stdout


def test_a_check_that_fails_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text("def test_1(): pass")
    done = run_ci(tmp_path, checks="false")
    assert done.returncode == 1
    assert "1 passed" not in done.stdout
    assert "error: make test-all PYTEST_REPORT" in done.stdout.replace("'", "")


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    outcome = ci_tests.run(sleep, tmp_path / "outcome.json", 0.5)
    (error,) = outcome.broken
    assert error.endswith("took longer than 0.5 s")
    assert ci_tests.verdict(outcome, ()) == [error]

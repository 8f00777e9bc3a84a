"""The launcher: what it forks are processes like any other, told of faithfully, and gone when it
is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.harness import cases
from tests.harness.errors import error_line
from tests.harness.federation import launcher as shared
from tests.harness.federation import toml
from tests.harness.waiting import wait_until
from vfl.certs.authority import create_authority, issue
from vfl.launcher.forks import Forked, Launcher, run_launcher

WAIT_S = 30.0


class Started:
    """A child with its standard input held open."""

    def __init__(
        self, launcher: Launcher, folder: Path, *args: str, modules: Sequence[Path] = ()
    ) -> None:
        self.errors = folder / "errors"
        self.said = folder / "said"
        stdin, self.held = os.pipe()
        with self.said.open("wb") as stdout, self.errors.open("wb") as stderr:
            self.child: Forked = launcher.start(
                args,
                stdin=stdin,
                stdout=stdout.fileno(),
                stderr=stderr.fileno(),
                cwd=folder,
                modules=modules,
            )
        os.close(stdin)

    def release(self) -> None:
        if self.held >= 0:
            os.close(self.held)
            self.held = -1

    def until_it_says(self, word: str) -> None:
        wait_until(
            lambda: self.said.read_text() + self.errors.read_text(),
            lambda _: word in self.said.read_text(),
        )

    def pid(self) -> int:
        """By the file that its standard error goes to."""
        (found,) = (
            path for path in Path("/proc").glob("[0-9]*/fd/2") if _points_to(path, self.errors)
        )
        return int(found.parts[2])


def runs(pid: int) -> bool:
    """Whether the process is there, and not only its entry, which the machine's first process
    clears away.
    """
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _points_to(path: Path, file: Path) -> bool:
    try:
        return path.readlink() == file
    except OSError:
        return False


@pytest.fixture
def server(tmp_path: Path) -> list[str]:
    """The arguments of a server that waits for parties."""
    (tmp_path / "recipe.toml").write_text(toml(cases.recipe(2)))
    create_authority(tmp_path / "certs", "test")
    issue(tmp_path / "certs", "server")
    return ["vfl-server", "run", "recipe.toml", "--listen", "127.0.0.1:0"]


@pytest.fixture
def own() -> Iterator[Launcher]:
    """A launcher of the test's own, to be killed."""
    with ExitStack() as stack:
        launcher = Launcher()
        stack.callback(launcher.close)
        yield launcher


def test_exit_codes_are_the_program_s(tmp_path: Path) -> None:
    fine = Started(shared(), tmp_path, "vfl-party", "--help")
    assert fine.child.wait(WAIT_S) == 0
    assert "vfl-party" in fine.said.read_text()
    bad = Started(shared(), tmp_path, "vfl-party", "run", "gone.toml")
    assert bad.child.wait(WAIT_S) == 2
    assert "gone.toml" in error_line(bad.errors.read_text())
    unknown = Started(shared(), tmp_path, "rm", "-r")
    assert unknown.child.wait(WAIT_S) == 1
    assert "KeyError" in unknown.errors.read_text()
    for started in (fine, bad, unknown):
        started.release()


def test_a_child_has_a_process_group_and_a_name_in_the_launcher_s_session(
    tmp_path: Path, server: list[str]
) -> None:
    started = Started(shared(), tmp_path, *server)
    started.until_it_says("ready")
    pid = started.pid()
    assert os.getpgid(pid) == pid
    # Ctrl-C at the terminal does not reach it.
    assert os.getsid(pid) not in (pid, os.getsid(0))
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "vfl-server"
    assert started.child.poll() is None
    started.child.send_signal(signal.SIGTERM)
    # It ends in order.
    assert started.child.wait(WAIT_S) == 130
    # Nothing: its number may be another's by now.
    started.child.kill()
    started.release()


def test_a_killed_child_is_told_by_its_signal(tmp_path: Path, server: list[str]) -> None:
    started = Started(shared(), tmp_path, *server)
    # Before it runs: requests are heard in their order.
    started.child.kill()
    assert started.child.wait(WAIT_S) == -signal.SIGKILL
    started.release()


def test_a_child_ends_when_its_input_is_closed(tmp_path: Path, server: list[str]) -> None:
    started = Started(shared(), tmp_path, *server)
    started.until_it_says("ready")
    started.release()
    assert started.child.wait(WAIT_S) == 130


def test_children_die_with_a_killed_launcher(
    tmp_path: Path, server: list[str], own: Launcher
) -> None:
    started = Started(own, tmp_path, *server)
    started.until_it_says("ready")
    pid = started.pid()
    psutil.Process(pid).parent().kill()
    assert started.child.wait(WAIT_S) == -signal.SIGKILL
    # The kernel kills it after it has closed the launcher's files, by which we know.
    wait_until(lambda: not runs(pid))
    # And nothing waits for ever.
    assert Started(own, tmp_path, *server).child.wait(WAIT_S) == -signal.SIGKILL
    started.release()


def test_modules_of_the_user_s_own_are_found(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "our_net.py").write_text(
        "from torch import nn\ndef make(spec, size):\n    return nn.Sequential(nn.Flatten(), nn.LazyLinear(size))\n"
    )
    encoder = {"kind": "custom", "factory": "our_net:make"}
    (tmp_path / "recipe.toml").write_text(toml(cases.recipe(2, model={"encoder": encoder})))
    create_authority(tmp_path / "certs", "test")
    issue(tmp_path / "certs", "p1")
    tls = {"ca": "certs/ca.pem", "certificate": "certs/p1.pem", "key": "certs/p1.key"}
    party = {
        "name": "p1",
        "recipe": "recipe.toml",
        "server": "127.0.0.1:9",
        "tls": tls,
        "data": cases.digits(2)["p1"],
    }
    (tmp_path / "p1.toml").write_text(toml({"allow_code": ["our_net"]} | party))
    check = ("vfl-party", "check", "p1.toml", "--offline")
    for modules, code in (([tmp_path / "beside"], 0), ([], 2)):
        started = Started(shared(), tmp_path, *check, modules=modules)
        assert started.child.wait(WAIT_S) == code, started.said.read_text()
        started.release()


def test_nothing_forks_where_that_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VFL_NO_FORK", "1")
    with run_launcher(1) as launcher:
        assert launcher is None

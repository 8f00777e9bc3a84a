"""The hand-over of a program's sockets to a new process of it."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from vfl_common.errors import Code, InputError
from vfl_common.process.handover import Predecessor, get_command


def test_a_process_whose_predecessor_is_killed_in_the_handover_says_so() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # The word that this process has loaded goes out; then the other one is gone.
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(InputError, match="ended without handing over") as refused:
            Predecessor(ours, {}).wait()
        assert refused.value.code == Code.ADDRESS_IN_USE
        assert theirs.recv(16) == b"loaded"


def test_a_script_at_a_link_is_started_with_the_release_to_which_the_link_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in ("old", "new"):
        script = tmp_path / release / "bin" / "vfl-party"
        script.parent.mkdir(parents=True)
        script.write_text(f"#!/bin/sh\necho {release} $*\n")
        script.chmod(0o755)
    link = tmp_path / "vfl"
    link.symlink_to("old")
    words = [str(link / "bin" / "vfl-party"), "serve", "bank.toml"]
    monkeypatch.setattr(sys, "orig_argv", ["/opt/old/bin/python3", *words])
    link.unlink()
    link.symlink_to("new")
    assert subprocess.check_output(get_command(), text=True) == "new serve bank.toml\n"


def test_a_module_is_started_with_the_same_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "vfl_party", "serve"])
    assert get_command() == [sys.executable, "-m", "vfl_party", "serve"]

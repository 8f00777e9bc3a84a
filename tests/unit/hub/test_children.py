"""Programs of runs as child processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.standing import make_recipe
from tests.harness.waiting import wait_until
from vfl_common.config.recipe import Recipe
from vfl_common.run_folder import create
from vfl_hub.children import Child, Starter, is_finished


def start(
    folder: Path, *, is_done: bool = False, before: Sequence[str] = ()
) -> tuple[Child, threading.Event]:
    """Starts a party without a file. Returns it, and the event of its end."""
    ended = threading.Event()
    child = Child(
        "bank",
        ["vfl-party", "run", "no file"],
        folder,
        on_event=lambda _event: None,
        on_change=ended.set,
        is_finished=lambda: is_done,
        starter=Starter(before=before),
    )
    return child, ended


def test_a_finished_run_is_not_started_again(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(make_recipe())
    folder = create(tmp_path, "run", "bank", recipe)
    assert not is_finished(tmp_path, "run", "bank")
    folder.prepare_finished_note()()
    folder.unlock()
    assert is_finished(tmp_path, "run", "bank")
    assert not is_finished(tmp_path, "other", "bank")
    child, ended = start(tmp_path, is_done=is_finished(tmp_path, "run", "bank"))
    assert ended.wait(30)
    assert (child.state, child.starts) == ("done", 0)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_program_that_cannot_run_fails_or_is_tried_again(tmp_path: Path, is_folder: bool) -> None:
    folder = tmp_path / "folder"
    if not is_folder:
        folder.write_text("")
    child, changed = start(folder)
    if is_folder:
        assert changed.wait(60)
        assert child.state == "failed"
        assert "no such file" in child.reason
    else:
        assert not changed.wait(1)
        assert child.state == "runs"
    child.stop()


def test_a_missing_command_of_a_scheduler_fails_the_run(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    child, ended = start(tmp_path, before=[str(tmp_path / "srun")])
    assert ended.wait(30)
    assert child.state == "failed"
    assert "srun" in child.reason
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # noqa: PTH208 - a count

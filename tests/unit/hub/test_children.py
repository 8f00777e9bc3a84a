"""Programs of runs as child processes."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.harness.standing import make_recipe
from vfl_common.config.recipe import Recipe
from vfl_common.run_folder import create
from vfl_hub.children import Child, is_finished


def test_a_finished_run_is_not_started_again(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(make_recipe())
    folder = create(tmp_path, "run", "bank", recipe)
    assert not is_finished(tmp_path, "run", "bank")
    folder.prepare_finished_note()()
    folder.unlock()
    assert is_finished(tmp_path, "run", "bank")
    assert not is_finished(tmp_path, "other", "bank")
    ended = threading.Event()
    child = Child(
        "bank",
        ["vfl-party", "run", "no file"],
        tmp_path,
        on_event=lambda _event: None,
        on_change=ended.set,
        is_finished=lambda: is_finished(tmp_path, "run", "bank"),
    )
    assert ended.wait(30)
    assert (child.state, child.starts) == ("done", 0)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_program_that_cannot_run_fails_or_is_tried_again(tmp_path: Path, is_folder: bool) -> None:
    folder, changed = tmp_path / "folder", threading.Event()
    if not is_folder:
        folder.write_text("")
    child = Child(
        "bank",
        ["vfl-party", "run", str(tmp_path / "no file")],
        folder,
        on_event=lambda _event: None,
        on_change=changed.set,
        is_finished=lambda: False,
    )
    if is_folder:
        assert changed.wait(60)
        assert child.state == "failed"
        assert "no such file" in child.reason
    else:
        assert not changed.wait(1)
        assert child.state == "runs"
    child.stop()

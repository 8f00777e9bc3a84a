"""The folder of a run: what is damaged in it is named before anybody begins anew."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.harness import cases
from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from tests.harness.releases import newer
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder, create, find_unfinished, read_plan, set_all_aside
from vfl_common.stages import Planned
from vfl_server.app import note_start, ran_s

RECIPE = parse(Recipe, cases.recipe(2), "recipe")
OTHER = parse(Recipe, cases.recipe(2, seed=8), "recipe")

Harm = Callable[[Path], object]


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


HARMS: dict[str, Harm] = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\xff\x00garbage"),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "deep": lambda path: path.write_text("[" * 100_000),
    "list": lambda path: path.write_text("[]"),
    "number": lambda path: path.write_text("3"),
    "folder": folder,
    "missing": lambda path: path.unlink(),
}


def begun(out: Path, run_id: str = "one", recipe: Recipe = RECIPE) -> RunFolder:
    """A party's run that has checkpoints."""
    made = create(out, run_id, "p1", recipe)
    made.note(job="train")
    (made.path / "checkpoints").mkdir()
    return made


@pytest.mark.parametrize("harm", HARMS.values(), ids=HARMS)
def test_a_damaged_file_is_one_sentence_and_no_second_run(harm: Harm, tmp_path: Path) -> None:
    run = begun(tmp_path)
    path = run.path / "run.json"
    harm(path)
    for act in (
        lambda: find_unfinished(tmp_path, "p1", RECIPE),
        lambda: create(tmp_path, "one", "p1", RECIPE),
        lambda: run.note(generation=2),
        run.facts,
    ):
        with raises(InputError, Code.FILE_INVALID, names=("--fresh", "run.json")) as refused:
            act()
        text = str(refused.value)
        assert text.startswith(f"{path}: ")
        assert str(path) not in refused.value.public


@pytest.mark.parametrize("name", ["server", "p1"])
def test_without_checkpoints_it_is_refused_too(name: str, tmp_path: Path) -> None:
    """The server has none, and a party that was killed early would fail after joining."""
    path = create(tmp_path, "one", name, RECIPE).path / "run.json"
    path.write_text("")
    with raises(InputError, Code.FILE_INVALID, names=("--fresh", "run.json")):
        find_unfinished(tmp_path, name, RECIPE)


@pytest.mark.parametrize(
    "recipe", [None, b"", b"[]", b"\xff"], ids=["missing", "empty", "list", "garbage"]
)
def test_a_folder_whose_recipe_cannot_be_known_is_refused(
    recipe: bytes | None, tmp_path: Path
) -> None:
    run = begun(tmp_path)
    (run.path / "run.json").write_text("")
    (run.path / "recipe.json").unlink()
    if recipe is not None:
        (run.path / "recipe.json").write_bytes(recipe)
    with raises(InputError, Code.FILE_INVALID, names=("--fresh", "run.json")):
        find_unfinished(tmp_path, "p1", RECIPE)


def test_a_damaged_plan_is_one_sentence(tmp_path: Path) -> None:
    run = begun(tmp_path)
    plan = [Planned("train", 2, None), Planned("head", 2, 1, (0,))]
    run.note(plan=[asdict(each) for each in plan])
    assert read_plan(run) == plan
    for broken in (
        [3],
        3,
        [{"name": "train"}],
        [asdict(plan[0]) | {"more": 1}],
        [asdict(plan[0]) | {"rounds": "2"}],
    ):
        run.note(plan=broken)
        with raises(InputError, Code.FILE_INVALID, names=("--fresh", "run.json")):
            read_plan(run)


@pytest.mark.parametrize("left", ["recipe.json", "ledger.json"])
@pytest.mark.parametrize("name", ["server", "p1"])
def test_a_run_json_that_is_missing_beside_other_files_is_refused(
    name: str, left: str, tmp_path: Path
) -> None:
    """Not only beside checkpoints, which a server never has: it would begin another run."""
    path = create(tmp_path, "one", name, RECIPE).path
    (path / "ledger.json").write_text("{}")
    for file in ("run.json", "recipe.json", "ledger.json"):
        if file != left:
            (path / file).unlink()
    with raises(InputError, Code.FILE_INVALID, names=("--fresh", "run.json")):
        find_unfinished(tmp_path, name, RECIPE)


def test_a_folder_that_a_killed_process_had_only_begun_is_none(tmp_path: Path) -> None:
    path = create(tmp_path, "one", "p1", RECIPE).path
    # It is written last.
    (path / "recipe.json").unlink()
    assert find_unfinished(tmp_path, "p1", RECIPE) is None


def test_a_run_that_was_set_aside_is_not_resumed(tmp_path: Path) -> None:
    runs = [begun(tmp_path, name) for name in ("one", "two", "three")]
    runs[2].note(finished=True)
    for run in runs:
        run.unlock()
    assert set_all_aside(tmp_path, "p1", RECIPE, "told so", but="two") == ["one"]
    found = present(find_unfinished(tmp_path, "p1", RECIPE))
    assert (found.run_id, found.set_aside_reason, runs[0].set_aside_reason) == (
        "two",
        "",
        "told so",
    )
    with raises(InputError, Code.FILE_INVALID, names="p1"):
        create(tmp_path, "one", "p1", RECIPE)


def test_a_run_that_never_started_goes_behind_one_that_has(tmp_path: Path) -> None:
    begun(tmp_path, "one").note(generation=1)
    # Newer: a second server was asked for it, and could not listen.
    begun(tmp_path, "two")
    found = present(find_unfinished(tmp_path, "p1", RECIPE))
    assert found.run_id == "one"


HOLDER = """
import sys, time
from pathlib import Path
from vfl_common.run_folder import RunFolder
RunFolder(Path(sys.argv[1]), "one").lock()  # dropped at once
folder = RunFolder(Path(sys.argv[1]), "one")
folder.lock()
print("has it", flush=True)
sys.stdin.read()
"""


def test_a_run_belongs_to_one_process_until_that_ends_however_it_ends(tmp_path: Path) -> None:
    run = begun(tmp_path)
    run.unlock()
    words = [sys.executable, "-c", HOLDER, str(run.path)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert present(holder.stdout).readline() == "has it\n"
        for act in (run.lock, lambda: create(tmp_path, "one", "p1", RECIPE)):
            with raises(InputError, Code.FILE_INVALID, names="p1") as refused:
                act()
            who = f"process {holder.pid} on {socket.gethostname()}, since 20"
            assert str(refused.value).startswith(f"{run.path}: {who}")
        # Not under a living process.
        assert set_all_aside(tmp_path, "p1", RECIPE, "told so", but="") == []
        # Readers need no lock.
        assert find_unfinished(tmp_path, "p1", RECIPE) is not None
        holder.kill()
    run.lock()
    run.lock()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    run = create(tmp_path, "one", "p1", RECIPE)
    run.unlock()
    (tmp_path / "other").write_text("precious")
    (run.path / "lock").unlink()
    (run.path / "lock").symlink_to(tmp_path / "other")
    with raises(InputError, Code.FILE_INVALID, names="p1"):
        run.lock()
    assert (tmp_path / "other").read_text() == "precious"


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    )
    begun(tmp_path)
    assert_names(caplog.text, "vfl_common.run_folder", "p1")


def test_what_is_not_of_this_run_is_not_in_the_way(tmp_path: Path) -> None:
    (begun(tmp_path, "other", OTHER).path / "run.json").write_text("")
    strange = tmp_path / "strange" / "p1" / "run.json"
    strange.parent.mkdir(parents=True)
    strange.write_text("not ours")
    (tmp_path / "federation").mkdir()
    (tmp_path / "federation" / "p1").write_text("a file")
    (begun(tmp_path, "two").path.parent / "p2").mkdir()
    (tmp_path / "two" / "p2" / "run.json").write_text("")
    found = present(find_unfinished(tmp_path, "p1", RECIPE))
    assert found.run_id == "two"


def test_a_restored_file_is_found_again(tmp_path: Path) -> None:
    run = begun(tmp_path)
    text = (run.path / "run.json").read_text()
    (run.path / "run.json").write_text("")
    with pytest.raises(InputError):
        find_unfinished(tmp_path, "p1", RECIPE)
    (run.path / "run.json").write_text(text)
    found = present(find_unfinished(tmp_path, "p1", RECIPE))
    assert found.facts() == {"run_id": "one", "recipe_digest": RECIPE.digest(), "job": "train"}


def test_a_release_with_another_key_resumes_what_an_older_one_began(tmp_path: Path) -> None:
    begun(tmp_path)
    for unwritten in ({}, {"audit_every": 7}):
        found = present(find_unfinished(tmp_path, "p1", newer(cases.recipe(2, run=unwritten))))
        assert found.run_id == "one"
    assert find_unfinished(tmp_path, "p1", newer(cases.recipe(2, run={"audit_every": 8}))) is None


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    run = begun(tmp_path)
    (run.path / ".run.json.7").write_text("")
    (run.path / ".run.json.12345").write_text('{"run_id"')
    run.note(generation=1)
    assert not list(run.path.glob(".*"))
    assert run.facts()["generation"] == 1


def test_the_text_is_on_the_disk_before_it_has_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after a rename whose text is not on the disk leaves an empty file."""
    run, events = begun(tmp_path), []
    fsync, replace = os.fsync, Path.replace

    def noting_fsync(handle: int) -> None:
        names = {path.stat().st_ino: path.name for path in (run.path, *run.path.iterdir())}
        events.append(("fsync", names[os.fstat(handle).st_ino]))
        fsync(handle)

    def noting_replace(path: Path, target: Path) -> Path:
        assert json.loads(path.read_text())["generation"] == 1
        events.append(("replace", target.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", noting_fsync)
    monkeypatch.setattr(Path, "replace", noting_replace)
    run.note(generation=1)
    assert events == [
        ("fsync", f".run.json.{os.getpid()}"),
        ("replace", "run.json"),
        ("fsync", "p1"),
    ]


def test_a_server_that_is_started_again_knows_when_the_run_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(tmp_path, "one", "server", RECIPE)
    assert ran_s(made) == 0
    monkeypatch.setattr("time.time", lambda: 1000.0)
    note_start(made, 1, 0.0)
    monkeypatch.setattr("time.time", lambda: 1060.0)
    assert ran_s(made) == 60
    note_start(made, 2, 60.0)
    monkeypatch.setattr("time.time", lambda: 1070.0)
    assert ran_s(made) == 70
    # The clock was set back.
    monkeypatch.setattr("time.time", lambda: 900.0)
    assert ran_s(made) == 0

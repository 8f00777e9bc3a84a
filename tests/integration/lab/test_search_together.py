"""Several programs work on one search, by a study file or by the library, and lose nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import optuna
import pytest
from click.testing import CliRunner

import vfl
from tests.harness.errors import assert_names, raises
from tests.integration.test_library import BANK, RECIPE, SHOP
from tests.integration.test_library_jobs import DATA
from vfl.cli import cli
from vfl_common.errors import Code, UnwritableError
from vfl_common.files import write_error
from vfl_lab.searching import trials as trying
from vfl_lab.searching.search import load_search

pytest.importorskip("optuna")

LR = "phases.splitnn.optimizer.lr"
FILE = """
name = "found"
recipe = "recipe.toml"

[search]
objective = "validation loss"
runs = 6
by = "random"
prune = false

[search.spaces]
phases.splitnn.optimizer.lr = { from = 1e-4, to = 1.0, log = true }
"model.combine" = ["concat", "sum"]
"""
SPACES: dict[str, Any] = {
    LR: {"from": 1e-4, "to": 1.0, "log": True},
    "model.combine": ["concat", "sum"],
}
CALL: dict[str, Any] = {
    "objective": "validation loss",
    "by": "random",
    "prune": False,
    "quiet": True,
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The file of a study that searches."""
    BANK.to_csv(tmp_path / "bank.csv", index=False)
    SHOP.to_csv(tmp_path / "shop.csv", index=False)
    parties: dict[str, Any] = {
        "bank": {"source": "bank.csv", "id": "id", "label": "target"},
        "shop": {"source": "shop.csv", "id": "id"},
    }
    RECIPE.replace({"simulate": {"parties": parties}}).save(tmp_path / "recipe.toml")
    (tmp_path / "study.toml").write_text(FILE)
    return tmp_path / "study.toml"


class KilledError(BaseException):
    """Ends a program where no other error would."""


def killed(*_: Any, **__: Any) -> None:
    raise KilledError


def made(folder: Path) -> list[Path]:
    """The finished runs of a search."""
    return [path.parent for path in (folder / "runs").glob("*/summary.json")]


def test_two_commands_share_a_search_and_take_over_from_each_other(file: Path) -> None:
    command = [sys.executable, "-m", "vfl", "study", str(file), "--out", str(file.parent), "--json"]
    first, second = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2))
    assert first.stdout is not None
    assert json.loads(next(iter(first.stdout)))["event"] == "study"
    # A run has ended, and most likely another one has begun.
    assert json.loads(next(iter(first.stdout)))["event"] == "finished"
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    events = [json.loads(line) for line in second.communicate(timeout=120)[0].splitlines()]
    assert second.returncode == 0
    assert events[0]["event"] == "study"
    assert {each["event"] for each in events[1:-1]} == {"finished"}
    assert len(made(file.parent / "found")) == 6
    # The library, with one driver and frames, finds the same.
    recipe = vfl.Recipe.load(file.parent / "recipe.toml")
    here = vfl.search(recipe, SPACES, runs=6, out=file.parent / "here", **CALL)
    best = events[-1]
    assert (best["value"], best["values"]) == (here.value, here.best)
    assert best["test"] == here.test
    table = (file.parent / "found" / "trials.csv").read_text()
    assert table == (file.parent / "here" / "trials.csv").read_text()


def test_other_processes_try_the_same_values_and_find_the_same(tmp_path: Path) -> None:
    here = vfl.search(RECIPE, SPACES, DATA, runs=3, out=tmp_path / "a", **CALL)
    there = vfl.search(RECIPE, SPACES, DATA, runs=3, out=tmp_path / "b", jobs=2, **CALL)
    assert there.columns() == here.columns()
    assert there.test == here.test
    assert there.run.curves() == here.run.curves()
    # No rows are left behind, and nothing is made twice.
    assert not list((tmp_path / "b").glob("rows-*"))
    assert len(made(tmp_path / "b")) == 3


def test_loky_s_processes_go_on_with_it(tmp_path: Path) -> None:
    pytest.importorskip("joblib")
    vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path / "a", **CALL)
    there = vfl.search(RECIPE, SPACES, DATA, runs=3, out=tmp_path / "a", backend="loky", **CALL)
    here = vfl.search(RECIPE, SPACES, DATA, runs=3, out=tmp_path / "b", **CALL)
    assert there.columns() == here.columns()


def test_a_run_that_was_finished_when_its_driver_was_killed_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, "tell", killed)
        with pytest.raises(KilledError):
            vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path, **CALL)
    before = made(tmp_path)
    assert len(before) == 1
    found = vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path, **CALL)
    assert made(tmp_path) == before
    assert found.run.folder == before[0]


def test_a_trial_whose_values_were_not_all_chosen_is_chosen_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(optuna.Trial, "suggest_categorical", killed)
        with pytest.raises(KilledError):
            vfl.search(RECIPE, SPACES, DATA, runs=2, out=tmp_path / "a", **CALL)
    found = vfl.search(RECIPE, SPACES, DATA, runs=2, out=tmp_path / "a", **CALL)
    undisturbed = vfl.search(RECIPE, SPACES, DATA, runs=2, out=tmp_path / "b", **CALL)
    assert found.columns() == undisturbed.columns()


def test_a_line_of_the_journal_that_was_cut_short_is_written_again(tmp_path: Path) -> None:
    before = vfl.search(RECIPE, SPACES, DATA, runs=2, out=tmp_path, **CALL)
    journal = tmp_path / "journal.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-30])
    for _ in range(2):
        found = vfl.search(RECIPE, SPACES, DATA, runs=2, out=tmp_path, **CALL)
        assert found.columns() == before.columns()
    assert len(made(tmp_path)) == 2
    journal.write_bytes(b"no line of ours\n" + whole)
    with raises(vfl.VflError, Code.FILE_INVALID, names="journal.log"):
        vfl.search(RECIPE, SPACES, DATA, runs=2, out=tmp_path, **CALL)


def test_a_journal_that_was_altered_is_said(tmp_path: Path) -> None:
    vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path, **CALL)
    journal = tmp_path / "journal.log"
    whole = journal.read_text()
    lines = whole.splitlines(keepends=True)
    removed = [
        next(each for each in lines if what in each)
        for what in ('"param_name":"model.combine"', '"place":0', '"run":')
    ]
    altered = [
        re.sub(r'"param_value_internal":0\.[^,]*', '"param_value_internal":-1', whole),
        re.sub(r'"values":\[[^]]*', '"values":["x"', whole),
        whole.replace('"directions":[1]', '"directions":[2]'),
    ]
    for text in [whole.replace(each, "") for each in removed] + altered:
        assert text != whole
        journal.write_text(text)
        with raises(vfl.VflError, Code.FILE_INVALID, names="journal.log"):
            vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path, **CALL)


def test_a_full_disk_fails_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # A run's files, and the journal.
    places = {
        "vfl_lab.searching.trials.carry_out": write_error(Path("run.json"), full),
        "os.fsync": full,
    }
    for place, error in places.items():
        with monkeypatch.context() as patched:
            patched.setattr(place, Mock(side_effect=error))
            with raises(UnwritableError, Code.FILE_INVALID):
                vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path, **CALL)
    found = vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path, **CALL)
    assert [each.state for each in found.trials] == ["finished"]


def test_a_journal_has_nothing_removed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(trying, "in_process", killed)
        with pytest.raises(KilledError):
            vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path / "a", **CALL)
    journal = tmp_path / "a" / "journal.log"
    text = re.sub(r'"run":"[^"]*"', '"run":"../../own"', journal.read_text())
    journal.write_text(text)
    (tmp_path / "own" / "file").touch()
    vfl.search(RECIPE, SPACES, DATA, runs=1, out=tmp_path / "a", **CALL)
    assert (tmp_path / "own" / "file").exists()


def test_a_command_shows_the_best_runs_and_draws_a_page(file: Path) -> None:
    file.write_text(FILE.replace("runs = 6", "runs = 1"))
    command = ["study", str(file), "--out", str(file.parent)]
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert done.exit_code == 0
    assert "1 run finished, 0 pruned, 0 failed" in done.output
    folder = file.parent / "found"
    assert "its test metrics, which were not used for the choice: " in done.output
    assert all(str(folder / name) in done.output for name in ("trials.csv", "parallel.png"))
    # With more runs it goes on.
    file.write_text(FILE.replace("runs = 6", "runs = 3"))
    done = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert "run 3 of 3" in done.output
    assert "run 1 of 3" not in done.output
    done = CliRunner().invoke(cli, ["report", str(folder)], catch_exceptions=False)
    html = (folder / "report.html").read_text()
    assert done.output.split() == [str(folder / "report.html")]
    for words in ("hyperparameter search", "The finished runs", LR, "finished"):
        assert words in html, words
    listed = CliRunner().invoke(cli, ["runs", "--out", str(file.parent)], catch_exceptions=False)
    (line,) = (each for each in listed.output.splitlines() if each.startswith("found/"))
    assert line.split()[-2:] == ["3", "runs"]
    (folder / "search.json").write_text("{}")
    with raises(vfl.VflError, Code.FILE_INVALID, names="search.json"):
        CliRunner().invoke(cli, ["report", str(folder)], catch_exceptions=False)


def test_what_a_study_file_cannot_search_is_said(file: Path) -> None:
    wrong = [
        ("validation loss", "test loss"),
        ("runs = 6", "runs = 0"),
        ("runs = 6", ""),
        ('"random"', '"best"'),
        ("1e-4", "2"),
        ("prune", "prunes"),
        ('name = "found"', 'name = "found"\nseeds = [1]'),
        ("model.combine", "model.width.combine"),
    ]
    for before, after in wrong:
        file.write_text(FILE.replace(before, after, 1))
        with raises(vfl.VflError, Code.CONFIG_INVALID):
            load_search(file, file.parent)
    file.write_text(FILE)
    done = CliRunner().invoke(cli, ["study", str(file), "--folds", "3"])
    assert_names(str(done.exception or done.output), "--folds")
    assert done.exit_code != 0

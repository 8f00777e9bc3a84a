"""A search over a recipe's keys: what it chooses, what it prunes, and how it goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vfl
from tests.harness.errors import raises
from tests.integration.test_library import RECIPE
from tests.integration.test_library_jobs import DATA
from vfl_common.errors import Code

pytest.importorskip("optuna")

LR, WIDTH = "phases.splitnn.optimizer.lr", "model.embedding_size"
SPACES: dict[str, Any] = {LR: {"from": 1e-4, "to": 1.0, "log": True}, WIDTH: {"from": 2, "to": 8}}
CALL: dict[str, Any] = {"objective": "validation loss", "quiet": True}
WATCHED = RECIPE.replace(
    {"phases.splitnn.epochs": 3, "phases.splitnn.early_stopping": {"patience": 3}}
)


def test_the_best_of_the_validation_rows_is_chosen_and_its_run_is_as_by_itself(
    tmp_path: Path,
) -> None:
    found = vfl.search(RECIPE, SPACES, DATA, runs=4, out=tmp_path, by="random", **CALL)
    columns = found.columns()
    assert columns["state"] == ["finished"] * 4
    assert found.value == min(columns["validation loss"])
    assert all(1e-4 <= lr <= 1 for lr in columns[LR])
    assert {type(width) for width in columns[WIDTH]} == {int}
    alone = vfl.simulate(RECIPE.replace(found.best), DATA, quiet=True)
    assert alone.metrics["validation"]["loss"] == found.value
    assert alone.metrics["test"] == found.test
    assert not [name for name in columns if name.startswith("test")]
    assert {each.name for each in tmp_path.iterdir()} == {
        ".drivers",
        "journal.log",
        "runs",
        "search.json",
        "trials.csv",
        "importance.png",
        "parallel.png",
    }


def test_a_grid_tries_every_combination_once_and_a_failed_one_is_told(tmp_path: Path) -> None:
    # Only the rows tell that so many labels cannot be had.
    spaces = {"model.combine": ["concat", "sum"], "rows.labelled": [60, 1_000_000]}
    found = vfl.search(RECIPE, spaces, DATA, runs=9, out=tmp_path, by="grid", **CALL)
    columns = found.columns()
    tried = set(zip(columns["model.combine"], columns["rows.labelled"], strict=True))
    assert len(found.trials) == len(tried) == 4
    assert columns["state"] == ["finished", "failed"] * 2
    assert all(("labelled" in str(each.error)) == (each.state == "failed") for each in found.trials)


def test_a_run_that_goes_badly_is_pruned(tmp_path: Path) -> None:
    # Five that learn come first; of the others, none that does not learn reaches its last round.
    spaces = {LR: [0.05, 0.04, 0.03, 0.02, 0.01, 1e-7, 2e-7]}
    found = vfl.search(WATCHED, spaces, DATA, runs=7, out=tmp_path, by="grid", **CALL)
    states = [each.state for each in found.trials]
    assert states == ["finished"] * 5 + ["pruned"] * 2
    assert {each.rounds for each in found.trials[5:]} == {2}
    assert {each.value for each in found.trials[5:]} == {None}


DRIVER = """
import sys
import vfl
from tests.integration.lab.test_search import CALL, DATA, RECIPE, SPACES

vfl.search(RECIPE, SPACES, DATA, runs=13, out=sys.argv[1], **CALL | {"quiet": False})
"""


def test_a_killed_search_goes_on_as_an_undisturbed_one(tmp_path: Path) -> None:
    # The first ten are chosen at random.
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path / "a")], stderr=subprocess.PIPE, text=True
    )
    assert driver.stderr is not None
    for line in driver.stderr:
        if "run 11 of" in line:
            break
    driver.send_signal(signal.SIGKILL)
    driver.communicate(timeout=60)
    before = (tmp_path / "a" / "journal.log").read_bytes()
    resumed = vfl.search(RECIPE, SPACES, DATA, runs=13, out=tmp_path / "a", **CALL)
    assert (tmp_path / "a" / "journal.log").read_bytes().startswith(before)
    whole = vfl.search(RECIPE, SPACES, DATA, runs=13, out=tmp_path / "b", **CALL)
    assert resumed.columns() == whole.columns()
    # More runs, later; nothing is made twice.
    made = len(list((tmp_path / "b" / "runs").iterdir()))
    more = vfl.search(RECIPE, SPACES, DATA, runs=14, out=tmp_path / "b", **CALL)
    assert len(list((tmp_path / "b" / "runs").iterdir())) == made + 1
    assert more.trials[:13] == whole.trials
    with raises(vfl.VflError, Code.CONFIG_INVALID):
        vfl.search(RECIPE, SPACES, DATA, runs=9, out=tmp_path / "b", seed=1, **CALL)


def test_what_cannot_be_searched_is_said_before_the_first_run(tmp_path: Path) -> None:
    wrong: list[tuple[Any, dict[str, Any]]] = [
        (SPACES, {"objective": "test auc"}),
        (SPACES, {"objective": "validation nothing"}),
        (SPACES, {"runs": 0}),
        (SPACES, {"by": "best"}),
        (SPACES, {"by": "grid"}),
        ({}, {}),
        ({LR: 0.1}, {}),
        ({LR: []}, {}),
        ({LR: [0.1, 0.1]}, {}),
        ({LR: [object()]}, {}),
        ({LR: {"from": 1}}, {}),
        ({LR: {"from": 1, "to": 1}}, {}),
        ({LR: {"from": 0, "to": 1, "log": True}}, {}),
        ({LR: {"from": 1, "to": 2, "step": 1}}, {}),
        ({LR: {"from": -1.7e308, "to": 1.7e308}}, {}),
        ({LR: [float("nan"), 0.1]}, {}),
        ({LR: {0.1, 0.2}}, {}),
        ({LR: np.array(0.1)}, {}),
        ({LR: [0.1], LR.rpartition(".")[0]: [{"lr": 0.2}]}, {}),
        ({1: [1]}, {}),
        ({"nowhere.at.all": [1]}, {}),
        # A phase's keys are its method's.
        ({"phases.splitnn.lr": [0.1]}, {}),
        ({LR: [0.1, -1]}, {}),
    ]
    for spaces, given in wrong:
        with raises(vfl.VflError, Code.CONFIG_INVALID):
            vfl.search(RECIPE, spaces, DATA, **{"runs": 2, "out": tmp_path, **CALL, **given})
    assert not (tmp_path / "runs").exists()


def test_if_no_run_finishes_the_first_error_is_raised(tmp_path: Path) -> None:
    spaces = {"rows.labelled": [1_000_000]}
    with raises(vfl.VflError, Code.CONFIG_INVALID, names=("1000000", "84")):
        vfl.search(RECIPE, spaces, DATA, runs=1, out=tmp_path, by="grid", **CALL)

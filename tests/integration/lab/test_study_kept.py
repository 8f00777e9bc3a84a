"""Studies of the library that resume, cross-validate and compare."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

import vfl
from tests.harness.errors import assert_names, raises
from tests.harness.here import vfl_here
from tests.integration.lab.test_study import write
from tests.integration.test_library import BANK, RECIPE, ROWS, SHOP
from vfl.library.simulate import simulate
from vfl_common.errors import Code, InputError
from vfl_lab import study as studied

DATA = {"bank": vfl.Data(BANK, label="target"), "shop": SHOP}
SIZE = "model.embedding_size"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The embedding sizes of the runs that were really made."""
    sizes: list[int] = []

    def counting(recipe: vfl.Recipe, *args: Any, **more: Any) -> vfl.Run:
        run = simulate(recipe, *args, **more)
        sizes.append(recipe.settings.model.embedding_size)
        return run

    monkeypatch.setattr(studied, "simulate", counting)
    return sizes


def study(out: Path | None, sizes: list[Any], data: Any = DATA, **more: Any) -> vfl.Study:
    recipe = more.pop("recipe", RECIPE)
    return vfl.study(recipe, {SIZE: sizes}, data, out=out, quiet=True, **more)


def test_what_is_finished_is_kept_and_the_rest_is_made(tmp_path: Path, made: list[int]) -> None:
    undisturbed = study(None, [2, 3], seeds=[1, 2])
    made.clear()
    first = study(tmp_path, [2], seeds=[1, 2])
    # A plan with more values extends it.
    more = study(tmp_path, [2, 3], seeds=[1, 2])
    assert made == [2, 2, 3, 3]
    assert more.columns() == undisturbed.columns()
    assert [run.folder for run in more.runs[:2]] == [run.folder for run in first.runs]
    assert more.runs[0].curves() == undisturbed.runs[0].curves()
    new = {"bank": BANK.drop(columns="target").head(9), "shop": SHOP.head(9)}
    assert more.runs[0].predict(new) == undisturbed.runs[0].predict(new)
    # So with several processes.
    made.clear()
    assert study(tmp_path, [2, 3], seeds=[1, 2], jobs=2).columns() == undisturbed.columns()
    assert made == []


def test_a_study_that_was_interrupted_goes_on(
    tmp_path: Path, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Any = vars(studied)["simulate"]

    def interrupted(recipe: vfl.Recipe, *args: Any, **more: Any) -> vfl.Run:
        if recipe.settings.model.embedding_size == 3:
            # In the middle of a run.
            def stop(_: vfl.Round) -> None:
                raise KeyboardInterrupt

            more["on_round"] = stop
        run: vfl.Run = whole(recipe, *args, **more)
        return run

    with monkeypatch.context() as patch:
        patch.setattr(studied, "simulate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            study(tmp_path, [2, 3, 4])
    again = study(tmp_path, [2, 3, 4])
    assert made == [2, 3, 4]
    assert again.columns() == study(None, [2, 3, 4]).columns()


def test_other_rows_or_values_are_no_finished_run(tmp_path: Path, made: list[int]) -> None:
    study(tmp_path, [2])
    other = BANK.assign(**{"mean area": BANK["mean area"] * 2})
    study(tmp_path, [2], DATA | {"bank": vfl.Data(other, label="target")})
    study(tmp_path, [2], recipe=RECIPE.replace({"phases.splitnn.epochs": 1}))
    study(tmp_path, [2], DATA | {"shop": vfl.Data(SHOP, settings={"drop": ["worst area"]})})
    path = tmp_path / "shop.csv"
    SHOP.to_csv(path, index=False)
    study(tmp_path, [2], DATA | {"shop": vfl.Data(path, id="id")})
    assert len(made) == 5
    study(tmp_path, [2], DATA | {"shop": vfl.Data(path, id="id")})
    assert len(made) == 5
    SHOP.assign(**{"worst area": 0.5 * SHOP["worst area"]}).to_csv(path, index=False)
    study(tmp_path, [2], DATA | {"shop": vfl.Data(path, id="id")})
    assert len(made) == 6
    baseline = vfl.study(RECIPE, {"baseline": [None, "alone"]}, DATA, out=tmp_path, quiet=True)
    assert baseline.runs[0].summary.run_id != baseline.runs[1].summary.run_id
    arrays = {
        "bank": vfl.Data({"x": np.eye(ROWS, 3), "y": np.arange(ROWS) % 2}, label="y"),
        "shop": {"x": np.ones((ROWS, 2))},
    }
    made.clear()
    for _ in range(2):
        study(tmp_path, [2], arrays)
    assert made == [2]


def test_an_encoder_of_a_cell_is_always_made_again(tmp_path: Path, made: list[int]) -> None:
    def cell(spec: Any, width: int) -> torch.nn.Module:
        return torch.nn.Linear(spec.shape[0], width)

    for _ in range(2):
        study(tmp_path, [2], recipe=RECIPE.replace({"model.encoder": cell}))
    assert made == [2, 2]
    for _ in range(2):
        study(tmp_path, [3], plugins={})
    assert made == [2, 2, 3, 3]


# -- folds and comparisons


def test_every_row_is_tested_in_one_fold(tmp_path: Path) -> None:
    found = study(tmp_path, [2, 4], folds=3, recipe=RECIPE.replace({"rows": {"test": 0.4}}))
    assert found.columns()["fold"] == [1, 2, 3, 1, 2, 3]
    tested = [
        row
        for run in found.runs[:3]
        for row, split in zip(run.predictions["id"], run.predictions["split"], strict=True)
        if split == "test"
    ]
    assert sorted(tested) == sorted(BANK["id"])
    by_hand = RECIPE.replace({SIZE: 4, "rows": {"folds": 3, "fold": 2}})
    assert simulate(by_hand, DATA, quiet=True).metrics == found.runs[4].metrics
    with raises(InputError, Code.CONFIG_INVALID):
        study(tmp_path, [2], folds=1)

    values = np.array(found.columns()["test loss"])
    said = found.compare(2, 4, "test loss")
    each = values[:3] - values[3:]
    half = stats.t.ppf(0.975, 2) * np.sqrt((1 / 3 + 1 / 2) * np.var(each, ddof=1))
    assert (said.low, said.high) == pytest.approx((each.mean() - half, each.mean() + half))
    assert said.mean == -found.compare({SIZE: 4}, {SIZE: 2}, "test loss").mean
    for first, metric in ((5, "test loss"), (2, "test gini"), (2, "train loss"), ({}, "test loss")):
        with raises(InputError, Code.CONFIG_INVALID):
            found.compare(first, 4, metric)


def test_two_keys_are_both_chosen() -> None:
    over: dict[str, list[Any]] = {SIZE: [2, 3], "model.combine": ["sum", "concat"]}
    found = vfl.study(RECIPE, over, DATA, quiet=True)
    said = found.compare(
        {SIZE: 2, "model.combine": "sum"}, {SIZE: 3, "model.combine": "concat"}, "test loss"
    )
    values = found.columns()["test loss"]
    assert (said.mean, said.pairs) == (values[0] - values[3], 1)
    assert (said.low, said.verdict) == (None, "too few pairs")
    with raises(InputError, Code.CONFIG_INVALID, names=("model.embedding_size", "model.combine")):
        found.compare(2, 3, "test loss")


@pytest.mark.slow
def test_the_command_cross_validates_and_resumes(tmp_path: Path) -> None:
    methods = [{"name": "plain"}, {"name": "narrow", "overrides": {SIZE: 2}}]
    path, folder = write(tmp_path, seeds=[1], labels=[], methods=methods), tmp_path / "runs/tiny"
    ended = vfl_here("study", path, "--out", "runs", "--folds", "3", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "mean ± sd of 3 folds, 1 seed" in " ".join(ended.stdout.split())
    assert "is it better?" in ended.stdout
    lines = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [(each["method"], each["fold"]) for each in lines] == [
        (method, fold) for fold in "123" for method in ("plain", "narrow")
    ]
    (one,) = csv.DictReader((folder / "differences.csv").read_text().splitlines())
    assert (one["method"], one["against"], one["pairs"]) == ("narrow", "plain", "3")
    by_method = {
        name: [float(each["test_accuracy"]) for each in lines if each["method"] == name]
        for name in ("plain", "narrow")
    }
    expected = np.mean(by_method["narrow"]) - np.mean(by_method["plain"])
    assert float(one["difference"]) == pytest.approx(expected)
    before = (folder / "results.csv").read_bytes()
    again = vfl_here("study", path, "--out", "runs", "--folds", "3", cwd=tmp_path)
    assert "6 runs, 6 already finished" in again.stderr
    assert (folder / "results.csv").read_bytes() == before
    # Other folds are other rows, in the same folders.
    other = vfl_here("study", path, "--out", "runs", "--folds", "2", cwd=tmp_path)
    assert other.returncode == 2
    assert_names(other.stderr.replace(str(tmp_path), ""), "--out", "tiny.plain.s1.k1")

"""The predictions behind the final metrics: kept at the active party, whole, once, and equal to the
metrics.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
from sklearn import metrics as sk

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.integration.test_library import BANK, SHOP, TABLES, run
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.predict.results import KEPT, keep

SPLITS = ["train", "validation", "test"]
EVALUATE = {"kind": "evaluate", "splits": SPLITS}


def parts(found: vfl.Run) -> dict[str, pd.DataFrame]:
    """The kept predictions of each split."""
    return dict(iter(pd.DataFrame(found.predictions).groupby("split")))


def test_metrics_of_the_kept_predictions_are_the_run_s() -> None:
    found = run(recipe=vfl.Recipe.from_dict(TABLES | {"phases": [TABLES["phases"][0], EVALUATE]}))
    kept = parts(found)
    assert set(kept) == set(SPLITS)
    for split, rows in kept.items():
        named = found.metrics[split]
        assert sk.accuracy_score(rows["truth"], rows["class"]) == pytest.approx(named["accuracy"])
        assert sk.f1_score(rows["truth"], rows["class"]) == pytest.approx(named["f1"])
        assert sk.roc_auc_score(rows["truth"], rows["score_1"]) == pytest.approx(named["auc"])
    assert list(kept["test"].columns) == [
        "phase",
        "split",
        "id",
        "matched_id",
        "truth",
        "score_1",
        "class",
    ]
    whole = pd.DataFrame(found.predictions)
    truth = BANK.set_index("id")["target"]
    # Each row in one split.
    assert dict(zip(whole["id"], whole["truth"], strict=True)) == truth.to_dict()
    path = found.folder / "bank" / KEPT
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # At the active party alone.
    assert list(found.folder.rglob("*predictions*")) == [path]


def test_scores_are_of_the_positive_class() -> None:
    task = {"task": {"kind": "binary", "positive": 0}}
    found = run(recipe=vfl.Recipe.from_dict(TABLES | task))
    rows = parts(found)["test"]
    assert list(rows.columns[5:]) == ["score_0", "class"]
    assert ((rows["score_0"] > 0.5) == (rows["class"] == 0)).all()
    named = found.metrics["test"]
    assert sk.roc_auc_score(rows["truth"] == 0, rows["score_0"]) == pytest.approx(named["auc"])
    assert sk.f1_score(rows["truth"], rows["class"], pos_label=0) == pytest.approx(named["f1"])
    again = pd.DataFrame(found.predict({"bank": BANK, "shop": SHOP}))
    assert list(again.columns) == ["id", "matched_id", "state", "score_0", "class"]


@pytest.mark.parametrize("classes", [3, 6])
def test_classes_by_name(classes: int) -> None:
    """A task may have more classes than the labels: metrics and predictions know the same ones."""
    names = np.array(["low", "middle", "high"])
    sizes = pd.qcut(BANK["mean area"], 3, labels=names).astype(str)
    task = {"task": {"kind": "multiclass", "classes": classes, "metrics": ["log_loss"]}}
    found = run(BANK.assign(target=sizes), recipe=vfl.Recipe.from_dict(TABLES | task))
    rows = parts(found)["test"]
    assert list(rows.columns[5:-1]) == ["score_high", "score_low", "score_middle"]
    assert set(rows["truth"]) <= set(names)
    named = found.metrics["test"]
    assert sk.accuracy_score(rows["truth"], rows["class"]) == pytest.approx(named["accuracy"])
    scores = rows[["score_high", "score_low", "score_middle"]]
    auc = sk.roc_auc_score(
        rows["truth"], scores, multi_class="ovr", labels=["high", "low", "middle"]
    )
    assert auc == pytest.approx(named["auc"])
    assert scores.sum(axis=1).to_numpy() == pytest.approx(1.0)
    assert sk.log_loss(rows["truth"], scores) == pytest.approx(named["log_loss"], rel=1e-5)


def test_values_in_the_label_s_own_unit() -> None:
    labels = BANK["mean area"] * 1000.0
    found = run(
        BANK.assign(target=labels),
        recipe=vfl.Recipe.from_dict(TABLES | {"task": {"kind": "regression"}}),
    )
    rows = parts(found)["test"]
    # As they were given.
    assert set(rows["truth"]) <= set(labels)
    assert sk.root_mean_squared_error(rows["truth"], rows["value"]) == pytest.approx(
        found.metrics["test"]["rmse"]
    )


def test_trees_are_kept_too() -> None:
    pytest.importorskip("lightgbm")
    tables = TABLES | {
        "phases": [{"kind": "gbdt", "trees": 3, "min_rows": 2}],
        "parties": TABLES["parties"][:1],
    }
    bank = vfl.Data(BANK.merge(SHOP, on="id"), label="target")
    found = vfl.simulate(tables, {"bank": bank}, quiet=True)
    rows = parts(found)["test"]
    assert set(rows["phase"]) == {"gbdt"}
    assert sk.roc_auc_score(rows["truth"], rows["score_1"]) == pytest.approx(
        found.metrics["test"]["auc"]
    )


def test_a_model_without_a_party_has_its_own_predictions(tmp_path: Path) -> None:
    phase = {
        "kind": "splitnn",
        "epochs": 1,
        "batch_size": 24,
        "late_policy": "zeros",
        "deadline_s": 60.0,
    }
    recipe = Recipe.model_validate(
        cases.recipe(2) | {"phases": [phase, {"kind": "evaluate", "splits": ["test"]}]}
    )
    data = {name: DataSettings.model_validate(each) for name, each in cases.digits(2).items()}
    summary = run_in_process(recipe, data, tmp_path / "run")
    kept = pyarrow.parquet.read_table(tmp_path / "run" / recipe.active.name / KEPT).to_pandas()
    assert set(kept["split"]) == {"test", "test without p1"} <= set(summary.metrics)
    for split, rows in kept.groupby("split"):
        assert (rows["truth"] == rows["class"]).mean() == pytest.approx(
            summary.metrics[split]["accuracy"]
        )


def test_two_phases_lie_side_by_side() -> None:
    train = TABLES["phases"][0]
    phases = [
        {**train, "name": "a"},
        {**EVALUATE, "name": "early"},
        {**train, "name": "b"},
        EVALUATE,
    ]
    found = run(recipe=vfl.Recipe.from_dict(TABLES | {"phases": phases}))
    kept = pd.DataFrame(found.predictions)
    assert list(kept["phase"].unique()) == ["early", "evaluate"]
    last = kept[(kept["phase"] == "evaluate") & (kept["split"] == "test")]
    assert sk.roc_auc_score(last["truth"], last["score_1"]) == pytest.approx(
        found.metrics["test"]["auc"]
    )


def table(phase: str, score: float) -> pa.Table:
    return pa.table({"phase": [phase] * 2, "id": ["a", "b"], "score": [score, 1 - score]})


def test_a_phase_that_is_repeated_replaces_its_own(tmp_path: Path) -> None:
    for phase, score in (("one", 0.25), ("two", 0.5), ("two", 0.75)):
        keep(tmp_path, phase, table(phase, score))
    kept = pyarrow.parquet.read_table(tmp_path / KEPT)
    assert kept.equals(pa.concat_tables([table("one", 0.25), table("two", 0.75)]))
    assert list(tmp_path.iterdir()) == [tmp_path / KEPT]
    # Of a later version.
    keep(tmp_path, "three", table("three", 0.5).append_column("matched_id", [["a", "b"]]))
    kept = pyarrow.parquet.read_table(tmp_path / KEPT)
    assert kept["matched_id"].to_pylist() == [None] * 4 + ["a", "b"]


def test_a_file_that_is_no_table_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text("something else")
    with raises(InputError, Code.FILE_INVALID, names="predictions.parquet"):
        keep(tmp_path, "one", table("one", 0.25))
    assert (tmp_path / KEPT).read_text() == "something else"


@pytest.mark.parametrize("content", [None, b"", b"something else"])
def test_a_run_without_readable_predictions_says_so(content: bytes | None) -> None:
    phases: list[dict[str, Any]] = [TABLES["phases"][0]]
    found = run(recipe=vfl.Recipe.from_dict(TABLES | {"phases": phases}))
    if content is not None:
        (found.folder / "bank" / KEPT).write_bytes(content)
    with raises(InputError, Code.FILE_INVALID, names=("predictions.parquet", "bank")):
        _ = found.predictions

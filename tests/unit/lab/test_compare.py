"""Comparing two models: intervals against definitions and simulations, and what people are told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from click.testing import CliRunner
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score, root_mean_squared_error

from tests.harness.errors import raises
from vfl.cli import cli
from vfl_common.errors import Code, InputError
from vfl_lab.production.compare import (
    Comparison,
    Measure,
    auc_difference,
    compare,
    compute_measures,
    show_comparison,
)
from vfl_lab.production.scored import ModelScores, select_common_rows

Floats = npt.NDArray[np.float64]


def binary(truth: Any, scores: Any, keys: Any = None) -> ModelScores:
    scores_N = np.asarray(scores, np.float64)
    classes = tuple("yes" if score > 0.5 else "no" for score in scores_N)
    names = tuple(str(each) for each in (range(len(scores_N)) if keys is None else keys))
    true = tuple("yes" if each else "no" for each in truth)
    return ModelScores(names, ("score_yes",), scores_N[:, None], classes, true)


def by_definition(is_positive_N: npt.NDArray[np.bool_], *models: Floats) -> tuple[float, float]:
    """The difference of two AUCs and DeLong's standard error, from all pairs of rows."""
    parts = []
    for scores_N in models:
        x_M, y_N = scores_N[is_positive_N], scores_N[~is_positive_N]
        psi_MN = (x_M[:, None] > y_N) + 0.5 * (x_M[:, None] == y_N)
        parts.append((psi_MN.mean(), psi_MN.mean(axis=1), psi_MN.mean(axis=0)))
    (a, a10, a01), (b, b10, b01) = parts
    variance = np.cov([a10, b10]) / len(a10) + np.cov([a01, b01]) / len(a01)
    contrast = np.array([-1, 1])
    return b - a, float(np.sqrt(contrast @ variance @ contrast))


def scores(seed: int, rows: int, ties: int = 0) -> tuple[npt.NDArray[np.bool_], Floats, Floats]:
    draw = np.random.default_rng(seed)
    truth_N = draw.random(rows) < 0.4
    base_N = truth_N + draw.normal(0, 1.2, rows)
    old_N, new_N = (1 / (1 + np.exp(-base_N - draw.normal(0, 0.8, rows))) for _ in range(2))
    return (truth_N, old_N.round(ties), new_N.round(ties)) if ties else (truth_N, old_N, new_N)


@pytest.mark.parametrize("ties", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_interval_of_aucs_is_delong_s(seed: int, ties: int) -> None:
    truth_N, old_N, new_N = scores(seed, 130, ties)
    found = auc_difference(truth_N, old_N, new_N)
    difference, error = by_definition(truth_N, old_N, new_N)
    assert found.old == pytest.approx(roc_auc_score(truth_N, old_N), abs=1e-12)
    assert found.new == pytest.approx(roc_auc_score(truth_N, new_N), abs=1e-12)
    assert found.difference == pytest.approx(difference, abs=1e-12)
    assert found.high - found.low == pytest.approx(2 * 1.959964 * error, rel=1e-6)


def test_ninety_five_of_a_hundred_intervals_hold_no_difference_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two models that are as good: 200 draws. Three standard errors are 0.046."""
    monkeypatch.setattr("vfl_party.base.statistics.resample.__defaults__", (400,))
    held: dict[str, int] = {}
    for seed in range(200):
        truth_N, old_N, new_N = scores(seed, 150)
        for each in compute_measures(binary(truth_N, old_N), binary(truth_N, new_N)):
            held[each.metric] = held.get(each.metric, 0) + (each.low <= 0 <= each.high)
    assert list(held) == ["auc", "accuracy", "log_loss", "brier"]
    assert all(0.904 <= count / 200 <= 0.996 for count in held.values()), held


def test_the_metrics_are_scikit_learn_s() -> None:
    truth_N, old_N, new_N = scores(5, 200)
    found = {
        each.metric: each
        for each in compute_measures(binary(truth_N, old_N), binary(truth_N, new_N))
    }
    assert found["log_loss"].new == pytest.approx(log_loss(truth_N, new_N))
    assert found["brier"].old == pytest.approx(brier_score_loss(truth_N, old_N))
    assert found["accuracy"].old == pytest.approx(((old_N > 0.5) == truth_N).mean())

    values_N = np.random.default_rng(1).normal(0, 3, 50)
    keys = tuple(map(str, range(50)))
    old, new = (
        ModelScores(keys, ("value",), (values_N + error)[:, None], None, tuple(values_N))
        for error in (1.0, np.linspace(-1, 1, 50))
    )
    rmse, mae = compute_measures(old, new)
    assert rmse.new == pytest.approx(root_mean_squared_error(values_N, new.scores_NC[:, 0]))
    assert (rmse.old, mae.old) == (pytest.approx(1.0), pytest.approx(1.0))
    assert rmse.outcome == mae.outcome == "better"


def test_several_classes_have_no_auc() -> None:
    draw = np.random.default_rng(0)
    truth = draw.choice(["a", "b", "c"], 90)
    p_NC = draw.dirichlet([1, 1, 1], 90)
    keys, names = tuple(map(str, range(90))), ("score_a", "score_b", "score_c")
    classes = tuple("abc"[at] for at in p_NC.argmax(axis=1))
    model = ModelScores(keys, names, p_NC, classes, tuple(truth))
    found = {each.metric: each for each in compute_measures(model, model)}
    assert list(found) == ["accuracy", "log_loss", "brier"]
    assert found["accuracy"].old == (np.array(classes) == truth).mean()
    assert found["log_loss"].old == pytest.approx(log_loss(truth, p_NC, labels=["a", "b", "c"]))
    # A model is as good as itself.
    assert {(each.difference, each.low, each.high) for each in found.values()} == {(0, 0, 0)}


def verdict(old: ModelScores, new: ModelScores) -> Comparison:
    return Comparison(
        "old",
        "new",
        9,
        "test rows of both",
        compute_measures(old, new),
        (old.scores_NC, new.scores_NC),
    )


def test_the_verdict_is_better_only_if_the_whole_interval_is() -> None:
    truth_N, noisy_N, other_N = scores(4, 400)
    sharp_N = np.where(truth_N, 0.9, 0.1) + np.random.default_rng(2).normal(0, 0.01, 400)
    noisy, sharp, other = (binary(truth_N, each) for each in (noisy_N, sharp_N, other_N))
    assert verdict(noisy, sharp).outcome == "better"
    assert verdict(sharp, noisy).outcome == "worse"
    assert verdict(noisy, other).outcome == "no difference"
    assert verdict(noisy, sharp).verdict.startswith("new is better than old on 9 test rows of both")
    assert verdict(noisy, other).verdict.startswith("no significant difference between old and new")


def test_few_rows_do_not_rule_out_a_loss() -> None:
    truth_N, noisy_N, other_N = scores(4, 400)
    few = verdict(binary(truth_N[:60], noisy_N[:60]), binary(truth_N[:60], other_N[:60]))
    assert few.outcome == "no difference"
    assert few.measures[0].largest_loss == -few.measures[0].low > 0.01
    assert "do not rule out a loss of" in few.too_few(0.01)
    assert few.too_few(few.measures[0].largest_loss) == ""
    assert few.as_json()["largest_loss"] == few.measures[0].largest_loss
    same = verdict(binary(truth_N, noisy_N), binary(truth_N, noisy_N))
    assert (same.outcome, same.too_few(0.0)) == ("no difference", "")
    # The verdict says that a model is worse.
    worse = Measure("auc", 0.9, 0.8, -0.2, -0.05)
    assert replace(few, measures=(worse,)).too_few(0.01) == ""
    assert replace(few, measures=(Measure("auc", 0.9, 0.9, math.nan, 0.1),)).too_few(0.01)
    # Of an error, a share of the old one.
    assert Measure("rmse", 50.0, 51.0, -1.0, 2.0).largest_loss == 0.04
    assert Measure("rmse", 0.0, 0.0, 0.0, 0.0).largest_loss == 0.0


@pytest.mark.parametrize(("positives", "exit_code"), [(9, 5), (10, 0)])
def test_few_positive_rows_get_no_verdict(positives: int, exit_code: int, tmp_path: Path) -> None:
    truth_N = np.arange(200) < positives
    names = [f"{row:03}" for row in range(200)]
    for name, shift in (("old", 0.0), ("new", 0.6)):
        scores_N = 0.2 + np.where(truth_N, shift, 0.0) + np.arange(200) % 9 * 0.04
        cells = zip(names, scores_N, strict=True)
        lines = [f"{id_},{id_},scored,{p},{'yes' if p > 0.5 else 'no'}" for id_, p in cells]
        write(tmp_path / f"{name}.csv", ["id,matched_id,state,score_yes,class", *lines])
    true = [f"{id_},{'yes' if y else 'no'}" for id_, y in zip(names, truth_N, strict=True)]
    write(tmp_path / "truth.csv", ["id,left", *true])
    paths = [str(tmp_path / name) for name in ("old.csv", "new.csv", "truth.csv")]
    words = ["compare", *paths[:2], "--truth", paths[2], "--label", "left"]
    done = CliRunner().invoke(cli, words, standalone_mode=False)
    said = " ".join(done.output.split())
    assert done.return_value == exit_code
    assert f"Only {positives} of 200 rows are positive. With fewer than" in said
    assert ("no verdict on new.csv and old.csv" in said) is (positives < 10)
    assert ("new.csv is better than old.csv" in said) is (positives >= 10)
    assert "nan" not in said
    facts = json.loads(CliRunner().invoke(cli, [*words, "--json"], standalone_mode=False).output)
    assert (facts["outcome"] == "too few rows") is (positives < 10)
    assert (facts["measures"]["auc"]["low"] is None) is (positives < 10)
    compare(paths[0], paths[1], truth=paths[2], label="left").plot()


def test_the_command_says_no_if_the_rows_are_too_few(tmp_path: Path) -> None:
    truth_N, *models = scores(4, 60)
    names = [f"{row:02}" for row in range(60)]
    for name, scores_N in zip(("old", "new"), models, strict=True):
        cells = zip(names, scores_N, strict=True)
        lines = [f"{id_},{id_},scored,{p},{'yes' if p > 0.5 else 'no'}" for id_, p in cells]
        write(tmp_path / f"{name}.csv", ["id,matched_id,state,score_yes,class", *lines])
    true = [f"{id_},{'yes' if y else 'no'}" for id_, y in zip(names, truth_N, strict=True)]
    write(tmp_path / "truth.csv", ["id,left", *true])
    paths = [str(tmp_path / name) for name in ("old.csv", "new.csv", "--truth", "truth.csv")]
    words = ["compare", *paths[:2], "--truth", paths[3], "--label", "left"]
    few = CliRunner().invoke(cli, words, standalone_mode=False)
    assert "rows do not rule out a loss of" in few.output
    assert few.return_value == 5
    wide = CliRunner().invoke(cli, [*words, "--margin", "1"], standalone_mode=False)
    assert "do not rule out" not in wide.output
    assert wide.return_value == 0


def test_rows_are_paired_by_id() -> None:
    old = binary([1, 0, 1], [0.9, 0.2, 0.3], ["a", "b", "c"])
    new = binary([1, 1, 0], [0.7, 0.8, 0.1], ["d", "c", "b"])
    first, second = select_common_rows(old, new)
    assert first.keys == second.keys == ("b", "c")
    assert second.scores_NC[:, 0].tolist() == [0.1, 0.8]
    with raises(InputError, Code.DATA_INVALID, names=("--data", "--truth")):
        select_common_rows(old, binary([1], [0.7], ["z"]))
    other = ModelScores(new.keys, ("score_no",), new.scores_NC, new.classes, new.truth)
    with raises(InputError, Code.DATA_INVALID, names=("score_yes", "score_no")):
        select_common_rows(old, other)


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_two_files_of_scores_are_compared_with_the_truth(tmp_path: Path) -> None:
    head = "customer,matched_customer,state,score_yes,class"
    old = write(
        tmp_path / "old.csv",
        [head, "007,7,scored,0.9,yes", "008,8,scored,0.2,no", "009,9,scored,0.6,yes"],
    )
    new = write(
        tmp_path / "new.csv",
        [head, "009,9,scored,0.1,no", "007,7,scored,0.8,yes", "008,,not at every party,,"],
    )
    truth = write(
        tmp_path / "truth.csv", ["customer,left,x", "009,no,1", "007,yes,2", "008,no,3", "1,no,3"]
    )
    found = compare(old, new, truth=str(truth), label="left")
    assert (found.rows, found.which) == (2, "new rows")
    assert {each.metric: (each.old, each.new) for each in found.measures if each.metric != "brier"}[
        "accuracy"
    ] == (0.5, 1.0)
    assert found.as_json()["measures"]["auc"]["new"] == 1.0

    for more in ({}, {"truth": str(truth)}, {"data": {"bank": "x"}}):
        with raises(InputError, Code.CONFIG_INVALID):
            compare(old, new, **more)
    with raises(InputError, Code.CONFIG_INVALID):
        compare(old, tmp_path, truth=str(truth), label="left")
    with raises(InputError, Code.FILE_INVALID):
        compare(truth, new, truth=str(truth), label="left")
    with raises(InputError, Code.FILE_INVALID):
        compare(tmp_path / "none.csv", new, truth=str(truth), label="left")
    with raises(InputError, Code.FILE_INVALID):
        compare(tmp_path, tmp_path)
    with raises(InputError, Code.DATA_INVALID):
        other = write(tmp_path / "other.csv", ["customer,left", "1,no", "2,yes"])
        compare(old, new, truth=str(other), label="left")


HEAD = "customer,matched_customer,state,score_yes,class"
ROWS = ["007,7,scored,0.9,yes", "008,8,scored,0.2,no", "009,9,scored,0.6,yes"]


@pytest.mark.parametrize("column", ["age", "other", "text", "several"])
def test_a_column_that_is_not_the_label_is_refused(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "s.csv", [HEAD, *ROWS])
    head = "customer,left,age,other,text,several"
    truth = write(
        tmp_path / "t.csv", [head, "007,no,31,0,a,yes", "008,yes,44,1,b,no", "009,no,29,1,a,maybe"]
    )
    assert compare(path, path, truth=str(truth), label="left").rows == 3
    with raises(InputError, Code.DATA_INVALID, names="t.csv"):
        compare(path, path, truth=str(truth), label=column)


def test_a_class_may_be_called_as_a_cell_that_is_missing(tmp_path: Path) -> None:
    rows = ["1,1,scored,0.9,NA", "2,2,scored,0.2,EU", "3,3,scored,0.6,NA"]
    path = write(tmp_path / "s.csv", ["id,matched_id,state,score_NA,class", *rows])
    for truth, right in (["1,NA", "3,NA"], 1.0), (["1,NA", "2,NA", "3,"], 0.5):
        found = compare(
            path, path, truth=str(write(tmp_path / "t.csv", ["id,to", *truth])), label="to"
        )
        assert (found.rows, {each.metric: each.old for each in found.measures}["accuracy"]) == (
            2,
            right,
        )


def test_a_truth_of_two_rows_is_refused_without_a_key_that_is_not_there(tmp_path: Path) -> None:
    path = write(tmp_path / "s.csv", [HEAD, *ROWS])
    truth = write(tmp_path / "t.csv", ["customer,left", "007,yes", "008,no", "007,no"])
    with raises(InputError, Code.DATA_INVALID, names="t.csv"):
        compare(path, path, truth=str(truth), label="left")


def test_text_is_no_truth_of_a_regression(tmp_path: Path) -> None:
    rows = [f"{at},{at},scored,{at}.5" for at in range(3)]
    path = write(tmp_path / "s.csv", ["id,matched_id,state,value", *rows])
    truth = write(tmp_path / "t.csv", ["id,price,town", "0,1,a", "1,2,b", "2,3,c"])
    assert compare(path, path, truth=str(truth), label="price").measures[0].metric == "rmse"
    with raises(InputError, Code.DATA_INVALID, names=("town", "t.csv")):
        compare(path, path, truth=str(truth), label="town")


def test_rows_without_a_label_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "s.csv", [HEAD, *ROWS])
    truth = write(
        tmp_path / "t.csv", ["customer,left,none,late", "007,yes,,", "008,no,,", "009,,,", "1,,,no"]
    )
    found = compare(path, path, truth=str(truth), label="left")
    assert (found.rows, found.unlabelled, found.as_json()["unlabelled"]) == (2, 2, 2)
    assert found.measures[0].old == 1.0
    show_comparison(found)
    assert "left out: 2 rows without a label" in capsys.readouterr().out
    for label in ("none", "late"):
        with raises(InputError, Code.DATA_INVALID, names=("none", "t.csv")):
            compare(path, path, truth=str(truth), label=label)


def test_the_picture_shows_every_metric(tmp_path: Path) -> None:
    truth_N, old_N, new_N = scores(3, 60)
    found = verdict(binary(truth_N, old_N), binary(truth_N, new_N)).plot()
    labels = [text.get_text() for text in found.axes[0].get_yticklabels()]
    assert labels == ["AUC (↑)", "accuracy (↑)", "log loss (↓)", "Brier score (↓)"]
    assert np.shape(found.axes[1].collections[0].get_offsets()) == (60, 2)
    from vfl.summary.picture import save

    save(found, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    for name in ("none/a.png", "a.nothing"):
        with raises(InputError, Code.FILE_INVALID):
            save(found, tmp_path / name)

"""Whether a method is better than another one: differences of pairs of runs, and how they are
shown.
"""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from tests.harness import cases
from tests.harness.errors import raises
from tests.unit.lab.test_study import SIMULATE, finish, runs_of, write
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_lab.studies.chart import draw_study
from vfl_lab.studies.comparison import (
    compare_methods,
    compute_overlap,
    difference,
    holm,
    make_differences_table,
)
from vfl_lab.studies.plan import PlannedRun, load_study
from vfl_lab.studies.report import Cost, FineTuned, describe_average, table
from vfl_lab.studies.run import run_study

# -- intervals

FIRST, SECOND = [0.81, 0.84, 0.79, 0.86, 0.83], [0.80, 0.80, 0.79, 0.83, 0.81]


def test_without_overlap_it_is_the_paired_t_interval() -> None:
    found = difference("auc", FIRST, SECOND)
    theirs = stats.ttest_rel(FIRST, SECOND).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))
    assert found.mean == pytest.approx(np.mean(FIRST) - np.mean(SECOND))
    assert (found.pairs, found.verdict) == (5, "better")
    assert difference("rmse", FIRST, SECOND, lower_is_better=True).verdict == "worse"
    assert difference("auc", SECOND, FIRST).verdict == "worse"
    assert difference("rmse", SECOND, FIRST, lower_is_better=True).verdict == "better"


def test_runs_that_share_rows_have_a_wider_interval() -> None:
    """Of ten pairs from ten-fold cross-validation, as Nadeau and Bengio correct it."""
    noise = np.random.default_rng(3).normal(0.01, 0.03, 10)
    found = difference("auc", noise.tolist(), [0.0] * 10, overlap=1 / 9)
    half = stats.t.ppf(0.975, 9) * np.sqrt((1 / 10 + 1 / 9) * np.var(noise, ddof=1))
    assert found.low == pytest.approx(noise.mean() - half)
    assert found.high == pytest.approx(noise.mean() + half)
    assert found.verdict == "no difference shown"


def test_several_comparisons_are_corrected_as_holm_has_it() -> None:
    own = difference("auc", FIRST, SECOND)
    assert own.p == pytest.approx(stats.ttest_rel(FIRST, SECOND).pvalue)
    few = difference("auc", FIRST[:2], SECOND[:2])
    given = [replace(own, p=p) for p in (0.01, 0.04, 0.03, 0.005)]
    found = holm([given[0], few, *given[1:]])
    # 0.005 * 4, 0.01 * 3, 0.03 * 2, and no less for 0.04.
    assert [each.p for each in found] == pytest.approx([0.03, None, 0.06, 0.06, 0.02])
    shown, not_shown = "better", "no difference shown"
    assert [each.verdict for each in found] == [shown, few.verdict, not_shown, not_shown, shown]
    assert {each.comparisons for each in found if each is not few} == {4}
    assert (found[0].low, found[1]) == (own.low, few)
    assert str(found[0]).endswith("; p = 0.03, corrected for 4 comparisons (Holm)")
    assert holm([own]) == [own]
    assert holm([]) == []


def test_differences_without_doubt_have_no_p() -> None:
    same = difference("auc", [0.5] * 4, [0.5] * 4)
    assert (same.p, same.verdict) == (1.0, "no difference shown")
    larger = difference("auc", [0.75] * 4, [0.5] * 4)
    assert (larger.p, larger.verdict) == (0.0, "better")


def test_of_many_methods_that_are_alike_none_looks_better() -> None:
    noise = np.random.default_rng(0).normal(size=(20, 5))
    apart = [difference("auc", row.tolist(), [0.0] * 5) for row in noise]
    assert "no difference shown" in {each.verdict for each in apart} != {"no difference shown"}
    assert {each.verdict for each in holm(apart)} == {"no difference shown"}


def test_two_pairs_claim_nothing() -> None:
    found = difference("auc", [0.9, 0.9], [0.1, 0.1])
    assert (found.low, found.high, found.verdict) == (None, None, "too few pairs")
    assert str(found) == "too few pairs: auc +0.8 with 2 pairs of runs"
    assert "(" in str(difference("auc", FIRST, SECOND))


@pytest.mark.parametrize(
    ("rows", "test", "validation"),
    [
        ({"test": 0.2, "validation": 0.1}, 0.25, 1 / 7),
        ({"folds": 5, "fold": 2, "validation": 0.2}, 0.25, 1 / 3),
        ({"split": "column"}, 0.0, 0.0),
    ],
)
def test_rows_that_runs_share(rows: dict[str, Any], test: float, validation: float) -> None:
    recipe = Recipe.model_validate(cases.recipe(2) | {"rows": rows, "simulate": SIMULATE})
    assert compute_overlap(recipe, "test") == pytest.approx(test)
    assert compute_overlap(recipe, "validation") == pytest.approx(validation)


# -- methods of a study

METHODS = [
    {"name": "one", "alone": "p0"},
    {"name": "all"},
    {"name": "all-in-one", "combined": True},
]


def value_of(run: PlannedRun) -> float:
    """One seed is good for all methods, which pairs do not see."""
    return {"A": 0.5, "B": 0.6}[run.method] + 0.1 * run.seed + 0.001 * (run.seed % 2)


def test_a_study_tells_each_method_from_the_first(tmp_path: Path) -> None:
    path = write(tmp_path, seeds=[1, 2, 3, 4], labels=[10, 20])
    folder = tmp_path / "out" / "s"
    for run in runs_of(path):
        finish(folder, run, accuracy=value_of(run) if run.stage == "finetune" else 0.0)
    study, chains = load_study(path)
    results = run_study(path, tmp_path / "out")
    found = compare_methods(study, chains, results)
    assert [(each.method, each.against, each.labels) for each in found] == [
        ("B", "A", 10),
        ("B", "A", 20),
    ]
    assert [each.difference.pairs for each in found] == [4, 4]
    assert found[0].difference.mean == pytest.approx(0.1)
    assert found[0].difference.verdict == "better"
    lines = list(csv.DictReader((folder / "differences.csv").read_text().splitlines()))
    assert [(each["labels"], each["verdict"]) for each in lines] == [
        ("10", "better"),
        ("20", "better"),
    ]
    assert float(lines[0]["low"]) <= float(lines[0]["difference"]) <= float(lines[0]["high"])
    assert (folder / "differences.png").stat().st_size > 5_000
    written = io.StringIO()
    Console(width=120, file=written).print(make_differences_table(study, found))
    shown = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    assert shown[0] == "difference from A: test accuracy in points"
    assert shown[3].startswith("B 10 +10.0 +10.0 to +10.0 ")
    assert shown[3].endswith(" 4 better")
    assert "corrected for 2 comparisons (Holm)" in " ".join(shown)
    written = io.StringIO()
    Console(width=120, file=written).print(make_differences_table(study, found[:1]))
    assert "Holm" not in written.getvalue()
    assert "B 10 +10.0 +10.0 to +10.0 4 better" in " ".join(written.getvalue().split())


def test_fewer_than_three_seeds_are_not_compared(tmp_path: Path) -> None:
    path = write(tmp_path, seeds=[1, 2])
    folder = tmp_path / "out" / "s"
    for run in runs_of(path):
        finish(folder, run)
    (folder / "differences.csv").write_text("of a study with more seeds")
    study, chains = load_study(path)
    assert compare_methods(study, chains, run_study(path, tmp_path / "out")) == []
    assert not (folder / "differences.csv").exists()
    assert not (folder / "differences.png").exists()


def test_other_test_rows_are_not_compared(tmp_path: Path) -> None:
    methods = [
        {"name": "A"},
        {"name": "B", "overrides": {"rows.test": 0.3}},
        {"name": "C", "overrides": {"model.embedding_size": 3}},
    ]
    path = write(tmp_path, seeds=[1, 2, 3], labels=None, methods=methods)
    for run in runs_of(path):
        finish(tmp_path / "out" / "s", run)
    study, chains = load_study(path)
    found = compare_methods(study, chains, run_study(path, tmp_path / "out"))
    assert [(each.method, each.difference.verdict) for each in found] == [
        ("C", "no difference shown")
    ]


# -- groups


def result(method: str, seed: int, labels: int | None = None, **more: Any) -> FineTuned:
    metrics = {"test": {"accuracy": 0.5 + seed / 10}}
    return FineTuned("s", method, seed, "", labels, metrics, Cost(), Cost("x", 1.0), **more)


@pytest.mark.parametrize("labels", [None, [10, 20]])
@pytest.mark.parametrize("many", [False, True])
def test_methods_stand_in_groups(tmp_path: Path, labels: list[int] | None, many: bool) -> None:
    base = {"simulate": SIMULATE | {"scheme": "columns"}}
    methods = [*METHODS, *({"name": f"m{number}"} for number in range(6 if many else 0))]
    study, _ = load_study(write(tmp_path, base, labels=labels, methods=methods))
    names = [method.name for method in study.in_groups]
    assert (names[0], names[-2:]) == ("all", ["all-in-one", "one"])
    found = [
        result(method.name, seed, each, group=method.group)
        for method in study.methods
        for seed in (1, 2)
        for each in (labels or (None,))
    ]
    written = io.StringIO()
    Console(width=160, file=written).print(table(study, found))
    shown = [line.split()[:2] for line in written.getvalue().splitlines()]
    assert ["method", "columns"] in shown
    assert ["all-in-one", "pooled"] in shown
    assert ["one", "p0"] in shown
    assert draw_study(study, found, tmp_path / "r.png").stat().st_size > 5_000
    assert found[0].row()["group"] == "alone"


# -- folds


def test_every_fold_is_tested_once_with_each_seed(tmp_path: Path) -> None:
    path = write(tmp_path, {"rows": {"test": 0.3, "validation": 0.2}}, labels=[10], folds=2)
    runs = runs_of(path)
    assert [run.run_id for run in runs if run.seed == 1] == [
        "s.A.s1.k1.n10",
        "s.B.s1.k1",
        "s.B.s1.k1.n10",
        "s.A.s1.k2.n10",
        "s.B.s1.k2",
        "s.B.s1.k2.n10",
    ]
    assert {(run.seed, run.recipe.rows.fold) for run in runs} == {(1, 1), (1, 2), (2, 1), (2, 2)}
    assert {(run.recipe.rows.folds, run.recipe.rows.validation) for run in runs} == {(2, 0.2)}
    # A pretraining leaves out the rows on which its heir is tested.
    starts = [run.recipe.start.run for run in runs if run.recipe.start is not None]
    assert starts == ["s.B.s1.k1", "s.B.s1.k2", "s.B.s2.k1", "s.B.s2.k2"]
    assert runs[0].title == "A, seed 1, fold 1, 10 labels"
    assert {
        run.recipe.rows.folds for chain in load_study(path, folds=3)[1] for run in chain.runs
    } == {3}


def test_folds_are_counted_in_words() -> None:
    assert describe_average([result("A", 1)]) == ""
    assert describe_average([result("A", 1), result("A", 2)]) == "2 seeds"
    assert describe_average([result("A", 1, fold=n) for n in (1, 2)]) == "2 folds, 1 seed"
    assert result("A", 1, fold=2).row()["fold"] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"folds": 1},
        {"folds": "5"},
        {"folds": 2, "methods": [{"name": "A", "overrides": {"rows.fold": 1}}]},
        {"folds": 2, "base": {"rows": {"split": "column"}}},
    ],
    ids=["one", "text", "overridden", "column"],
)
def test_folds_that_cannot_be_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write(tmp_path, changes.pop("base", None), **changes)
    with raises(InputError, Code.CONFIG_INVALID, names="study.toml"):
        load_study(path)

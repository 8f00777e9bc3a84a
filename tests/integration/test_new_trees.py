"""``vfl new recipe --method secureboost``: from two tables with missing cells to trees and
predictions.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vfl
from tests.harness.errors import assert_names
from tests.unit.vfl.test_new import BANK, SHOP, run, table, tables
from vfl.library.run import predict_rows
from vfl.new.flow import DEEPER, MAX_CATEGORIES, make_tree_training
from vfl.new.rules import Task
from vfl.simulation.federation import combine_party_files
from vfl_common.config.recipe import load_recipe
from vfl_party.methods.secureboost.settings import SecureBoostSettings
from vfl_party.phases.course import Course
from vfl_party.predict.results import Output

ROWS = 160
Label = Callable[[int], str | int | float]
TREES = [*BANK, "--method", "secureboost"]


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank and a shop with missing numbers and missing categories, in the working folder."""
    monkeypatch.chdir(tmp_path)
    with_label(lambda n: ("no", "yes")[(n * 7 % 50) + 30 * (n % 3 == 0) > 35])
    table(
        "shop.csv",
        "client_no,orders,town",
        lambda n: f"k{n},{'' if n % 9 == 0 else n % 7},{town(n)}",
        ROWS,
    )


def town(row: int) -> str:
    return ("", "Graz", "Linz")[row % 3]


def with_label(label: Label, age: Callable[[int], str] = lambda n: f"{n * 7 % 50}") -> None:
    table(
        "bank.csv",
        "customer,age,kind,default",
        lambda n: f"K{n},{age(n)},{'ab'[n % 2]},{label(n)}",
        ROWS,
    )


def settings_of(path: str = "recipe.toml") -> SecureBoostSettings:
    (phase,) = Course(load_recipe(Path(path))).phases
    found = phase.settings
    assert isinstance(found, SecureBoostSettings)
    return found


def test_what_is_written_and_said() -> None:
    with_label(lambda n: n % 2, age=lambda n: "" if n % 8 == 1 else f"{n % 50}")
    said, heard = run(*TREES), run(*SHOP)
    assert "model" not in tables("recipe.toml")
    # Early stopping looks at them.
    assert tables("recipe.toml")["rows"]["validation"] > 0
    assert settings_of().encryption == "paillier"
    assert_names(said, "kind", "default")
    assert_names(heard, "client_no", "--id")
    assert "hidden units" not in said
    for name in ("bank", "shop"):
        assert "missing" not in tables(f"{name}.toml")["data"]


def test_networks_are_what_a_recipe_trains_if_nothing_is_protected() -> None:
    said = run(*BANK, "--protect", "none")
    recipe = load_recipe(Path("recipe.toml"))
    assert [phase.kind for phase in recipe.phases] == ["splitnn", "evaluate"]
    assert (recipe.rows.split, recipe.phases[0].settings["batch_size"]) == ("stratified", 32)
    assert_names(said, "customer", "default")


@pytest.mark.parametrize(
    ("label", "task", "rounds", "weight"),
    [
        (lambda n: n % 2, "binary", 40, 1.0),
        (lambda n: "abc"[n % 3], "multiclass", 20, 1.0),
        (lambda n: n / 7, "regression", 40, 5.0),
    ],
)
def test_settings_follow_the_labels_task(
    label: Label, task: str, rounds: int, weight: float
) -> None:
    with_label(label)
    said = run(*TREES)
    found = settings_of()
    assert load_recipe(Path("recipe.toml")).task.kind == task
    assert (found.trees, found.min_child_weight) == (rounds, weight)
    assert ("one tree for each class" in said) == (task == "multiclass")


def test_trees_of_many_rows_are_deeper() -> None:
    depths = [
        make_tree_training(rows, Task("binary"))["phases"][0]["depth"]
        for rows in (DEEPER - 1, DEEPER)
    ]
    assert depths == [3, 4]


def test_a_column_with_more_categories_than_trees_tell_apart_is_left_out() -> None:
    """Networks take it: they have no such limit."""
    texts = [f"t{n % (MAX_CATEGORIES + 1)}" for n in range(1300)]
    table(
        "bank.csv", "customer,age,town,default", lambda n: f"K{n},{n % 50},{texts[n]},{n % 2}", 1300
    )
    told = f"left out    town: more than {MAX_CATEGORIES} different texts, the maximum for trees  "
    assert told in run(*TREES)
    assert tables("bank.toml")["data"]["drop"] == ["town"]
    assert "left out" not in run(*BANK, "--force")
    # An empty cell is one more category.
    texts = ["" if n == 3 else f"t{n % MAX_CATEGORIES}" for n in range(1300)]
    table(
        "bank.csv", "customer,age,town,default", lambda n: f"K{n},{n % 50},{texts[n]},{n % 2}", 1300
    )
    assert told in run(*TREES, "--force")


def test_from_two_tables_to_predictions(tmp_path: Path) -> None:
    """Cells that are missing in training or in new rows are no hindrance at either party."""
    run(*TREES)
    run(*SHOP)
    found, base = combine_party_files([Path("bank.toml"), Path("shop.toml")])
    (phase,) = found["phases"]
    made: dict[str, Any] = found | {"phases": [phase | {"encryption": "none", "trees": 8}]}
    trained = vfl.simulate(vfl.Recipe.from_dict(made, base), out=tmp_path / "runs", quiet=True)
    assert trained.metrics["validation"]["auc"] > 0.9
    table(
        "new.csv",
        "customer,age,kind",
        lambda n: f"N{n},{n if n % 2 else ''},{'' if n % 3 else 'a'}",
        20,
    )
    table(
        "new-shop.csv", "client_no,orders,town", lambda n: f"n{n},,{'Paris' if n % 2 else ''}", 20
    )
    predict_rows(
        trained.folder, {"bank": "new.csv", "shop": "new-shop.csv"}, Output(Path("scores.csv"))
    )
    with Path("scores.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["customer"] for row in rows] == [f"N{n}" for n in range(20)]
    assert [row["matched_customer"] for row in rows] == [f"n{n}" for n in range(20)]
    assert all(0.0 < float(row["score_yes"]) < 1.0 for row in rows)

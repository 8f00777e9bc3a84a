"""The rules by which ``vfl new recipe --method secureboost`` fills in a recipe of trees."""

from __future__ import annotations

from typing import Any, Literal

from vfl.new.rules import Task
from vfl_common.config.recipe import Recipe
from vfl_party.methods.secureboost.settings import MOST_CODES

Method = Literal["splitnn", "secureboost"]
# Of a column; a missing cell is one of them.
MOST_CATEGORIES = MOST_CODES
# Rows of the active party from which a tree has one level more.
DEEPER = 10_000
# Of a regression's leaf.
_LEAST_ROWS = 5


def grows_trees(recipe: Recipe) -> bool:
    """Whether the recipe grows trees, which take missing cells as they are."""
    return any(phase.kind == "secureboost" for phase in recipe.phases)


def training_for(rows: int, task: Task) -> dict[str, Any]:
    """Returns the tables of a recipe about its training, for ``rows`` rows.

    Early stopping ends it, so the number of trees is the most. A round of a multiclass task grows a
    tree for each class, which takes so many times as long: so there are fewer rounds, of larger
    steps. Paillier is for every version of Python.
    """
    few = task.kind == "multiclass"
    phase: dict[str, Any] = {
        "kind": "secureboost",
        "trees": 20 if few else 40,
        "depth": 3 if rows < DEEPER else 4,
        "learning_rate": 0.3 if few else 0.2,
        "early_stopping": 5 if few else 8,
        "encryption": "paillier",
    }
    # The second derivative of each row is 1.
    if task.kind == "regression":
        phase["min_child_weight"] = float(_LEAST_ROWS)
    return {"phases": [phase]}

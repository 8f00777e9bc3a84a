"""The rules of ``vfl new recipe --method secureboost`` for a recipe of trees."""

from __future__ import annotations

from typing import Any, Literal

from vfl.new.rules import Task
from vfl_common.config.recipe import Recipe
from vfl_party.methods.secureboost.settings import MAX_CODES

Method = Literal["splitnn", "secureboost"]
# The maximum number of categories of a column, including missing cells.
MAX_CATEGORIES = MAX_CODES
# The number of the active party's rows from which a tree has one more level.
DEEPER = 10_000
# The minimum number of rows of a regression's leaf.
_MIN_ROWS = 5


def grows_trees(recipe: Recipe) -> bool:
    """Returns whether the recipe grows trees, which accept missing cells."""
    return any(phase.kind == "secureboost" for phase in recipe.phases)


def training_for(rows: int, task: Task) -> dict[str, Any]:
    """Returns the tables of a recipe about its training, for ``rows`` rows.

    The number of trees is an upper bound, as early stopping ends training. A round of a multiclass
    task grows a tree for each class and takes longer, so there are fewer rounds, of larger steps.
    Paillier is for every version of Python.
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
    # The second derivative of each row is 1, so the sum is the number of rows.
    if task.kind == "regression":
        phase["min_child_weight"] = float(_MIN_ROWS)
    return {"phases": [phase]}

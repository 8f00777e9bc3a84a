"""The defaults of ``vfl new recipe --method secureboost``, a recipe that grows trees."""

from __future__ import annotations

from typing import Any, Literal

from vfl.new.rules import Task
from vfl_common.config.recipe import Recipe
from vfl_party.methods.secureboost.settings import MAX_CODES

Method = Literal["splitnn", "secureboost"]
# The maximum number of categories of a column, including missing cells.
MAX_CATEGORIES = MAX_CODES
# With at least this number of the active party's rows, trees have one more level.
DEEPER = 10_000
# The minimum number of rows in a leaf for a regression.
_MIN_ROWS = 5


def grows_trees(recipe: Recipe) -> bool:
    """Returns whether the recipe grows trees, which accept missing cells."""
    return any(phase.kind == "secureboost" for phase in recipe.phases)


def make_tree_training(rows: int, task: Task) -> dict[str, Any]:
    """Returns the tables of a recipe about the training of trees, for ``rows`` rows.

    The number of rounds is an upper bound because of early stopping. A round of a multiclass task
    grows a tree for each class and takes longer, so there are fewer rounds and a higher learning
    rate. Paillier encryption works with every version of Python.
    """
    is_multiclass = task.kind == "multiclass"
    phase: dict[str, Any] = {
        "kind": "secureboost",
        "trees": 20 if is_multiclass else 40,
        "depth": 3 if rows < DEEPER else 4,
        "learning_rate": 0.3 if is_multiclass else 0.2,
        "early_stopping": 5 if is_multiclass else 8,
        "encryption": "paillier",
    }
    # In a regression, the weight (second derivative) of each row is 1, so the sum is a row count.
    if task.kind == "regression":
        phase["min_child_weight"] = float(_MIN_ROWS)
    return {"phases": [phase]}

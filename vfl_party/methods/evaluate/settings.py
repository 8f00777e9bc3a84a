"""The recipe's settings for an evaluation, and the metric by which it measures parties."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_common.config.base import KindName, Section
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.metrics import first_metric
from vfl_party.phases.stand_in import StandIn

# {key: the key that must be true for it to have an effect}.
_REQUIRED_KEYS = {
    "absent": "subsets",
    "permutations": "subsets",
    "resamples": "subsets",
    "repeats": "importance",
}


class EvaluateSettings(Section):
    """Settings of an evaluation: the splits, and what is measured besides their metrics."""

    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate; a split without rows is skipped."""
    subsets: bool = False
    """Whether the quality of each set of parties is measured on validation and test rows, and each
    party's contribution is computed from it.
    """
    absent: StandIn = "mean"
    """The embedding that replaces a party that is not in a set: the `mean` of its embeddings of the
    training rows, or `zero`.
    """
    metric: KindName | None = None
    """The metric by which the contribution of parties and columns is measured. Default: `auc`
    (binary, multilabel), `accuracy` (multiclass), `rmse` (regression), `c_index` (survival), `ndcg`
    (ranking).
    """
    permutations: Annotated[int, Field(ge=2, le=10_000)] = 50
    """The number of orders of the parties that are drawn if there are more than six parties."""
    resamples: Annotated[int, Field(ge=2, le=10_000)] = 100
    """The number of bootstrap samples for the standard errors."""
    importance: bool = False
    """Whether each party learns how much each of its columns adds to the quality on validation
    rows.
    """
    repeats: Annotated[int, Field(ge=2, le=1_000)] = 5
    """The number of times that each column is permuted."""

    def model_post_init(self, _context: Any) -> None:
        for key, required in _REQUIRED_KEYS.items():
            if key in self.model_fields_set and not getattr(self, required):
                raise ValueError(
                    f"{key} has no effect without {required} = true. Add it, or remove {key}."
                )
        if self.metric is not None and not (self.subsets or self.importance):
            raise ValueError(
                "metric has no effect without subsets = true or importance = true. Add one of "
                "them, or remove metric."
            )
        if self.subsets and not {"validation", "test"} & set(self.splits):
            raise ValueError(
                "subsets needs validation or test rows, but splits contains neither. Add one of "
                "them to splits."
            )
        if self.importance and "validation" not in self.splits:
            raise ValueError('importance needs validation rows. Add "validation" to splits.')


def select_metric(task: TaskSettings, phase: str, recipe_metric: str | None) -> str:
    """Returns the metric by which a phase measures parties. ``recipe_metric``: the metric in the
    recipe. Raises InputError if the task has no such metric.
    """
    name = recipe_metric or first_metric(task)
    if name not in task.all_metrics:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: metric: not a metric of a {task.kind} task (got {name!r}). "
            f"Choose one of {', '.join(task.all_metrics)}, or add others in task.metrics.",
        )
    return name

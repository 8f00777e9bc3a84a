"""Settings of an evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_common.config.base import KindName, Section
from vfl_party.phases.stand_in import StandIn

# {key: the key without which it has no effect}.
_PART_OF = {
    "absent": "subsets",
    "permutations": "subsets",
    "resamples": "subsets",
    "repeats": "importance",
}


class EvaluateSettings(Section):
    """What is measured, and by which rows."""

    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate; one without rows is skipped."""
    subsets: bool = False
    """Whether the quality of each set of parties is measured, on validation and test rows, and from
    it what each party is worth.
    """
    absent: StandIn = "mean"
    """What stands in for a party that is not in a set: the `mean` of its embeddings of the training
    rows, or `zero`.
    """
    metric: KindName | None = None
    """The metric by which parties are judged. Default: `auc` (binary, multilabel), `accuracy`
    (multiclass), `rmse` (regression), `c_index` (survival), `ndcg` (ranking).
    """
    permutations: Annotated[int, Field(ge=2, le=10_000)] = 50
    """With more than six parties: how many orders of the parties are drawn."""
    resamples: Annotated[int, Field(ge=2, le=10_000)] = 100
    """How often the rows are resampled for the errors (bootstrap)."""
    importance: bool = False
    """Whether each party learns what each of its own columns adds to the quality, on validation
    rows.
    """
    repeats: Annotated[int, Field(ge=2, le=1_000)] = 5
    """How often each column is permuted."""

    def model_post_init(self, _context: Any) -> None:
        for key, of in _PART_OF.items():
            if key in self.model_fields_set and not getattr(self, of):
                raise ValueError(
                    f"{key} has no effect without {of} = true. Add it, or remove {key}."
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

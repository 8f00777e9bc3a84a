"""The recipe's settings for a student."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vfl_common.config.models import (
    EncoderSettings,
    GbdtTop,
    PositiveInt,
    Temperature,
    TopKinds,
    TopSettings,
)
from vfl_party.models.training import EarlyStopping, TrainingSettings

# Round 0 collects embeddings. In all later rounds the active party works alone.
ASK = 0
# How much a part of the loss counts.
Weight = Annotated[float, Field(ge=0.0, le=1e6)]


class StudentSettings(TrainingSettings):
    """Training of the active party's own model, with the joint model as its teacher. A round is
    ``validate_every`` epochs, then validation and a checkpoint.

    The loss of a batch is the mean over its rows of: the task's loss, if the row's label is known;
    plus ``weight`` times the distance from the teacher's answer, and ``match`` times that from its
    representation, if all parties hold the row.
    """

    encoder: EncoderSettings | None = None
    """The student's encoder. Default: one like the active party's."""
    embedding_size: PositiveInt | None = None
    """The width of the student's embedding. Default: that of the active party's."""
    top: TopKinds = TopSettings()
    """The student's model on its embedding."""
    weight: Weight = 1.0
    """How much the distance from the teacher's answer counts (λ)."""
    temperature: Temperature = 1.0
    """The number by which logits are divided before they are compared (T). A regression has
    none.
    """
    match: Weight = 0.0
    """How much the distance from the joint representation counts (μ)."""
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    """Epochs between two validations; together they are one round."""
    early_stopping: EarlyStopping | None = None
    """When training ends before its last epoch. Default: off."""
    alone: bool = False
    """Whether the same model is also trained without a teacher, to compare."""
    together: bool = False
    """Whether the joint model is also evaluated, to compare: then the others embed the rows of
    ``splits``, too.
    """
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate; one without rows is skipped."""

    @field_validator("top")
    @classmethod
    def _check_top(cls, value: TopKinds) -> TopKinds:
        if isinstance(value, GbdtTop):
            raise ValueError(
                "a student's top model cannot consist of trees (got 'gbdt'). Use 'mlp'."
            )
        return value

    @property
    def teaches(self) -> bool:
        """Whether the student learns from the joint model."""
        return self.weight > 0 or self.match > 0

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if not self.teaches:
            raise ValueError(
                "weight and match are both 0, so the student does not use the teacher. Set one of "
                "them above 0."
            )

"""The recipe's settings for the student."""

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

# The number of the round that collects embeddings. In all later rounds the active party trains
# alone.
ASK = 0
# The weight of a term of the loss.
Weight = Annotated[float, Field(ge=0.0, le=1e6)]


class StudentSettings(TrainingSettings):
    """Settings for training the active party's own model, with the joint model as its teacher. A
    round is ``validate_every`` epochs, followed by validation and a checkpoint.

    The loss of a batch is a mean over its rows. A row with a known label adds the task's loss. A
    row that all parties hold adds ``weight`` times the distance from the teacher's output, and
    ``match`` times the distance from the joint representation.
    """

    encoder: EncoderSettings | None = None
    """The student's encoder. Default: the same kind as the active party's encoder."""
    embedding_size: PositiveInt | None = None
    """The width of the student's embedding. Default: the width of the active party's embedding."""
    top: TopKinds = TopSettings()
    """The student's top model, on its embedding."""
    weight: Weight = 1.0
    """The weight λ of the distance from the teacher's output."""
    temperature: Temperature = 1.0
    """The temperature T, by which logits are divided before they are compared. It has no effect in
    a regression task.
    """
    match: Weight = 0.0
    """The weight μ of the distance from the joint representation."""
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    """The number of epochs between two validations, which form one round."""
    early_stopping: EarlyStopping | None = None
    """When training ends before its last epoch (early stopping). Default: off."""
    alone: bool = False
    """Whether the same model is also trained without a teacher, for comparison."""
    together: bool = False
    """Whether the joint model is also evaluated, for comparison. The passive parties then also send
    embeddings of the rows of ``splits``.
    """
    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate; a split without rows is skipped."""

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

"""The recipe's settings for the probe. The defaults are from MocoSFL, appendix A.1, and from Wu et
al. 2018 for the neighbours.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Temperature, UnjudgedOptimizer
from vfl_common.config.models import PositiveInt as Width


class ProbeSettings(Section):
    """A linear model, or a small MLP, on frozen features, and a vote of the nearest neighbours.

    The model of the last epoch is used, not the best. The paper's 100 epochs of 50,000 rows are
    39,100 steps. With a few hundred rows, 100 epochs are too few steps for the linear model to
    converge.
    """

    hidden: tuple[Width, ...] = ()
    """The widths of hidden layers, each with batch normalisation and ReLU (``[512]`` in the code of
    MocoSFL, appendix B.6). With hidden layers, the head is discarded after the phase. Default: no
    hidden layers; the head is the top model.
    """
    labelled: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """For experiments: the share of the training rows with known labels that are used for training
    and voting.
    """
    epochs: PositiveInt = 100
    """The number of epochs over the training rows."""
    least_steps: PositiveInt = 4000
    """The minimum number of steps. With few rows, epochs are added until it is reached."""
    batch_size: PositiveInt = 128
    """The number of rows in a batch."""
    optimizer: UnjudgedOptimizer = OptimizerSettings(kind="adam", lr=1e-3, schedule="cosine")
    """The optimizer of the linear model."""
    neighbours: PositiveInt = 200
    """The number of nearest training rows that vote on the class of a row."""
    temperature: Temperature = 0.1
    """The temperature of votes. The weight of a neighbour's vote is exp(cosine / temperature)."""
    splits: tuple[Literal["validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate."""

    @field_validator("splits")
    @classmethod
    def _check_distinct(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"contains a split twice (got {value}). Name each split once.")
        return value

"""The recipe's settings for the probe. Defaults: MocoSFL, appendix A.1, and Wu et al. 2018 for the
neighbours.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Temperature, UnjudgedOptimizer
from vfl_common.config.models import PositiveInt as Width


class ProbeSettings(Section):
    """A linear model, or a small MLP, on frozen features, and a vote of the nearest neighbours. The
    last epoch counts, and not the best. The paper's 100 epochs of 50,000 rows are 39,100 steps;
    100 epochs of a few hundred rows leave the linear model far from its best.
    """

    hidden: tuple[Width, ...] = ()
    """Widths of hidden layers, each with batch normalisation and ReLU (MocoSFL, appendix B.6, has
    ``[512]`` in its code). Then the head is the phase's own and not kept. Default: none, the top
    model.
    """
    labelled: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """For experiments: the share of the training rows with known labels that are learnt from, and
    that vote.
    """
    epochs: PositiveInt = 100
    """Epochs over the training rows."""
    least_steps: PositiveInt = 4000
    """With few rows, epochs are added until there are this many steps."""
    batch_size: PositiveInt = 128
    """Rows of a batch."""
    optimizer: UnjudgedOptimizer = OptimizerSettings(kind="adam", lr=1e-3, schedule="cosine")
    """The optimizer of the linear model."""
    neighbours: PositiveInt = 200
    """How many training rows vote on a row."""
    temperature: Temperature = 0.1
    """A neighbour's vote weighs exp(cosine / temperature)."""
    splits: tuple[Literal["validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate."""

    @field_validator("splits")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"contains a split twice (got {value}). Name each split once.")
        return value

"""The recipe's settings for the probe. Defaults: MocoSFL, appendix A.1, and Wu et al. 2018 for the
neighbours.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt, field_validator

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Temperature


class ProbeSettings(Section):
    """A linear model on frozen features, and a vote of the nearest neighbours; the last epoch
    counts, not the best.

    ``least_steps``: with few rows, ``epochs`` are raised until there are this many steps. The
    paper's 100 epochs of 50,000 rows are 39,100 steps; 100 epochs of a few hundred rows leave the
    linear model far from its best. ``neighbours``: how many training rows vote, each with weight
    exp(cosine / ``temperature``).
    """

    epochs: PositiveInt = 100
    least_steps: PositiveInt = 4000
    batch_size: PositiveInt = 128
    optimizer: OptimizerSettings = OptimizerSettings(kind="adam", lr=1e-3, schedule="cosine")
    neighbours: PositiveInt = 200
    temperature: Temperature = 0.1
    splits: tuple[Literal["validation", "test"], ...] = ("validation", "test")

    @field_validator("splits")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError("names a split twice; name each once")
        return value

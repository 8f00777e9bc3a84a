"""The recipe's settings for FedCVT."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from vfl_common.config.base import Section
from vfl_common.config.models import Probability
from vfl_common.config.recipe_tables import Fraction
from vfl_party.models.training import OwnOptimizers, TrainingSettings
from vfl_party.outbound.declared import Role
from vfl_party.outbound.noise import Amplifier

Preset = Literal["paper", "released"]
Weight = Annotated[float, Field(ge=0.0, le=1e6)]
Sharpness = Annotated[float, Field(ge=0.01, le=1.0)]


class Lambdas(Section):
    """The weights of the five terms added to the cross-entropies. The paper's terms are sums over a
    representation's elements, so they are larger by its width.
    """

    shared: Weight | None = None
    """λ1: the parties' shared representations of an aligned row become similar. Default of all
    five: 0.001, with preset ``released`` 0.1.
    """
    overlap_active: Weight | None = None
    """λ2: unique and shared representations of the active party's rows become unlike."""
    overlap_passive: Weight | None = None
    """λ3: unique and shared representations of the passive party's rows become unlike."""
    estimate_active: Weight | None = None
    """λ4: estimated representations of the active party become like the true ones."""
    estimate_passive: Weight | None = None
    """λ5: estimated representations of the passive party become like the true ones."""

    def of(self, term: str, preset: Preset) -> float:
        """Returns the weight of a term."""
        weight: float | None = getattr(self, term)
        if weight is not None:
            return weight
        return 0.1 if preset == "released" else 0.001


class FedCVTSettings(TrainingSettings, OwnOptimizers):
    """A step has a batch of each kind of rows; a round is ``validate_every`` epochs, then
    validation and a checkpoint.

    An epoch goes once over the labelled rows, in batches of ``batch_size``. The other kinds
    repeat at their own pace, in full batches.
    """

    unlabelled_batch_size: NonNegativeInt = 64
    """Aligned rows without labels in a step; 0 leaves them out."""
    own_batch_size: NonNegativeInt = 64
    """Rows of a step that only one party has; 0 leaves them out."""
    own_rows: Literal["both", "active", "passive"] = "both"
    """Whose own rows take part."""
    lambdas: Lambdas = Lambdas()
    """The weights of the terms added to the cross-entropies."""
    threshold: Probability = 0.5
    """The probability that all three classifiers must give the same class so that a row gets a
    pseudo-label.
    """
    warmup: Fraction = 0.1
    """The share of the epochs, rounded down, before rows get pseudo-labels."""
    sharpen: Sharpness | None = None
    """T: attention is raised to the power 1/T; 1 changes nothing. Default: 1, with preset
    ``released`` 0.5.
    """
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    """Epochs between two validations; together they are one round."""
    iso: Amplifier = 0.0
    """The amplifier λ of isotropic noise on the gradients that the active party sends."""

    def own_batch(self, role: Role) -> int:
        """Returns how many rows of its own the party of this role has in a step."""
        return self.own_batch_size if self.own_rows in ("both", role) else 0

    def sharpness(self, preset: Preset) -> float:
        """Returns T."""
        if self.sharpen is not None:
            return self.sharpen
        return 0.5 if preset == "released" else 1.0

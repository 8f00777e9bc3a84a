"""The recipe's settings for FedCVT."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from vfl_common.config.base import Section
from vfl_common.config.models import Probability
from vfl_common.config.recipe_tables import Fraction
from vfl_party.models.training import OwnOptimizers, TrainingSettings
from vfl_party.outbound.declared import Role
from vfl_party.outbound.filter import Amplifier

Preset = Literal["paper", "released"]
Weight = Annotated[float, Field(ge=0.0, le=1e6)]
Sharpness = Annotated[float, Field(ge=0.01, le=1.0)]


class Lambdas(Section):
    """The weights of the five terms that are added to the cross-entropies. The paper's terms are
    sums over the elements of a representation, not means, so they grow with its width.
    """

    shared: Weight | None = None
    """λ1, the weight of the term that makes the parties' shared representations of an aligned row
    similar. Default of all five: 0.001; 0.1 with preset ``released``.
    """
    overlap_active: Weight | None = None
    """λ2, the weight of the term that makes unique and shared representations of the active party's
    rows dissimilar.
    """
    overlap_passive: Weight | None = None
    """λ3, the weight of the term that makes unique and shared representations of the passive
    party's rows dissimilar.
    """
    estimate_active: Weight | None = None
    """λ4, the weight of the term that makes estimated representations of the active party similar
    to the true ones.
    """
    estimate_passive: Weight | None = None
    """λ5, the weight of the term that makes estimated representations of the passive party similar
    to the true ones.
    """

    def of(self, term: str, preset: Preset) -> float:
        """Returns the weight of a term."""
        weight: float | None = getattr(self, term)
        if weight is not None:
            return weight
        return 0.1 if preset == "released" else 0.001


class FedCVTSettings(TrainingSettings, OwnOptimizers):
    """A step has one batch of each kind of rows. A round is ``validate_every`` epochs, followed by
    validation and a checkpoint.

    An epoch goes once over the labelled rows, in batches of ``batch_size``. The other kinds of rows
    are repeated independently of epochs, in full batches.
    """

    unlabelled_batch_size: NonNegativeInt = 64
    """The number of aligned rows without labels in a step; 0 uses none."""
    own_batch_size: NonNegativeInt = 64
    """The number of rows in a step that only one party has, for each party; 0 uses none."""
    own_rows: Literal["both", "active", "passive"] = "both"
    """The parties whose own rows (which only that party has) are used."""
    lambdas: Lambdas = Lambdas()
    """The weights of the terms that are added to the cross-entropies."""
    threshold: Probability = 0.5
    """The probability that all three classifiers must assign to the same class before a row gets a
    pseudo-label.
    """
    warmup: Fraction = 0.1
    """The share of epochs, rounded down, that come before pseudo-labels are used."""
    sharpen: Sharpness | None = None
    """The temperature T of attention, whose weights are raised to the power 1/T; 1 changes nothing.
    Default: 1; 0.5 with preset ``released``.
    """
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    """The number of epochs between two validations, which form one round."""
    iso: Amplifier = 0.0
    """The amplifier λ of isotropic noise on the gradients that the active party sends."""

    def get_own_batch_size(self, role: Role) -> int:
        """Returns the number of rows in a step that only the party of this role has."""
        return self.own_batch_size if self.own_rows in ("both", role) else 0

    def resolve_sharpness(self, preset: Preset) -> float:
        """Returns the temperature T of attention."""
        if self.sharpen is not None:
            return self.sharpen
        return 0.5 if preset == "released" else 1.0

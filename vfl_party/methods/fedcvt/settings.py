"""The recipe's settings for FedCVT."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt

from vfl_common.config.base import Section
from vfl_common.config.models import Probability
from vfl_common.config.recipe import Fraction
from vfl_party.models.training import TrainingSettings
from vfl_party.outbound.declared import Role
from vfl_party.outbound.noise import Amplifier

Preset = Literal["paper", "released"]
Weight = Annotated[float, Field(ge=0.0, le=1e6)]
Sharpness = Annotated[float, Field(ge=0.01, le=1.0)]


class Lambdas(Section):
    """The weights of the five terms beside the cross-entropies; None: 0.001, released: 0.1, as in
    its commands.

    The paper's terms are sums over a representation's elements, so they are larger by its width.
    """

    # λ1: the parties' shared representations of an aligned row are alike.
    shared: Weight | None = None
    # λ2: unique and shared representations of the active party's rows are unlike.
    overlap_active: Weight | None = None
    # λ3: the same of the passive party's rows.
    overlap_passive: Weight | None = None
    # λ4: estimated representations of the active party are as the true ones.
    estimate_active: Weight | None = None
    # λ5: the same of the passive party.
    estimate_passive: Weight | None = None

    def of(self, term: str, preset: Preset) -> float:
        """Returns the weight of a term."""
        given: float | None = getattr(self, term)
        if given is not None:
            return given
        return 0.1 if preset == "released" else 0.001


class FedCVTSettings(TrainingSettings):
    """A step has a batch of each kind of rows; a round is ``validate_every`` epochs, then
    validation and a checkpoint.

    An epoch goes once over the labelled rows, in batches of ``batch_size``. The other kinds go
    round beside them, at their own pace, in full batches: ``unlabelled_batch_size`` aligned rows
    without labels, and ``own_batch_size`` rows that only the active party has, or only the passive
    party. 0: none of these take part.

    ``own_rows``: whose own rows take part, if ``own_batch_size`` is not 0. ``threshold``: a row
    gets a pseudo-label if all three classifiers name one class, each with a probability above it.
    ``warmup``: the share of the epochs, rounded down, before rows get pseudo-labels. ``sharpen``:
    T, the power 1/T to which attention is raised; 1 changes nothing.
    """

    unlabelled_batch_size: NonNegativeInt = 64
    own_batch_size: NonNegativeInt = 64
    own_rows: Literal["both", "active", "passive"] = "both"
    lambdas: Lambdas = Lambdas()
    # As in the released code.
    threshold: Probability = 0.5
    warmup: Fraction = 0.1
    # 1; released: 0.5, of the 0.1 to 0.8 of its commands.
    sharpen: Sharpness | None = None
    # Epochs.
    validate_every: Annotated[int, Field(gt=0, le=1000)] = 1
    # λ of the noise on the gradients that the active party sends.
    iso: Amplifier = 0.0

    def own_batch(self, role: Role) -> int:
        """Returns how many rows of its own the party of this role has in a step."""
        return self.own_batch_size if self.own_rows in ("both", role) else 0

    def sharpness(self, preset: Preset) -> float:
        """Returns T."""
        if self.sharpen is not None:
            return self.sharpen
        return 0.5 if preset == "released" else 1.0

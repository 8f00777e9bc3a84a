"""The recipe's settings for FedHSSL and its sub-procedures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt

from vfl_party.outbound.noise import Amplifier
from vfl_party.selfsup.settings import SelfSupSettings

Keep = Literal["mean", "concat", "cross", "local"]


class FedHSSLSettings(SelfSupSettings):
    """One round: the cross-party step, the local step, aggregation, each if it is switched on.

    FedLocalSSL: ``cross = false, aggregate = false``; FedCSSL (and VFed-SSD's pretraining): ``local
    = false, aggregate = false``; FedGSSL: ``aggregate = false``; FedHSSL: all three. With ``keep =
    "local"`` the last two are FedGSSL* and FedHSSL*.
    """

    cross: bool = True
    local: bool = True
    aggregate: bool = True
    # 0.5; the released commands run with 0.
    gamma: Amplifier | None = None
    # In a round, over the aligned training rows.
    cross_epochs: PositiveInt = 1
    # In a round, over all of a party's training rows.
    local_epochs: PositiveInt = 1
    # E: updates of the cross-party step on one exchange.
    local_updates: PositiveInt = 1
    # What fine-tuning gets; None: the mean of both encoders, or the only one.
    keep: Keep | None = None
    # λ of the noise on the active party's projections in the cross-party step.
    iso_embedding: Amplifier = 0.0
    # λ of the noise on its parameters before aggregation.
    iso_weights: Amplifier = 0.0

    def model_post_init(self, _context: Any) -> None:
        if not (self.cross or self.local):
            raise ValueError("cross and local are both off: nothing is trained")
        if self.aggregate and not self.local:
            raise ValueError(
                "aggregate = true shares the local encoders' top: it needs local = true"
            )
        if self.gamma is not None and not (self.cross and self.local):
            raise ValueError(
                "gamma weighs the cross-party encoder's guidance of the local one: it needs both"
            )
        if self.iso_weights and not self.aggregate:
            raise ValueError(
                "iso_weights is noise on what is aggregated: it needs aggregate = true"
            )
        if self.iso_embedding and not self.cross:
            raise ValueError(
                "iso_embedding is noise on what the cross-party step sends: it needs cross = true"
            )
        if self.keep in ("mean", "concat", "cross") and not self.cross:
            raise ValueError(f"keep = {self.keep!r} needs cross = true")
        if self.keep in ("mean", "concat", "local") and not self.local:
            raise ValueError(f"keep = {self.keep!r} needs local = true")

    @property
    def kept(self) -> Keep:
        """The encoders that fine-tuning gets."""
        if self.keep is not None:
            return self.keep
        return "mean" if self.cross and self.local else "cross" if self.cross else "local"

    def guidance(self, preset: Literal["paper", "released"]) -> float:
        """Returns γ of Eq. 6."""
        if not (self.cross and self.local):
            return 0.0
        if self.gamma is None:
            return 0.0 if preset == "released" else 0.5
        return self.gamma

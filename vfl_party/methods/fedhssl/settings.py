"""The recipe's settings for FedHSSL and its sub-procedures."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt

from vfl_party.outbound.filter import Amplifier
from vfl_party.selfsup.settings import SelfSupSettings

Keep = Literal["mean", "concat", "cross", "local"]


class FedHSSLSettings(SelfSupSettings):
    """One round consists of the cross-party step, the local step and the aggregation, as far as
    they are enabled.

    FedLocalSSL: ``cross = false, aggregate = false``; FedCSSL (and VFed-SSD's pretraining): ``local
    = false, aggregate = false``; FedGSSL: ``aggregate = false``; FedHSSL: all three. With ``keep =
    "local"`` the last two are FedGSSL* and FedHSSL*.
    """

    cross: bool = True
    """Whether a round has the cross-party step."""
    local: bool = True
    """Whether a round has the local step."""
    aggregate: bool = True
    """Whether the server averages the tops of the local encoders, their projectors and predictors.
    """
    gamma: Amplifier | None = None
    """The weight γ with which the cross-party encoder guides the local encoder (Eq. 6). Default:
    0.5; 0 with preset ``released``.
    """
    cross_epochs: PositiveInt = 1
    """The number of epochs in a round's cross-party step, over the aligned training rows."""
    local_epochs: PositiveInt = 1
    """The number of epochs in a round's local step, over ``local_rows``."""
    local_rows: Literal["all", "aligned"] = "all"
    """The rows of the local step: all of a party's training rows, or only the aligned rows, whose
    share ``rows.aligned`` can reduce (FedHSSL, Table IX).
    """
    local_updates: PositiveInt = 1
    """The number e of updates that the cross-party step makes after each exchange."""
    keep: Keep | None = None
    """The encoder that fine-tuning gets. Default: the mean of both encoders, or the only encoder.
    """
    iso_embedding: Amplifier = 0.0
    """The amplifier λ of isotropic noise on the active party's projections."""
    iso_weights: Amplifier = 0.0
    """The amplifier λ of isotropic noise on the active party's weights before they are averaged."""

    def model_post_init(self, _context: Any) -> None:
        if not (self.cross or self.local):
            raise ValueError(
                "cross and local are both false, so nothing is trained. Set one of them to true."
            )
        if self.aggregate and not self.local:
            raise ValueError(
                "aggregate = true shares the tops of the local encoders and needs local = true. "
                "Set local = true, or aggregate = false."
            )
        if self.local_rows == "aligned" and not self.local:
            raise ValueError(
                'local_rows = "aligned" applies to the local step and needs local = true. Set '
                "local = true, or remove local_rows."
            )
        if self.gamma is not None and not (self.cross and self.local):
            raise ValueError(
                "gamma weights the guidance of the local encoder by the cross-party encoder and "
                "needs both. Set cross and local to true, or remove gamma."
            )
        if self.iso_weights and not self.aggregate:
            raise ValueError(
                "iso_weights adds noise to aggregated weights and needs aggregate = true. Set "
                "aggregate = true, or remove iso_weights."
            )
        if self.iso_embedding and not self.cross:
            raise ValueError(
                "iso_embedding adds noise to what the cross-party step sends and needs cross = "
                "true. Set cross = true, or remove iso_embedding."
            )
        if self.keep in ("mean", "concat", "cross") and not self.cross:
            raise ValueError(
                f"keep = {self.keep!r} needs cross = true. Set cross = true, or change keep."
            )
        if self.keep in ("mean", "concat", "local") and not self.local:
            raise ValueError(
                f"keep = {self.keep!r} needs local = true. Set local = true, or change keep."
            )

    @property
    def keep_rule(self) -> Keep:
        """The rule for the encoder that fine-tuning gets: ``keep``, or its default."""
        if self.keep is not None:
            return self.keep
        return "mean" if self.cross and self.local else "cross" if self.cross else "local"

    def guidance(self, preset: Literal["paper", "released"]) -> float:
        """Returns the guidance weight γ of Eq. 6."""
        if not (self.cross and self.local):
            return 0.0
        if self.gamma is None:
            return 0.0 if preset == "released" else 0.5
        return self.gamma

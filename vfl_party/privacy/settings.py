"""Settings of differentially private training of a party's own models (FedOnce-L1)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.models import Norm

Mode = Literal["fixed", "matched"]
Division = Literal["moments", "simple"]


class DpSettings(Section):
    """Either the joint ``epsilon`` of all parties, or the ``noise_multiplier`` that all of them
    use.

    ``mode``: ``fixed`` leaves every row its target. ``matched`` assigns targets over a batch, as
    FedOnce does; then no guarantee is established, because a row's gradient depends on the other
    rows. ``division`` of the budget among the parties: ``moments`` adds up their Rényi divergences;
    ``simple`` gives each of k parties epsilon / k at delta / k (FedOnce's Priv-Baseline), which
    needs more noise.
    """

    epsilon: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    # 0: gradients are clipped, no noise.
    noise_multiplier: Annotated[float, Field(ge=0.0, le=1e4)] | None = None
    # Below 1 / rows, or it allows revealing one row.
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    # L2, of one row's gradient over all of a party's parameters.
    max_grad_norm: Norm = 1.0
    mode: Mode = "fixed"
    division: Division = "moments"

    def model_post_init(self, _context: Any) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give either epsilon or noise_multiplier")

"""Settings of differentially private training of a party's own models (FedOnce-L1)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.models import Norm

Mode = Literal["fixed", "matched"]
Division = Literal["moments", "simple"]


class DpSettings(Section):
    """The keys of ``dp``: differential privacy of a phase. With ``mode = "matched"`` a row's
    gradient depends on other rows, so there is no guarantee. ``division = "simple"`` is the
    Priv-Baseline of FedOnce.
    """

    epsilon: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """The joint ε of all parties. Set this or ``noise_multiplier``."""
    noise_multiplier: Annotated[float, Field(ge=0.0, le=1e4)] | None = None
    """The standard deviation of the noise, as a multiple of ``max_grad_norm``; 0 clips gradients
    without noise.
    """
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """δ of the guarantee; keep it far below 1 / rows."""
    max_grad_norm: Norm = 1.0
    """The maximum L2 norm of one row's gradient over all parameters of a party; a longer gradient
    is scaled down.
    """
    mode: Mode = "fixed"
    """``fixed``: every row keeps its target. ``matched``: targets are assigned within a batch,
    without a guarantee.
    """
    division: Division = "moments"
    """How the budget is divided: ``moments`` adds the parties' Rényi divergences; ``simple`` gives
    each of k parties ε / k at δ / k, with more noise.
    """

    def model_post_init(self, _context: Any) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("set epsilon or noise_multiplier, and not both")

"""Settings of differentially private training of a party's own models (FedOnce-L1)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.models import Norm

Mode = Literal["fixed", "matched"]
Division = Literal["moments", "simple"]


class DpSettings(Section):
    """Differential privacy. With ``matched`` targets a row's gradient depends on the other rows, so
    no guarantee is established. ``simple`` is FedOnce's Priv-Baseline.
    """

    epsilon: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """The joint ε of all parties. Give this or ``noise_multiplier``."""
    noise_multiplier: Annotated[float, Field(ge=0.0, le=1e4)] | None = None
    """The noise's standard deviation over ``max_grad_norm``; 0 clips without noise."""
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """δ of the guarantee; keep it far below 1 / rows."""
    max_grad_norm: Norm = 1.0
    """The largest L2 norm of one row's gradient over all of a party's parameters; a longer one is
    shortened.
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
            raise ValueError("set either epsilon or noise_multiplier")

"""Step 3 of a round: partial model aggregation at the server (Alg. 1, lines 28 to 34)."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, PeerError
from vfl_party.methods.fedhssl.exchanges import declare_weights
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.models import top_state
from vfl_party.phases.context import Party
from vfl_party.selfsup.tower import Tower


def get_shared_state(tower: Tower) -> dict[str, Tensor]:
    """Returns {name: tensor} for f_lt ∘ h_l: the parameters and float buffers of top encoder,
    projector and predictor, without copying them.
    """
    state = {f"encoder.{name}": tensor for name, tensor in top_state(tower.encoder).items()}
    for part in ("projector", "predictor"):
        for name, tensor in getattr(tower, part).state_dict(keep_vars=True).items():
            # This skips BatchNorm's integer num_batches_tracked.
            if tensor.is_floating_point():
                state[f"{part}.{name}"] = tensor
    return state


class AggregationStep:
    """One party's side of the aggregation. The server does not average the optimizer's state."""

    def __init__(self, party: Party, phase: str, tower: Tower, settings: FedHSSLSettings) -> None:
        self._party, self._phase, self._tower = party, phase, tower
        self._weights = party.asking(phase, declare_weights(settings, get_shared_state(tower)))

    @torch.no_grad()
    def run(self, round_: int) -> None:
        """Sends the weights of this party's top, and loads the mean of all parties."""
        shared = get_shared_state(self._tower)
        step = StepKey(self._phase, round_, 0)
        mean = self._weights.swap(step, {name: tensor.detach() for name, tensor in shared.items()})
        for name, tensor in shared.items():
            # A mean of variances from honest parties is never negative.
            if name.endswith(".running_var") and bool((mean[name] < 0).any()):
                raise PeerError(
                    Code.NON_FINITE,
                    f"{step}: the averaged {name} is negative, so a party sent weights that "
                    "training cannot produce.",
                    party=self._party.recipe.server,
                )
            tensor.copy_(mean[name])

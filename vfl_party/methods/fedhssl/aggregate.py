"""Step 3, partial model aggregation at the server: Alg. 1, lines 28 to 34."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.errors import Code, PeerError
from vfl_party.context import Party
from vfl_party.exchange import expect
from vfl_party.models import top_state
from vfl_party.privacy.iso import IsoNoise
from vfl_party.selfsup.tower import Tower


def shared_state(tower: Tower) -> dict[str, Tensor]:
    """f_lt ∘ h_l: parameters and float buffers of top encoder, projector and predictor; the tensors themselves."""
    found = {f"encoder.{name}": tensor for name, tensor in top_state(tower.encoder).items()}
    for part in ("projector", "predictor"):
        for name, tensor in getattr(tower, part).state_dict(keep_vars=True).items():
            if tensor.is_floating_point():  # not BatchNorm's num_batches_tracked
                found[f"{part}.{name}"] = tensor
    return found


class AggregationStep:
    """One party's side. The optimizer's state stays with the party.

    ``amplifier``: of the noise on parameters, for the active party; BatchNorm's statistics are sent as they are.
    """

    def __init__(self, party: Party, phase: str, tower: Tower, amplifier: float) -> None:
        self._party, self._phase, self._tower = party, phase, tower
        self._iso = IsoNoise(amplifier)
        tensors = shared_state(tower)
        self.spec = expect(Kind.WEIGHTS, **{name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()})

    @torch.no_grad()
    def run(self, round_: int) -> None:
        """Sends the own top, and goes on with the mean of all parties'."""
        own = shared_state(self._tower)
        sent = {
            name: self._iso.noise(tensor.detach()) if isinstance(tensor, torch.nn.Parameter) else tensor
            for name, tensor in own.items()
        }
        step = StepKey(self._phase, round_, 0)
        mean = self._party.need_server().swap(step, Kind.WEIGHTS, sent, self.spec)
        for name, tensor in own.items():
            if name.endswith(".running_var") and bool((mean[name] < 0).any()):  # sums of squares, until somebody lies
                text = f"{step}: the averaged {name} is negative: a party sent weights that no training gives"
                raise PeerError(Code.NON_FINITE, text, party=self._party.recipe.server)
            tensor.copy_(mean[name])

    def state(self) -> dict[str, Any]:
        return self._iso.state()

    def load_state(self, tree: dict[str, Any]) -> None:
        self._iso.load_state(tree)

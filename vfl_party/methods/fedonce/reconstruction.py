"""An autoencoder instead of random targets: the encoder's output must be enough to give the row back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import TopSettings
from vfl_common.models import build_top, seeded
from vfl_common.optim import build_optimizer, build_schedule, clip
from vfl_common.phase import RoundReport
from vfl_common.seeds import derive_seed
from vfl_party.context import Party
from vfl_party.methods.fedonce.rows import finite, own_batches, rows_to_learn
from vfl_party.methods.fedonce.settings import ADAM, FedOnceSettings


class Reconstruction:
    """The encoder, a decoder that ends with the phase, and the optimizer over both."""

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._rows = rows_to_learn(party, phase, settings.rows)
        self._encoder = party.models["encoder"]
        self._cardinalities = party.need_features().spec.cardinalities
        width = self._given(party.need_features().inputs(self._rows[:1])).shape[1]
        with seeded(derive_seed(party.recipe.seed, "init", phase, party.name, "decoder")):
            decoder = build_top(TopSettings(hidden=settings.decoder), party.embedding_size, width)
        self._decoder = decoder.to(party.device)
        self._params = [*self._encoder.parameters(), *self._decoder.parameters()]
        self._optimize = settings.optimizer or ADAM
        self._optimizer = build_optimizer(self._optimize, self._params)
        self._schedule = build_schedule(self._optimize, self._optimizer, settings.epochs)

    def _given(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """What is to be given back, [B, F]: the numbers, and the categories one-hot."""
        parts = [inputs[0].flatten(1)]
        for column, values in enumerate(self._cardinalities):
            parts.append(F.one_hot(inputs[1][:, column], values).float())
        return torch.cat(parts, dim=1)

    def run_round(self, epoch: int) -> RoundReport:
        """One epoch; tells the mean squared error."""
        party, settings, features = self._party, self._settings, self._party.need_features()
        batches = own_batches(party, self._phase, epoch, len(self._rows), settings.batch_size)
        total = torch.zeros((), device=party.device)
        self._encoder.train()
        for number, batch in enumerate(batches, 1):
            inputs = features.inputs(self._rows[batch])
            loss = F.mse_loss(self._decoder(self._encoder(*inputs)), self._given(inputs))
            self._optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            clip(self._optimize, self._params)
            self._optimizer.step()
            total += loss.detach()
            party.tick(self._phase, epoch, settings.epochs, number, len(batches))
        self._schedule.step()
        mean_loss = finite(total.item() / len(batches), party, self._phase)
        return RoundReport(len(batches), {"local": {"loss": mean_loss}})

    def state(self) -> dict[str, Any]:
        return {
            "decoder": dict(self._decoder.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        self._decoder.load_state_dict(tree["decoder"])
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])

"""Trains an autoencoder, whose decoder reconstructs rows from embeddings, instead of using random
targets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import TopSettings
from vfl_party.base.phase import RoundReport
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.methods.fedonce.rows import get_training_rows
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.methods.fedonce.training import LocalTraining
from vfl_party.models import build_top, seed_torch
from vfl_party.phases.context import Party


class Reconstruction:
    """Trains the encoder together with a decoder that is discarded after the phase."""

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party = party
        self._rows = get_training_rows(party, phase, settings.rows)
        self._encoder = party.models["encoder"]
        self._cardinalities = party.need_features().spec.cardinalities
        width = self._collect_targets(party.need_features().inputs(self._rows[:1])).shape[1]
        with seed_torch(derive_seed(party.own_seed, "init", phase, party.name, "decoder")):
            decoder = build_top(TopSettings(hidden=settings.decoder), party.embedding_size, width)
        self._decoder = decoder.to(party.device)
        autoencoder = nn.ModuleDict({"encoder": self._encoder, "decoder": self._decoder})
        self._training = LocalTraining(party, phase, settings, autoencoder, len(self._rows))

    def _collect_targets(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Returns the values to reconstruct, [B, F]: the numbers, and the categories as one-hot
        vectors.
        """
        columns = [inputs[0].flatten(1)]
        for column, values in enumerate(self._cardinalities):
            columns.append(F.one_hot(inputs[1][:, column], values).to(inputs[0].dtype))
        return torch.cat(columns, dim=1)

    def run_round(self, epoch: int) -> RoundReport:
        """Runs one epoch and reports the mean squared error."""
        features = self._party.need_features()

        def loss(batch: Rows) -> Tensor:
            inputs = features.inputs(self._rows[batch])
            (z_BD,) = self._party.through(self._encoder, inputs)
            return F.mse_loss(self._decoder(z_BD), self._collect_targets(inputs))

        return self._training.run_epoch(epoch, loss)

    def close(self) -> None:
        """Ends the private training, if there is any."""
        self._training.close()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"decoder": dict(self._decoder.state_dict()), **self._training.state()}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._decoder.load_state_dict(tree["decoder"])
        self._training.load_state(tree)

"""Step 1 of a round: cross-party self-supervision on the aligned rows (Alg. 1, lines 3 to 15). No
gradient is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.bundle import StepKey
from vfl_party.base.seeds import Rows, full_batches
from vfl_party.methods.fedhssl.encoders import CROSS
from vfl_party.methods.fedhssl.exchanges import declare_projection
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.outbound.declared import Exchange
from vfl_party.phases.context import Party
from vfl_party.selfsup.losses import KeyQueue, variance_kept
from vfl_party.selfsup.settings import SelfSupPlan
from vfl_party.selfsup.towers import (
    Epochs,
    TrainedTower,
    build_tower,
    check_finite,
    loss_against,
    make_queue,
    require_rows,
)

Inputs = tuple[Tensor, ...]


class CrossStep:
    """Base class of both sides. Trains the tower f_c, with its predictor h_c, on received
    projections.

    Args:
        peers: The parties whose projections this party receives.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        settings: FedHSSLSettings,
        plan: SelfSupPlan,
        encoder: nn.Module,
        peers: list[str],
    ) -> None:
        self._party, self._phase, self._settings, self._plan = party, phase, settings, plan
        self._rows = require_rows(party, phase, "aligned", plan.batch_size)
        self.tower = build_tower(party, phase, CROSS, encoder, plan, shared=False)
        self._trained = TrainedTower(self.tower, plan, settings.rounds * settings.cross_epochs)
        self._keys: dict[str, KeyQueue] = {}
        # The queues hold received projections, so they add no traffic.
        if plan.ssl == "moco" and plan.negatives == "queue":
            sizes = {"rows": len(self._rows), "width": self.tower.width}
            self._keys = {
                peer: make_queue(party, phase, f"{CROSS} {peer}", plan, **sizes) for peer in peers
            }
        self._open(declare_projection(settings), rows=plan.batch_size, width=self.tower.width)

    @property
    def steps(self) -> int:
        """The number of steps in a round."""
        return self._settings.cross_epochs * (len(self._rows) // self._plan.batch_size)

    def run(self, round_: int, tick: Callable[[], None]) -> Epochs:
        """Runs the cross-party epochs of one round and calls ``tick`` after each step."""
        party, epochs = self._party, self._settings.cross_epochs
        features = party.need_features()
        self.tower.train()
        total, variance = torch.zeros((), device=party.device), torch.zeros((), device=party.device)
        batch = 0
        for epoch in range(epochs):
            for rows in features.expecting(self._batches(round_ * epochs + epoch)):
                step = StepKey(self._phase, round_, batch)
                loss, z_BP = self._run_step(step, features.inputs(rows), rows)
                total += loss
                variance += variance_kept(z_BP)
                batch += 1
                tick()
            self._trained.end_epoch()
        result = Epochs(batch, total.item() / batch, variance.item() / batch)
        return check_finite(result, party, self._phase, CROSS)

    def _batches(self, epoch: int) -> list[Rows]:
        return full_batches(
            self._party.recipe.seed, self._phase, epoch, self._rows, self._plan.batch_size
        )

    def _open(self, exchange: Exchange, **sizes: int) -> None:
        """Opens this side of the exchange of projections."""
        raise NotImplementedError

    def _run_step(self, step: StepKey, inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _update_locally(
        self, inputs: Inputs, z_BP: Tensor, received: Mapping[str, Tensor]
    ) -> Tensor:
        """Runs lines 12 and 13 of Alg. 1 ``local_updates`` times on the same received projections.
        Returns the loss of the first update.

        Args:
            inputs: The encoder's inputs for the batch.
            z_BP: This party's projections [B, P], with the graph of the weights before the update.
            received: {peer: the peer's projections [B, P]}.
        """
        first_loss: Tensor | None = None
        for _ in range(self._settings.local_updates):
            if first_loss is not None:
                (z_BP,) = self.tower.project(self._party, inputs)
            p_BP = self.tower.predict(z_BP)
            terms = [
                loss_against(self._plan, p_BP, z, self._keys.get(peer))
                for peer, z in received.items()
            ]
            # Eq. 5: the mean over peers. A passive party has only one peer.
            loss = torch.stack(terms).mean()
            self._trained.step(loss)
            first_loss = loss.detach() if first_loss is None else first_loss
        for peer, queue in self._keys.items():
            queue.push(received[peer])
        assert first_loss is not None  # noqa: S101 - local_updates is positive
        return first_loss

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "trained": self._trained.state(),
            "keys": {peer: queue.state() for peer, queue in self._keys.items()},
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._trained.load_state(tree["trained"])
        for peer, queue in self._keys.items():
            queue.load_state(tree["keys"][peer])


class ActiveCross(CrossStep):
    """The active party's side, which receives the projections of all passive parties and sends its
    own.
    """

    def _open(self, exchange: Exchange, **sizes: int) -> None:
        self._projection = self._party.answering(self._phase, exchange, **sizes)

    def _run_step(self, step: StepKey, inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor]:
        # Alg. 1, line 6: own projections.
        (z_BP,) = self.tower.project(self._party, inputs)
        received = self._projection.collect(step)
        # Alg. 1, line 8: own projections to all passive parties.
        self._projection.reply_all(step, received, {"z": z_BP}, rows)
        loss = self._update_locally(
            inputs, z_BP, {peer: tensors["z"] for peer, tensors in received.items()}
        )
        return loss, z_BP.detach()


class PassiveCross(CrossStep):
    """A passive party's side, which receives only the projections of the active party."""

    def _open(self, exchange: Exchange, **sizes: int) -> None:
        self._projection = self._party.asking(self._phase, exchange, **sizes)

    def _run_step(self, step: StepKey, inputs: Inputs, rows: Rows) -> tuple[Tensor, Tensor]:
        # Alg. 1, line 6: own projections.
        (z_BP,) = self.tower.project(self._party, inputs)
        # Alg. 1, line 10: own projections to the active party.
        self._projection.send(step, {"z": z_BP}, rows)
        reply = self._projection.receive(step)
        loss = self._update_locally(inputs, z_BP, {self._projection.peer: reply["z"]})
        return loss, z_BP.detach()

"""Runs an epoch with a learner's loss, with or without differential privacy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl_party.base.phase import RoundReport
from vfl_party.base.seeds import Rows
from vfl_party.methods.fedonce.rows import check_finite, make_own_batches
from vfl_party.methods.fedonce.settings import ADAM, FedOnceSettings
from vfl_party.models.training import build_optimizer, build_schedule, clip, own_optimizer
from vfl_party.phases.context import Party
from vfl_party.privacy.dpsgd import PrivateSteps


class LocalTraining:
    """Trains a module with an optimizer, a schedule and, with ``dp``, private steps.

    ``n``: the number of rows to learn from; batches contain positions 0 to n - 1.
    """

    def __init__(
        self, party: Party, phase: str, settings: FedOnceSettings, module: nn.Module, n: int
    ) -> None:
        self._party, self._phase, self._settings, self._module, self._n = (
            party,
            phase,
            settings,
            module,
            n,
        )
        self._params = list(module.parameters())
        party_optimizer = own_optimizer(party.recipe, phase, party.name, settings.optimizers)
        self._optimizer_settings = party_optimizer or settings.optimizer or ADAM
        self._optimizer = build_optimizer(self._optimizer_settings, self._params)
        self._schedule = build_schedule(self._optimizer_settings, self._optimizer, settings.epochs)
        self._private: PrivateSteps | None = None
        if settings.dp is not None:
            rows, size, norm = (
                np.arange(n, dtype=np.int64),
                settings.batch_size,
                settings.dp.max_grad_norm,
            )
            trained = module, self._optimizer, rows
            self._private = PrivateSteps(
                party.need_privacy(), phase, party.name, *trained, size, norm
            )

    def run_epoch(self, epoch: int, loss: Callable[[Rows], Tensor]) -> RoundReport:
        """Runs an epoch. Reports the mean loss and, with ``dp``, the ε spent so far."""
        party, settings, private = self._party, self._settings, self._private
        if private is not None and private.note:
            # An earlier epoch used up the privacy budget.
            return RoundReport(0)
        batches: Iterable[Rows]
        if private is not None:
            batches, count = private.batches(epoch), private.batches_an_epoch
        else:
            batches = make_own_batches(party, self._phase, epoch, self._n, settings.batch_size)
            count = len(batches)
        total, steps, num_losses = torch.zeros((), device=party.device), 0, 0
        self._module.train()
        for steps, batch in enumerate(batches, 1):
            batch_loss = (
                private.step(batch, loss) if private is not None else self._step(batch, loss)
            )
            if batch_loss is not None:
                total += batch_loss
                num_losses += 1
            party.tick(self._phase, epoch, settings.epochs, steps, count)
        if steps:
            self._schedule.step()
        metrics = (
            {"loss": check_finite(total.item() / num_losses, party, self._phase)}
            if num_losses
            else {}
        )
        if private is not None:
            return RoundReport(
                steps, {"local": {**metrics, "epsilon": private.epsilon}}, note=private.note
            )
        return RoundReport(steps, {"local": metrics})

    def _step(self, batch: Rows, loss: Callable[[Rows], Tensor]) -> Tensor:
        value = loss(batch)
        self._optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        clip(self._optimizer_settings, self._params)
        # Alg. 1, line 9: update the encoder.
        self._optimizer.step()
        return value.detach()

    def close(self) -> None:
        """Ends the private training, if there is any."""
        if self._private is not None:
            self._private.close()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        steps = (
            {"private": self._private.state()}
            if self._private
            else {"optimizer": self._optimizer.state_dict()}
        )
        return {**steps, "schedule": self._schedule.state_dict()}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        if self._private is not None:
            self._private.load_state(tree["private"])
        else:
            self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])

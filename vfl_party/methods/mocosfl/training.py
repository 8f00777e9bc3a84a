"""Updates a party's half of the network with an optimizer and a schedule."""

from __future__ import annotations

import math
import warnings
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from vfl_common.config.models import OptimizerSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.training import build_optimizer, build_schedule, clip


class TrainedHalf:
    """A half of the network with its optimizer and schedule.

    Args:
        epochs: The number of epochs of the schedule.
        by_batch: Whether the schedule is stepped after every batch instead of every epoch. The
            learning rate then oscillates between its maximum and zero, as at the clients of
            MocoSFL's released code.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSettings,
        epochs: int,
        *,
        by_batch: bool = False,
    ) -> None:
        self._params, self._by_batch, self._settings = (
            list(module.parameters()),
            by_batch,
            optimizer,
        )
        self._optimizer = build_optimizer(optimizer, self._params)
        if by_batch and (optimizer.warmup_epochs or optimizer.schedule == "step"):
            raise InputError(
                Code.CONFIG_INVALID,
                'recipe: phases: warmup_epochs and schedule = "step" count epochs, but with '
                'preset = "released" the schedule of the bottom models counts batches. Remove '
                "them, or set bottom_optimizer.",
            )
        if by_batch and optimizer.schedule == "cosine":
            self._schedule = LambdaLR(
                self._optimizer, lambda step: (1 + math.cos(math.pi * step / epochs)) / 2
            )
        else:
            self._schedule = build_schedule(optimizer, self._optimizer, epochs)

    def zero_grad(self) -> None:
        """Clears the gradients."""
        for parameter in self._params:
            parameter.grad = None

    def step(self) -> None:
        """Updates the half with its gradients."""
        clip(self._settings, self._params)
        self._optimizer.step()
        if self._by_batch:
            self._schedule.step()

    def end_epoch(self) -> None:
        """Steps the schedule, if it counts epochs."""
        if not self._by_batch:
            self._schedule.step()

    def catch_up(self, epoch: int) -> None:
        """Steps the schedule until it has reached ``epoch``, if it counts epochs."""
        with warnings.catch_warnings():
            # Torch warns of epochs without a step, which are normal for a party that is not drawn.
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step", UserWarning)
            while not self._by_batch and self._schedule.last_epoch < epoch:
                self._schedule.step()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"optimizer": self._optimizer.state_dict(), "schedule": self._schedule.state_dict()}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])

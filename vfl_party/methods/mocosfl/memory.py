"""What trains the tail: its moving average, one memory of keys for all parties, and the update of
both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.contrast import contrast
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import momentum_of
from vfl_party.methods.mocosfl.training import TrainedHalf
from vfl_party.phases.context import Party
from vfl_party.selfsup.losses import KeyQueue, ema_update


class TrainedTail:
    """The tail of the active party, which is one of its models, with all that its training
    needs.
    """

    def __init__(self, party: Party, phase: str, settings: MocoSFLSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._tail = party.models["tail"]
        self._half = TrainedHalf(self._tail, settings.of_tail, settings.epochs)
        self._momentum = momentum_of(self._tail)
        seed = derive_seed(party.own_seed, "queue", phase)
        self._queue = KeyQueue(settings.queue, settings.width, seed, party.device)
        self._halved = party.recipe.preset == "paper"
        self._fresh: Tensor | None = None

    def begin(self) -> None:
        """Starts from the tail as another run has trained it."""
        self._momentum.load_state_dict(self._tail.state_dict())

    def loss(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns the loss on the latents of two views; moves the average before."""
        ema_update(self._momentum, self._tail, self._settings.momentum)
        self._half.zero_grad()
        tails, keys = (self._tail, self._momentum), self._queue.keys
        loss, self._fresh = contrast(
            *tails, q, k, keys, self._settings.temperature, halved=self._halved
        )
        return loss

    def step(self) -> None:
        """Updates the tail by the gradients that are there, and remembers the new keys."""
        assert self._fresh is not None  # noqa: S101 - loss comes first
        self._half.step()
        self._queue.push(self._fresh)
        self._fresh = None

    def end_epoch(self) -> None:
        """Steps the schedule."""
        self._half.end_epoch()

    def mean(self, total: Tensor, steps: int) -> float:
        """Returns the mean loss of a round. Raises InputError if it is NaN or infinite."""
        loss = total.item() / steps
        if not math.isfinite(loss):
            text = (
                f"phase {self._phase}: the loss of {self._party.name} is {loss}: its training "
                "diverged"
            )
            raise InputError(Code.NON_FINITE, f"{text}; take a lower learning rate")
        return loss

    def state(self) -> Tree:
        return {
            "half": self._half.state(),
            "momentum": dict(self._momentum.state_dict()),
            "queue": self._queue.state(),
        }

    def load_state(self, tree: Tree) -> None:
        self._half.load_state(tree["half"])
        self._momentum.load_state_dict(tree["momentum"])
        self._queue.load_state(tree["queue"])


def zero(party: Party) -> Tensor:
    """Returns a scalar to sum losses in, on the party's device."""
    return torch.zeros((), device=party.device)

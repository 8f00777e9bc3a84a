"""Trains a half of the network, and updates the tail's moving average and the memory of keys."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from vfl_common.config.models import OptimizerSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Tree
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.settings import MocoSFLSettings
from vfl_party.methods.mocosfl.steps import make_moving_average
from vfl_party.models.training import build_optimizer, build_schedule, clip
from vfl_party.phases.context import Party
from vfl_party.selfsup.losses import KeyQueue, ema_update, moco


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


class KeyMemory:
    """A memory of earlier keys, which are the negatives: one for all parties, or one for each
    party.
    """

    def __init__(self, party: Party, phase: str, settings: MocoSFLSettings) -> None:
        seed, size = derive_seed(party.own_seed, "queue", phase), settings.queue
        self._shared_queue: KeyQueue | None = None
        self._queues: dict[str, KeyQueue] = {}
        if settings.shared_memory:
            self._shared_queue = KeyQueue(size, settings.width, seed, party.device)
            return
        names = [passive.name for passive in party.recipe.passives]
        if size < len(names):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: queue must be at least the number of parties, "
                f"{len(names):,} (got {size}). Set a larger queue, or shared_memory = true.",
            )
        for name in names:
            party_seed = derive_seed(seed, name)
            self._queues[name] = KeyQueue(
                size // len(names), settings.width, party_seed, party.device
            )

    def keys(self, parties: Sequence[str]) -> list[Tensor]:
        """Returns the keys for rows of ``parties``, each a tensor [Q, P]: one for all parties, or
        one per party.
        """
        if self._shared_queue is not None:
            return [self._shared_queue.keys]
        return [self._queues[name].keys for name in parties]

    def push(self, new_keys: Tensor, parties: Sequence[str]) -> None:
        """Stores new keys [2B, P]: first the keys of the first views, then the keys of the second
        views.
        """
        if self._shared_queue is not None:
            self._shared_queue.push(new_keys)
            return
        first_parts, second_parts = (half.chunk(len(parties)) for half in new_keys.chunk(2))
        for name, *party_keys in zip(parties, first_parts, second_parts, strict=True):
            self._queues[name].push(torch.cat(party_keys))

    def state(self) -> Tree:
        """Returns the state for a checkpoint."""
        if self._shared_queue is not None:
            return self._shared_queue.state()
        return {name: queue.state() for name, queue in self._queues.items()}

    def load_state(self, tree: Tree) -> None:
        """Restores a state that ``state`` returned."""
        if self._shared_queue is not None:
            self._shared_queue.load_state(tree)
        for name, queue in self._queues.items():
            queue.load_state(tree[name])


class TrainedTail:
    """The tail, which is one of the active party's models, with its optimizer, moving average and
    memory.
    """

    def __init__(self, party: Party, phase: str, settings: MocoSFLSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._tail = party.models["tail"]
        self._half = TrainedHalf(self._tail, settings.tail_optimizer, settings.epochs)
        self._momentum = make_moving_average(self._tail)
        self._memory = KeyMemory(party, phase, settings)
        # The parties whose rows the last loss used.
        self._loss_parties: Sequence[str] = ()
        self._halved = party.recipe.preset == "paper"
        self._new_keys: Tensor | None = None

    def start_from_tail(self) -> None:
        """Copies the tail of an earlier run into the moving average."""
        self._momentum.load_state_dict(self._tail.state_dict())

    def loss(self, q: Tensor, k: Tensor, parties: Sequence[str] = ()) -> Tensor:
        """Updates the moving average and returns the loss on the latents [B, C, H, W] of two views.
        Each of ``parties`` has an equal part of the rows.
        """
        ema_update(self._momentum, self._tail, self._settings.momentum)
        self._half.zero_grad()
        models, keys = (self._tail, self._momentum), self._memory.keys(parties)
        self._loss_parties = parties
        loss, self._new_keys = contrast(
            *models, q, k, keys, self._settings.temperature, halved=self._halved
        )
        return loss

    def step(self) -> None:
        """Updates the tail with its gradients, and stores the new keys."""
        assert self._new_keys is not None  # noqa: S101 - loss comes first
        self._half.step()
        self._memory.push(self._new_keys, self._loss_parties)
        self._new_keys = None

    def end_epoch(self) -> None:
        """Steps the schedule of the learning rate."""
        self._half.end_epoch()

    def compute_mean(self, total: Tensor, steps: int) -> float:
        """Returns the mean loss of a round, from the ``total`` loss of its steps. Raises InputError
        if the mean is NaN or infinite.
        """
        loss = total.item() / steps
        if not math.isfinite(loss):
            raise InputError(
                Code.NON_FINITE,
                f"phase {self._phase}: the loss of {self._party.name} is {loss}, because its "
                "training diverged. Lower the learning rate.",
            )
        return loss

    def state(self) -> Tree:
        """Returns the state for a checkpoint."""
        return {
            "half": self._half.state(),
            "momentum": dict(self._momentum.state_dict()),
            "queue": self._memory.state(),
        }

    def load_state(self, tree: Tree) -> None:
        """Restores a state that ``state`` returned."""
        self._half.load_state(tree["half"])
        self._momentum.load_state_dict(tree["momentum"])
        self._memory.load_state(tree["queue"])


def make_zero(party: Party) -> Tensor:
    """Returns a zero on the party's device, to which losses are added."""
    return torch.zeros((), device=party.device)


Project = Callable[[Tensor], Tensor]


def contrast(
    online: Project,
    momentum: Project,
    q: Tensor,
    k: Tensor,
    memories: Sequence[Tensor],
    temperature: float,
    *,
    halved: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the symmetric loss, a scalar, and the new keys [2B, P], first for ``q`` and then for
    ``k``.

    The second term swaps the two latents, and no gradient flows into its ``q``.

    Args:
        online, momentum: The tail and its moving average.
        q, k: The latents [B, C, H, W] of two views of the same rows.
        memories: Earlier keys, each a tensor [Q, P] of rows with norm 1. One tensor is for all
            rows; several are for equal parts of the rows.
        halved: Whether the loss is the mean of both terms, as in the paper, and not their sum, as
            in the released code.
    """
    with torch.no_grad():
        keys_q, keys_k = momentum(q), momentum(k)
    total = _mean_loss(online(q), keys_k, memories, temperature) + _mean_loss(
        online(k), keys_q, memories, temperature
    )
    return total / 2 if halved else total, torch.cat([keys_q, keys_k])


def _mean_loss(q: Tensor, k: Tensor, memories: Sequence[Tensor], temperature: float) -> Tensor:
    """Returns the mean loss over all rows, where each part of the rows has its own memory of
    keys.
    """
    if len(memories) == 1:
        return moco(q, k, memories[0], temperature)
    parts = zip(q.chunk(len(memories)), k.chunk(len(memories)), memories, strict=True)
    return torch.stack([moco(*part, temperature) for part in parts]).mean()

"""The training of the tail: its moving average, the memory of keys, and the update of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


class Memory:
    """Earlier keys, which are the negatives: of all parties together, or of each party."""

    def __init__(self, party: Party, phase: str, settings: MocoSFLSettings) -> None:
        seed, size = derive_seed(party.own_seed, "queue", phase), settings.queue
        self._whole: KeyQueue | None = None
        self._each: dict[str, KeyQueue] = {}
        if settings.shared_memory:
            self._whole = KeyQueue(size, settings.width, seed, party.device)
            return
        names = [passive.name for passive in party.recipe.passives]
        if size < len(names):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: queue must be at least the number of parties, "
                f"{len(names):,} (got {size}). Set a larger queue, or shared_memory = true.",
            )
        for name in names:
            own = derive_seed(seed, name)
            self._each[name] = KeyQueue(size // len(names), settings.width, own, party.device)

    def keys(self, parties: Sequence[str]) -> list[Tensor]:
        """Returns the keys for rows of ``parties``, [Q, P]: one memory, or one per party."""
        if self._whole is not None:
            return [self._whole.keys]
        return [self._each[name].keys for name in parties]

    def push(self, fresh: Tensor, parties: Sequence[str]) -> None:
        """Remembers new keys [2B, P]: those of the first views, then those of the second ones."""
        if self._whole is not None:
            self._whole.push(fresh)
            return
        first, second = (half.chunk(len(parties)) for half in fresh.chunk(2))
        for name, *own in zip(parties, first, second, strict=True):
            self._each[name].push(torch.cat(own))

    def state(self) -> Tree:
        """Returns the state for a checkpoint."""
        if self._whole is not None:
            return self._whole.state()
        return {name: queue.state() for name, queue in self._each.items()}

    def load_state(self, tree: Tree) -> None:
        """Restores a state that ``state`` returned."""
        if self._whole is not None:
            self._whole.load_state(tree)
        for name, queue in self._each.items():
            queue.load_state(tree[name])


class TrainedTail:
    """The tail, one of the active party's models, with everything that its training needs."""

    def __init__(self, party: Party, phase: str, settings: MocoSFLSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._tail = party.models["tail"]
        self._half = TrainedHalf(self._tail, settings.of_tail, settings.epochs)
        self._momentum = momentum_of(self._tail)
        self._memory = Memory(party, phase, settings)
        # The parties whose rows the last loss used, and the new keys of these rows.
        self._of: Sequence[str] = ()
        self._halved = party.recipe.preset == "paper"
        self._fresh: Tensor | None = None

    def begin(self) -> None:
        """Copies the tail of an earlier run into the moving average."""
        self._momentum.load_state_dict(self._tail.state_dict())

    def loss(self, q: Tensor, k: Tensor, parties: Sequence[str] = ()) -> Tensor:
        """Updates the moving average and returns the loss on the latents [B, C, H, W] of two
        views, of which ``parties`` have equal parts.
        """
        ema_update(self._momentum, self._tail, self._settings.momentum)
        self._half.zero_grad()
        tails, keys = (self._tail, self._momentum), self._memory.keys(parties)
        self._of = parties
        loss, self._fresh = contrast(
            *tails, q, k, keys, self._settings.temperature, halved=self._halved
        )
        return loss

    def step(self) -> None:
        """Updates the tail with its gradients, and stores the new keys."""
        assert self._fresh is not None  # noqa: S101 - loss comes first
        self._half.step()
        self._memory.push(self._fresh, self._of)
        self._fresh = None

    def end_epoch(self) -> None:
        """Steps the schedule."""
        self._half.end_epoch()

    def mean(self, total: Tensor, steps: int) -> float:
        """Returns the mean loss of a round. Raises InputError if it is NaN or infinite."""
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


def zero(party: Party) -> Tensor:
    """Returns a zero on the party's device, to sum losses."""
    return torch.zeros((), device=party.device)

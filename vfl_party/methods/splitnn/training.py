"""What both sides of split training share: a party's optimizer over its own models, and its best weights so far."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.errors import Code, InputError
from vfl_common.optim import build_optimizer, build_schedule, clip
from vfl_common.seeds import batches
from vfl_party.context import Party, Rows
from vfl_party.methods.splitnn.settings import SplitNNSettings

BEST, STOP = 1, 2  # bits of the active party's verdict on an epoch


class OwnTraining:
    """The party's optimizer and schedule over all its models, and a copy of their best weights."""

    def __init__(self, party: Party, phase: str, settings: SplitNNSettings) -> None:
        rows, batch_size = party.rows("train"), settings.batch_size
        self._party, self._phase, self._every, self._batch_size = party, phase, settings.validate_every, batch_size
        self._max_bytes = settings.max_bytes
        if settings.max_bytes is not None and not party.recipe.passives:
            text = f"recipe: phases: {phase}: max_bytes: {party.name} is alone, so no bytes cross"
            raise InputError(Code.CONFIG_INVALID, f"{text}; remove it, or add a passive party")
        self._row_bytes = 2 * 4 * party.embedding_size * len(party.recipe.passives)  # float32, there and back
        self._epoch_bytes = self._row_bytes * sum(map(len, self._epoch(0)))  # the same in every epoch
        if len(rows) == 0:
            raise InputError(Code.CONFIG_INVALID, f"recipe: phases: {phase}: there are no labelled training rows")
        self.epochs = settings.epochs_over(len(rows))
        if self._max_bytes is not None:
            self.epochs = min(self.epochs, -(-self._max_bytes // max(1, self._epoch_bytes)))
        self.rounds = -(-self.epochs // settings.validate_every)
        self._models = nn.ModuleDict(party.models)
        norms = any(isinstance(module, _BatchNorm) for module in self._models.modules())
        if norms and min(batch_size, len(rows)) < 2:
            text = f"party {party.name}: batch normalisation needs batches of at least two rows"
            raise InputError(Code.CONFIG_INVALID, f"{text}; give more rows, a larger batch_size, or another encoder")
        self._params = list(self._models.parameters())
        self._settings = settings.optimizer
        self._optimizer = build_optimizer(self._settings, self._params)
        self._schedule = build_schedule(self._settings, self._optimizer, self.epochs)
        self._best: dict[str, Tensor] | None = None

    def batches(self, round_: int) -> list[list[Rows]]:
        """The epochs of a round, each its batches, the same at every party."""
        begin = round_ * self._every
        epochs = [self._epoch(epoch) for epoch in range(begin, min(begin + self._every, self.epochs))]
        return epochs if self._max_bytes is None else self._within(epochs, begin * self._epoch_bytes, self._max_bytes)

    def _within(self, epochs: list[list[Rows]], sent: int, most: int) -> list[list[Rows]]:
        """The batches that begin before ``most`` bytes have crossed, of which ``sent`` did before."""
        kept: list[list[Rows]] = []
        for epoch in epochs:
            kept.append([])
            for batch in epoch:
                if sent < most:
                    kept[-1].append(batch)
                sent += self._row_bytes * len(batch)
        return kept

    def _epoch(self, epoch: int) -> list[Rows]:
        return batches(self._party.recipe.seed, self._phase, epoch, self._party.rows("train"), self._batch_size)

    def train_mode(self) -> None:
        self._models.train()

    def zero_grad(self) -> None:
        for parameter in self._params:  # as Optimizer.zero_grad, which costs 80 µs where its code is not in the cache
            parameter.grad = None

    def step(self) -> None:
        """Clips this party's own gradient where the recipe says so, and updates."""
        clip(self._settings, self._params)
        self._optimizer.step()

    def end_epoch(self) -> None:
        self._schedule.step()

    def keep_as_best(self) -> None:
        self._best = {name: value.detach().clone() for name, value in self._models.state_dict().items()}

    def restore_best(self) -> None:
        if self._best is not None:
            self._models.load_state_dict(self._best)

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
            "best": self._best,
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])
        self._best = tree["best"]


def numbered(epochs: list[list[Rows]]) -> list[tuple[Rows, bool]]:
    """The batches of some epochs one after the other, each with whether it is its epoch's last."""
    return [(rows, batch + 1 == len(epoch)) for epoch in epochs for batch, rows in enumerate(epoch)]

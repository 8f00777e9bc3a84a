"""Active completion: a passive party whose optimizer takes more of the learning, and how the active
party sees it.

Fu et al. (USENIX Security 2022) let the attacker multiply each number of its own gradient, before
its optimizer's step, by clamp(1 + γ · g_t / (g_(t−1) + 1e-7), 1, 5): numbers that keep their sign
count up to five times. So its encoder learns more of the task than it would, and a head on it finds
more labels. The released code smooths g by momentum first, and keeps the scaled g of the step
before; here both are the plain gradient. Adam divides most of it out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vfl.leak_meter.scene.scene import Intercepted
from vfl_party.base.seeds import Rows
from vfl_party.models.optim import before_step

_LEAST, _MOST, _SMALL = 1.0, 5.0, 1e-7


class Boost:
    """Scales the gradients of a model before each step of any optimizer over its parameters, until
    ``end``.
    """

    def __init__(self, model: nn.Module, gamma: float) -> None:
        self._gamma, self._own = gamma, {id(each) for each in model.parameters()}
        self._before: dict[int, Tensor] = {}
        before_step.append(self._scale)
        # Of optimizers that a plug-in has made itself.
        self._handle = register_optimizer_step_pre_hook(self._scale)

    def end(self) -> None:
        """Leaves gradients alone from now on."""
        before_step.remove(self._scale)
        self._handle.remove()

    @torch.no_grad()
    def _scale(self, optimizer: Optimizer, _args: Any = (), _kwargs: Any = None) -> None:
        for group in optimizer.param_groups:
            for each in group["params"]:
                if id(each) in self._own and each.grad is not None:
                    before, now = self._before.get(id(each)), each.grad.clone()
                    if before is not None:
                        each.grad.mul_(
                            (1 + self._gamma * now / (before + _SMALL)).clamp(_LEAST, _MOST)
                        )
                    self._before[id(each)] = now


def drift(batches: Iterable[Intercepted]) -> Iterator[float]:
    """Yields how far a party's embeddings have moved since the round before, for each recorded
    round but the first.

    It is ‖z − z′‖ / ‖z′‖ over all rows of a round that the one before has, too. The active party
    needs only what it receives. A party that boosts its gradients moves faster than it would, which
    a rehearsal without boost shows.
    """
    rounds: dict[tuple[str, int], list[Intercepted]] = {}
    for batch in batches:
        rounds.setdefault((batch.phase, batch.round), []).append(batch)
    for (phase, before), (same, now) in pairwise(sorted(rounds)):
        if phase == same:
            rows, z = zip(*(_joined(rounds[phase, each]) for each in (before, now)), strict=True)
            both, at_before, at_now = np.intersect1d(*rows, return_indices=True)
            if len(both):
                old, new = z[0][torch.from_numpy(at_before)], z[1][torch.from_numpy(at_now)]
                yield ((new - old).norm() / old.norm().clamp_min(1e-30)).item()


def _joined(batches: Sequence[Intercepted]) -> tuple[Rows, Tensor]:
    return np.concatenate([each.rows for each in batches]), torch.cat(
        [each.came for each in batches]
    )

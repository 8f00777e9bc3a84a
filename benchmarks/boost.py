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

import numpy as np
import torch
from torch import Tensor, nn

from vfl_leaks.scene import Intercepted
from vfl_party.base.seeds import Rows

_LEAST, _MOST, _SMALL = 1.0, 5.0, 1e-7


class Boost:
    """Scales the gradients of a model's parameters as soon as they are computed, until ``end``.

    It is for training with one backward pass a step, and without ``clip_norm``: then this is what
    an optimizer of the party's own would do before its step.
    """

    def __init__(self, model: nn.Module, gamma: float) -> None:
        self._gamma = gamma
        # Each parameter's gradient of the step before.
        self._before: dict[int, Tensor] = {}
        self._handles = [
            each.register_post_accumulate_grad_hook(self._scale) for each in model.parameters()
        ]

    def end(self) -> None:
        """Leaves gradients alone from now on."""
        for each in self._handles:
            each.remove()

    @torch.no_grad()
    def _scale(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        before, now = self._before.get(id(parameter)), parameter.grad.clone()
        if before is not None:
            ratio = (1 + self._gamma * now / (before + _SMALL)).clamp(_LEAST, _MOST)
            parameter.grad.mul_(ratio)
        self._before[id(parameter)] = now


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

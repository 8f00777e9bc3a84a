"""Losses over sets of parties, written from LASER-VFL (arXiv 2410.22564) and from what party dropout
says of itself.

The paper's estimate, with a head at the active party alone: L = Σ_k C(K − 1, k − 1) / k · ℓ(S_k),
where S_k is drawn from the sets of k parties that hold the active one, and ℓ(S) is the loss of the
head on the mean of the embeddings in S. What is shared with the program is the seed alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import derive_seed
from vfl_party.models.top import StandIns

Draw = list[tuple[float, set[str]]]


def vectors_of(recipe: Recipe, width_of: Callable[[Recipe, str], int]) -> StandIns | None:
    """Returns the learnt vectors, as they begin, of a recipe with ``party_dropout``."""
    if not any(phase.settings.get("party_dropout") for phase in recipe.phases):
        return None
    return StandIns({party.name: width_of(recipe, party.name) for party in recipe.passives})


def loss_over_sets(
    recipe: Recipe,
    models: nn.ModuleDict,
    place: tuple[int, ...],
    own: Tensor | None,
    others: Mapping[str, Tensor],
    loss: Callable[[list[Tensor]], Tensor],
    phase: int = 0,
) -> Tensor:
    """Returns the loss of a batch.

    Args:
        models: the active party's.
        place: the round and the number of the batch, both from 0.
        own: the active party's embedding.
        others: those of the passive parties that are there, in roster order.
        loss: of a list of embeddings.
    """
    mine, written = [] if own is None else [own], recipe.phases[phase]
    drawn = _drawn(recipe.seed, written.name, written.settings, [*others], place)
    if drawn is None:
        return loss([*mine, *others.values()])
    result = torch.zeros(())
    for weight, there in drawn:
        if "stand_ins" in models:
            vectors = [p for name, p in models.named_parameters() if name.startswith("stand_ins")]
            places = [party.name for party in recipe.passives]
            chosen = [
                z if name in there else vectors[places.index(name)].repeat(len(z), 1)
                for name, z in others.items()
            ]
        else:
            chosen = [z for name, z in others.items() if name in there]
        result = result + weight * loss([*mine, *chosen])
    return result


def _drawn(
    seed: int, phase: str, settings: dict[str, Any], names: list[str], place: tuple[int, ...]
) -> Draw | None:
    if settings.get("party_dropout"):
        numbers = _numbers(derive_seed(derive_seed(seed, phase, "party_dropout"), *place))
        p = settings["party_dropout"]
        return [(1.0, {name for name in names if numbers() / 2**64 >= p})]
    if not settings.get("subsets"):
        return None
    numbers = _numbers(derive_seed(derive_seed(seed, phase, "subsets"), *place))
    parties, found = 1 + len(names), []
    for k in range(1, parties + 1):
        keys = {name: numbers() for name in names}
        others = sorted(names, key=lambda name: keys[name])[: k - 1]
        found.append((math.comb(parties - 1, k - 1) / k, {*others}))
    return found


def _numbers(key: int) -> Callable[[], int]:
    """Returns a source of numbers of 64 bits, one after the other."""
    generator = np.random.Philox(key=key)
    return lambda: int(generator.random_raw())


def zero_gradients(models: nn.ModuleDict) -> None:
    """Gives the parameters of an encoder that had no effect a gradient of zeros, as its party is
    sent.
    """
    for parameter in models.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)

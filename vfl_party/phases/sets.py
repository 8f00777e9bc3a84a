"""Training of one model for several sets of parties, so that it can do without some of them.

- ``subsets``: LASER-VFL (Valdeira, Wang and Chi, ICLR 2025, arXiv 2410.22564), with a head at the
  active party alone. For a batch that K parties embed, one set of each size k = 1 … K is drawn from
  all that hold the active party. Its loss counts C(K − 1, k − 1) / k: the expected sum is that over
  all such sets J of their losses / |J|, as in the paper.
- ``party_dropout``: each passive party is left out of a batch with one probability, and a learnt
  vector stands in for it (as PlugVFL leaves parties out, with zeros in place of a vector).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from math import comb
from typing import Annotated, Literal, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from vfl_common.config.base import Section
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed
from vfl_party.models.top.stand_ins import StandIns, learnt_stand_ins
from vfl_party.phases.context import Party

# What a model has learnt to do without a party: nothing; to combine the others; to take a vector.
Learnt = Literal["", "subsets", "party_dropout"]


class SetSettings(Section):
    """How a supervised phase prepares its model for parties that are missing."""

    subsets: bool = False
    """Whether the model learns to do without any of the passive parties: each batch's loss is that
    of one random set of parties of each size, with the active party in each (LASER-VFL).
    """
    party_dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The probability with which each passive party is left out of a batch; a learnt vector stands
    in for it.
    """

    @property
    def learns(self) -> Learnt:
        """The model's training for absent parties."""
        if self.subsets:
            return "subsets"
        return "party_dropout" if self.party_dropout else ""

    def check_sets(self) -> None:
        """Raises ValueError if the two do not fit together."""
        if self.subsets and self.party_dropout:
            raise ValueError(
                "subsets and party_dropout both prepare the model for missing parties. Remove one "
                "of them."
            )


@dataclass(frozen=True)
class PartySet:
    """A set of parties: the active one, and the passive ones that are ``there``; ``weight``: by
    which its loss counts.
    """

    there: Collection[str]
    weight: float


class Sets:
    """Draws the sets of parties of each batch from the recipe's seed, and makes what they combine.

    Raises InputError as ``check``.
    """

    def __init__(self, party: Party, phase: str, settings: SetSettings) -> None:
        check(party, phase, settings)
        self._settings = settings
        self._seed = derive_seed(party.recipe.seed, phase, settings.learns)
        self.stand_ins = learnt_stand_ins(party.models)

    def draw(self, names: Collection[str], *place: int | str) -> list[PartySet] | None:
        """Draws the sets of a batch; None: all parties once.

        Args:
            names: the passive parties that are there.
            place: the batch's, which no other batch of the phase has; then the parties of a part of
                its rows.
        """
        if not self._settings.learns:
            return None
        names = [*names]
        count = len(names)
        random = np.random.Philox(key=derive_seed(self._seed, *place))
        if self._settings.party_dropout:
            # 64 bits are a number from 0 to 1.
            stays = random.random_raw(count) / 2.0**64 >= self._settings.party_dropout
            return [PartySet([name for name, stay in zip(names, stays, strict=True) if stay], 1.0)]
        keys_KP = random.random_raw((count + 1) * count).reshape(count + 1, count)
        orders_KP = np.argsort(keys_KP, axis=1, kind="stable")
        return [
            PartySet(
                [names[at] for at in sorted(order[:others])], comb(count, others) / (others + 1)
            )
            for others, order in enumerate(orders_KP)
        ]

    def embeddings(
        self, sets: Sequence[PartySet] | None, own: Sequence[Tensor], others: Mapping[str, Tensor]
    ) -> list[list[Tensor]] | None:
        """Returns the embeddings [B, D] that each set combines, in roster order; see ``Combined``.

        ``own``: the active party's. ``others``: those of the passive parties, from which sets were
        drawn.
        """
        if sets is None:
            return None
        return [
            [*own, *of_set(party_set.there, others, self.stand_ins).values()] for party_set in sets
        ]


def of_set(
    there: Collection[str], others: Mapping[str, Tensor], stand_ins: StandIns | None
) -> dict[str, Tensor]:
    """Returns the embeddings [B, D] of the passive parties ``there``, in the order of ``others``;
    for the rest what ``stand_ins`` has learnt, or nothing without it.
    """
    return {
        name: z_BD if name in there or stand_ins is None else stand_ins.of(name, len(z_BD))
        for name, z_BD in others.items()
        if name in there or stand_ins is not None
    }


class Weighed(Protocol):
    """Something whose loss counts by a weight."""

    @property
    def weight(self) -> float: ...


def sum_losses(losses: Sequence[Tensor], sets: Sequence[Weighed] | None) -> Tensor:
    """Returns the sum of the sets' losses by their weights; that of the one loss without sets."""
    if sets is None:
        return losses[0]
    return reduce(torch.add, [item.weight * loss for item, loss in zip(sets, losses, strict=True)])


def check(party: Party, phase: str, settings: SetSettings) -> None:
    """Raises InputError if the recipe leaves no party that could be missing, or if sets of its
    embeddings cannot be combined.
    """
    key, recipe = settings.learns, party.recipe
    if not key:
        return
    where = f"recipe: phases: {phase}: {key}"
    if not recipe.passives:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: {party.name} is alone, so no party can be missing. Remove it, or add a "
            "passive party.",
        )
    if key == "subsets" and not recipe.active.features:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: every set holds the embedding of {recipe.active.name}, and it has no "
            "features. Take party_dropout instead.",
        )
    if key == "subsets" and recipe.model.combine in ("concat", "sum"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: model.combine = {recipe.model.combine!r} changes scale with fewer parties. "
            'Set model.combine = "mean", or take party_dropout instead.',
        )

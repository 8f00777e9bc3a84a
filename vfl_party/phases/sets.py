"""Trains one model for several sets of parties, so that it can score without some of them.

- ``subsets``: LASER-VFL (Valdeira, Wang and Chi, ICLR 2025, arXiv 2410.22564), with a head only at
the active party. For a batch that K parties embed, one set of each size k = 1 … K is drawn from all
sets that contain the active party. Its loss has the weight C(K − 1, k − 1) / k. So the expected sum
equals the paper's sum of loss / |J| over all such sets J.
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
from vfl_party.models.top import StandIns, learnt_stand_ins
from vfl_party.phases.context import Party

# How a model was trained for missing parties: not at all, by combining the other parties, or by a
# learnt vector in place of the missing party.
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
        """How the model is trained for missing parties; '' if it is not."""
        if self.subsets:
            return "subsets"
        return "party_dropout" if self.party_dropout else ""

    def check_sets(self) -> None:
        """Raises ValueError if both ``subsets`` and ``party_dropout`` are set."""
        if self.subsets and self.party_dropout:
            raise ValueError(
                "subsets and party_dropout both prepare the model for missing parties. Remove one "
                "of them."
            )


@dataclass(frozen=True)
class PartySet:
    """A set of parties: the active party and some passive parties. ``there``: The passive parties
    in the set. ``weight``: The weight of its loss.
    """

    there: Collection[str]
    weight: float


class Sets:
    """Draws the sets of parties for each batch from the recipe's seed, and selects the embeddings
    of each set.

    Raises InputError as ``check``.
    """

    def __init__(self, party: Party, phase: str, settings: SetSettings) -> None:
        check(party, phase, settings)
        self._settings = settings
        self._seed = derive_seed(party.recipe.seed, phase, settings.learns)
        self.stand_ins = learnt_stand_ins(party.models)

    def draw(self, names: Collection[str], *place: int | str) -> list[PartySet] | None:
        """Draws the sets of parties for a batch. Returns None without ``subsets`` and
        ``party_dropout``, when all parties are combined once.

        Args:
            names: The passive parties that are present.
            place: Numbers that identify the batch in the phase, then the names of the parties if
                only a part of its rows is drawn for.
        """
        if not self._settings.learns:
            return None
        names = [*names]
        count = len(names)
        random = np.random.Philox(key=derive_seed(self._seed, *place))
        if self._settings.party_dropout:
            # A 64-bit draw, divided by 2^64, is uniform between 0 and 1.
            kept = random.random_raw(count) / 2.0**64 >= self._settings.party_dropout
            return [PartySet([name for name, stay in zip(names, kept, strict=True) if stay], 1.0)]
        keys_KP = random.random_raw((count + 1) * count).reshape(count + 1, count)
        orders_KP = np.argsort(keys_KP, axis=1, kind="stable")
        return [
            PartySet(
                [names[index] for index in sorted(order[:num_others])],
                comb(count, num_others) / (num_others + 1),
            )
            for num_others, order in enumerate(orders_KP)
        ]

    def embeddings(
        self, sets: Sequence[PartySet] | None, own: Sequence[Tensor], others: Mapping[str, Tensor]
    ) -> list[list[Tensor]] | None:
        """Returns, for each set, the list of embeddings [B, D] to combine, in roster order.

        ``own``: The active party's embeddings. ``others``: The embeddings of the passive parties,
        from which sets were drawn.
        """
        if sets is None:
            return None
        return [
            [*own, *select_embeddings(party_set.there, others, self.stand_ins).values()]
            for party_set in sets
        ]


def select_embeddings(
    there: Collection[str], others: Mapping[str, Tensor], stand_ins: StandIns | None
) -> dict[str, Tensor]:
    """Returns {passive party: its embeddings [B, D]} for the parties in ``there``, in the order of
    ``others``. With ``stand_ins``, the other parties get their learnt vectors.
    """
    return {
        name: z_BD if name in there or stand_ins is None else stand_ins.of(name, len(z_BD))
        for name, z_BD in others.items()
        if name in there or stand_ins is not None
    }


class Weighed(Protocol):
    """An object with the weight of its loss."""

    @property
    def weight(self) -> float: ...


def sum_losses(losses: Sequence[Tensor], sets: Sequence[Weighed] | None) -> Tensor:
    """Returns the weighted sum of the sets' losses; without sets, the only loss."""
    if sets is None:
        return losses[0]
    return reduce(torch.add, [item.weight * loss for item, loss in zip(sets, losses, strict=True)])


def check(party: Party, phase: str, settings: SetSettings) -> None:
    """Raises InputError if the recipe has no party that can be missing, or if it cannot combine the
    embeddings of sets of parties.
    """
    key, recipe = settings.learns, party.recipe
    if not key:
        return
    where = f"recipe: phases: {phase}: {key}"
    if not recipe.passives:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: {party.name} is the only party, so no party can be missing. Remove it, "
            "or add a "
            "passive party.",
        )
    if key == "subsets" and not recipe.active.features:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: every set needs the embeddings of {recipe.active.name}, which has no "
            "features. Use party_dropout instead.",
        )
    if key == "subsets" and recipe.model.combine in ("concat", "sum"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: with model.combine = {recipe.model.combine!r}, the scale depends on the "
            "number of parties. "
            'Set model.combine = "mean", or use party_dropout instead.',
        )

"""The guards of a party: all that may refuse a run before anything leaves."""

from __future__ import annotations

from collections.abc import Sequence

from vfl_common.config.party import PartyFile
from vfl_common.config.recipe import Recipe
from vfl_party.outbound.policies import named_in_trial
from vfl_party.policy.meeting import Guard
from vfl_party.policy.words import WordsGuard


def guards_of(file: PartyFile, recipe: Recipe) -> Sequence[Guard]:
    """Returns the guards of a party that its party file asks for."""
    return [WordsGuard(file.policy, file.name, recipe, file.pins)]


def guards_of_trial(recipe: Recipe, name: str) -> Sequence[Guard]:
    """Returns the guards of a party in a trial on one machine, where nobody has a key."""
    return [WordsGuard(named_in_trial(recipe, name), name, recipe, None)]

"""Creates the guards of a party, which may refuse a run before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

from vfl_common.config.party import PartyFile, TreeLimits
from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_party.outbound.policies import get_trial_policy_name
from vfl_party.policy.meeting import RunGuard
from vfl_party.policy.words import WordsGuard


def words_of(file: PartyFile, recipe: Recipe) -> WordsGuard:
    """Returns the guard that checks the party file's policy."""
    return WordsGuard(file.policy, file.name, recipe, file.pins)


def guards_of(file: PartyFile, recipe: Recipe) -> Sequence[RunGuard]:
    """Returns the guards that a party file requires."""
    return [words_of(file, recipe)]


def guards_of_trial(recipe: Recipe, name: str) -> Sequence[RunGuard]:
    """Returns the guards of a party in a trial on one machine, where parties have no keys."""
    return [WordsGuard(get_trial_policy_name(recipe, name), name, recipe, None)]


def trees_of_trial(recipe: Recipe, name: str) -> TreeLimits | None:
    """Returns the limits for trees that a party's policy sets in a trial, or None.

    A trial may use shorter keys.
    """
    policy = get_trial_policy_name(recipe, name)
    limits = policy.elsewhere.get("trees") if isinstance(policy, PolicySettings) else None
    return TreeLimits.model_validate({"least_key_bits": 1024, **limits}) if limits else None

"""Policies, which decide what may leave a party: one file each, found by name. A party's file
chooses its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.plugins import Registry
from vfl_party.outbound.declared import Exchange, Sent
from vfl_party.outbound.filter import Filter
from vfl_party.outbound.worded import TablePolicy

REGISTRY = Registry("vfl.policies", "policy", __name__, "POLICY")


class Policy(Protocol):
    """Makes the filter that decides what may leave this party in one exchange; called when a phase
    is made.
    """

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        """Returns the filter of what this party sends in ``exchange``: ``sent``, its ``up`` or its
        ``down``, with all transforms that it passes.

        Raises InputError (REFUSED) if that may never leave; the filter's ``apply`` may raise it
        later.
        """
        ...


def load(policy: str | PolicySettings, where: str, after: Policy | None = None) -> Policy:
    """Makes a policy from its words, or by its name. Raises InputError that names ``where`` if
    there is none of that name.

    ``after``: the one that this party has made for what leaves before the first phase.
    """
    if isinstance(policy, PolicySettings):
        beside = load(policy.plugin, f"{where}.plugin") if policy.plugin is not None else None
        return TablePolicy(policy, beside, after if isinstance(after, TablePolicy) else None)
    made: Policy = REGISTRY.make(policy, where, Callable)  # type: ignore[arg-type]
    return made


def get_trial_policy_name(recipe: Recipe, name: str) -> str | PolicySettings:
    """Returns what ``simulate.policies`` says of a party in a trial on one machine."""
    named = recipe.simulate.policies if recipe.simulate is not None else {}
    return named.get(name, "allow_all")


def load_trial_policy(recipe: Recipe, name: str, after: Policy | None = None) -> Policy:
    """Makes the policy of a party in a trial on one machine, as ``simulate.policies`` says; see
    ``load``. Raises InputError if there is none of that name.
    """
    return load(get_trial_policy_name(recipe, name), f"recipe: simulate.policies: {name}", after)

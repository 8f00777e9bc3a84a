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

REGISTRY = Registry("vfl.policies", "policy", __name__, "POLICY")


class Policy(Protocol):
    """Makes the filter that decides what may leave this party in one exchange; called when a phase
    is made.
    """

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        """Returns the filter of what this party sends in ``exchange``: ``sent``, its ``up`` or its
        ``down``.

        Raises InputError (REFUSED) if that may never leave; the filter's ``apply`` may raise it
        later.
        """
        ...


def load(name: str | PolicySettings, where: str) -> Policy:
    """Makes a policy by name. Raises InputError that names ``where`` if there is none."""
    # A table says more, elsewhere.
    named = name if isinstance(name, str) else "allow_all"
    policy: Policy = REGISTRY.make(named, where, Callable)  # type: ignore[arg-type]
    return policy


def of_trial(recipe: Recipe, name: str) -> Policy:
    """Makes the policy of a party in a trial on one machine, as ``simulate.policies`` says. Raises
    InputError if there is none of that name.
    """
    named = recipe.simulate.policies if recipe.simulate is not None else {}
    return load(named.get(name, "allow_all"), f"recipe: simulate.policies: {name}")

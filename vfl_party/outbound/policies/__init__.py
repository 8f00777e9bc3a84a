"""Policies, which decide what may leave a party. Each is a module, found by name. The party file
chooses the party's policy.
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
    """Makes the filter that decides what may leave this party in one exchange. It is called when a
    phase is made.
    """

    def __call__(self, phase: str, exchange: Exchange, sent: Sent, /) -> Filter:
        """Returns the filter for the tensors that this party sends in ``exchange``. ``sent``: the
        direction of the exchange in which it sends, with all transforms.

        Raises InputError (REFUSED) if these tensors may never leave. The filter's ``apply`` may
        raise it later.
        """
        ...


def load(policy: str | PolicySettings, where: str, after: Policy | None = None) -> Policy:
    """Makes a policy from its settings or by its name. Raises InputError that names ``where`` if
    the name is unknown.

    ``after``: the policy that this party has used before the first phase.
    """
    if isinstance(policy, PolicySettings):
        plugin_policy = (
            load(policy.plugin, f"{where}.plugin") if policy.plugin is not None else None
        )
        return TablePolicy(policy, plugin_policy, after if isinstance(after, TablePolicy) else None)
    loaded: Policy = REGISTRY.make(policy, where, Callable)  # type: ignore[arg-type]
    return loaded


def get_trial_policy_name(recipe: Recipe, name: str) -> str | PolicySettings:
    """Returns the policy of a party in a trial on one machine, from ``simulate.policies``."""
    policies = recipe.simulate.policies if recipe.simulate is not None else {}
    return policies.get(name, "allow_all")


def load_trial_policy(recipe: Recipe, name: str, after: Policy | None = None) -> Policy:
    """Makes the policy of a party in a trial on one machine, from ``simulate.policies``; see
    ``load``. Raises InputError if the name is unknown.
    """
    return load(get_trial_policy_name(recipe, name), f"recipe: simulate.policies: {name}", after)

"""Which rows the parties train on: those that all of them know, in an order that all of them have."""

from vfl_common.config.recipe import Recipe
from vfl_party.align.aligned import Aligned, Alignment
from vfl_party.align.digest import DigestAlignment
from vfl_party.policies import Policy
from vfl_party.policies.allow_all import AllowAll

__all__ = ["Aligned", "Alignment", "alignment_of"]


def alignment_of(recipe: Recipe, policy: Policy | None = None) -> Alignment:
    """The recipe's: today, always the comparison of digests. ``policy``: what this party lets out; None: everything."""
    return DigestAlignment(recipe, policy if policy is not None else AllowAll())

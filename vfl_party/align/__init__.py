"""Decides the rows that the parties train on: those that all hold, in the same order at each, or
each party's own.
"""

from vfl_common.config.recipe import Recipe
from vfl_party.align.aligned import AlignedRows, Alignment, AlignmentContext, Holding
from vfl_party.align.digest import DigestAlignment
from vfl_party.align.own_rows import OwnRows
from vfl_party.align.partial import of_tables
from vfl_party.align.psi import PsiAlignment
from vfl_party.outbound.policies import Policy
from vfl_party.outbound.policies.allow_all import AllowAll

__all__ = ["AlignedRows", "Alignment", "AlignmentContext", "Holding", "alignment_of", "of_tables"]


def alignment_of(
    recipe: Recipe, policy: Policy | None = None, *, divides: bool = True
) -> Alignment:
    """Returns the recipe's alignment, ``rows.align``.

    ``policy``: None lets everything out. ``divides``: false for rows to predict, which have no
    splits.
    """
    policy = policy if policy is not None else AllowAll()
    if recipe.rows.align == "none":
        return OwnRows(recipe, policy, divides=divides)
    if recipe.rows.align == "psi":
        return PsiAlignment(recipe, policy, divides=divides)
    return DigestAlignment(recipe, policy, divides=divides)

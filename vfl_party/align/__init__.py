"""Decides the rows that the parties train on: the rows that all parties hold, in the same order at
each party, or different rows at each party.
"""

from pathlib import Path

from vfl_common.config.recipe import Recipe
from vfl_party.align.aligned import AlignedRows, Alignment, AlignmentContext, Holding
from vfl_party.align.digest import DigestAlignment
from vfl_party.align.fuzzy import FuzzyAlignment
from vfl_party.align.own_rows import OwnRows
from vfl_party.align.partial import align_tables
from vfl_party.align.psi import PsiAlignment
from vfl_party.outbound.policies import AllowAll, Policy

__all__ = [
    "AlignedRows",
    "Alignment",
    "AlignmentContext",
    "Holding",
    "align_tables",
    "make_alignment",
]


def make_alignment(
    recipe: Recipe,
    policy: Policy | None = None,
    *,
    divides: bool = True,
    trained_folder: Path | None = None,
) -> Alignment:
    """Returns the recipe's alignment, ``rows.align``.

    ``policy``: The policy for outgoing data; None allows everything. ``divides``: Whether to divide
    the rows into splits; false for rows to predict. ``trained_folder``: The party's folder of the
    run whose model predicts the rows.
    """
    policy = policy if policy is not None else AllowAll()
    if recipe.rows.align == "none":
        return OwnRows(recipe, policy, divides=divides)
    if recipe.rows.align == "fuzzy":
        return FuzzyAlignment(recipe, policy, divides=divides, trained_folder=trained_folder)
    if recipe.rows.align == "psi":
        return PsiAlignment(recipe, policy, divides=divides)
    return DigestAlignment(recipe, policy, divides=divides)

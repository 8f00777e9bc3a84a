"""Decides the rows that the parties train on: the rows that all parties hold, in the same order at
each party, or different rows at each party.
"""

from pathlib import Path

from vfl_common.config.recipe import Recipe
from vfl_party.align.aligned import AlignedRows, Alignment, AlignmentContext, Holding
from vfl_party.align.digest import DigestAlignment
from vfl_party.align.exchanges import LISTS, MASKED, SIZES, TAGS, TURNS
from vfl_party.align.fuzzy import ENCODINGS, ORDER, FuzzyAlignment
from vfl_party.align.fuzzy import SIZES as LINKAGE_SIZES
from vfl_party.align.own_rows import OwnRows
from vfl_party.align.partial import align_tables
from vfl_party.align.psi import PsiAlignment
from vfl_party.outbound.declared import Occurrence
from vfl_party.outbound.policies import AllowAll, Policy

__all__ = [
    "MATCHING",
    "AlignedRows",
    "Alignment",
    "AlignmentContext",
    "Holding",
    "align_tables",
    "list_occurrences",
    "make_alignment",
]

# The names of the exchanges that are sent only when common rows are searched.
_SEARCH = (MASKED, TURNS, SIZES, TAGS, LISTS, LINKAGE_SIZES, ENCODINGS, ORDER)
MATCHING = frozenset(exchange.name for exchange in _SEARCH)


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


def list_occurrences(recipe: Recipe, rows: int, *, divides: bool = True) -> list[Occurrence]:
    """Returns all exchanges of the recipe's alignment in order; see ``Alignment.occurrences``.

    With the common rows of an earlier run, the parties do not search for common rows again.
    """
    occurrences = make_alignment(recipe, divides=divides).occurrences(rows)
    if recipe.rows.alignment is None or not divides:
        return [*occurrences]
    return [one for one in occurrences if one.exchange.name not in MATCHING]

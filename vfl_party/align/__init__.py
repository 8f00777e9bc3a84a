"""Which rows the parties train on: those that all of them know, in an order that all of them have."""

from vfl_common.config.recipe import Recipe
from vfl_party.align.aligned import Aligned, Alignment
from vfl_party.align.digest import DigestAlignment

__all__ = ["Aligned", "Alignment", "alignment_of"]


def alignment_of(recipe: Recipe) -> Alignment:
    """The recipe's: today, always the comparison of digests."""
    return DigestAlignment(recipe)

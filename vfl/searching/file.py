"""Reads a study file that has a search instead of methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from vfl.library.recipe import Recipe
from vfl.searching.search import plan_of
from vfl.searching.spaces import KEYS
from vfl.searching.trying import TrialPlan
from vfl_common.config.base import Section, parse
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import InputError

TABLE = "search"


class SearchTable(Section):
    """The table ``[search]``: the arguments of ``vfl.search``, which checks them."""

    # A metric of the validation rows, such as "validation auc".
    objective: str
    # The number of trials; pruned and failed ones count.
    runs: int
    # {key of the recipe: values, or {from, to, log}}
    spaces: dict[str, Any]
    # One of tpe, random and grid.
    by: str = "tpe"
    prune: bool = True
    # The seed of the sampler; every run has the recipe's own seed.
    seed: int = 0


class SearchFile(Section):
    """A study file with a search."""

    name: Name
    # A recipe with [simulate], or the files of all parties.
    recipe: str | tuple[str, ...] = Field(min_length=1)
    search: SearchTable


def is_search(path: Path) -> bool:
    """Returns whether a study file has a search. Raises InputError if it cannot be read."""
    return TABLE in read_tables(path, "study")


def load_search(path: Path, out: Path) -> TrialPlan:
    """Reads a search; its folder is that of a study, in ``out``. Raises InputError if the search or
    its recipe is invalid.
    """
    file = parse(SearchFile, read_tables(path, "study"), str(path))
    base, source = path.resolve().parent, file.recipe
    recipe = Recipe.of(base / source if isinstance(source, str) else [base / p for p in source])
    asked = file.search.model_dump() | {"spaces": dict(_flat(file.search.spaces))}
    spaces = asked.pop("spaces")
    try:
        return plan_of(recipe, spaces, None, out / file.name, **asked)
    except InputError as error:
        raise InputError(error.code, ": ".join((str(path), TABLE, str(error)))) from None


def _flat(spaces: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Returns (dotted key, space) pairs. TOML reads a dotted key as nested tables."""
    pairs = []
    for key, space in spaces.items():
        nested = isinstance(space, Mapping) and space and not KEYS & set(space)
        pairs += _flat(space, f"{above}{key}.") if nested else [(f"{above}{key}", space)]
    return pairs

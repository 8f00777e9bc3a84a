"""Reads a study file that contains a search instead of methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from vfl.library.recipe import Recipe
from vfl_common.config.base import Section, parse
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import InputError
from vfl_lab.searching.search import make_plan
from vfl_lab.searching.spaces import KEYS
from vfl_lab.searching.trying import TrialPlan

TABLE = "search"


class SearchTable(Section):
    """The table ``[search]``. Its keys are arguments of ``vfl.search``, which checks the values."""

    # The metric on the validation rows to optimize, such as "validation auc".
    objective: str
    # The number of trials, including pruned and failed trials.
    runs: int
    # {key of the recipe: list of values, or a table with from, to and log}
    spaces: dict[str, Any]
    # The sampler: tpe, random or grid.
    by: str = "tpe"
    prune: bool = True
    # The seed of the sampler. Every run uses the seed of the recipe.
    seed: int = 0


class SearchFile(Section):
    """A study file that contains a search."""

    name: Name
    # A recipe with [simulate], or the party files of all parties.
    recipe: str | tuple[str, ...] = Field(min_length=1)
    search: SearchTable


def is_search(path: Path) -> bool:
    """Returns whether a study file contains a search. Raises InputError if it cannot be read."""
    return TABLE in read_tables(path, "study")


def load_search(path: Path, out: Path) -> TrialPlan:
    """Reads a search from a study file, and plans its trials in a subfolder of ``out``. Raises
    InputError if the search or its recipe is invalid.
    """
    file = parse(SearchFile, read_tables(path, "study"), str(path))
    base, source = path.resolve().parent, file.recipe
    recipe = Recipe.of(base / source if isinstance(source, str) else [base / p for p in source])
    arguments = file.search.model_dump()
    spaces = dict(_flatten(arguments.pop("spaces")))
    try:
        return make_plan(recipe, spaces, None, out / file.name, **arguments)
    except InputError as error:
        raise InputError(error.code, ": ".join((str(path), TABLE, str(error)))) from None


def _flatten(spaces: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Returns (dotted key, space) pairs from nested tables, which TOML makes from dotted keys."""
    pairs = []
    for key, space in spaces.items():
        nested = isinstance(space, Mapping) and space and not KEYS & set(space)
        pairs += _flatten(space, f"{above}{key}.") if nested else [(f"{above}{key}", space)]
    return pairs

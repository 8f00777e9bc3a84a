"""Reads a study file with a search in place of methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from vfl.library.recipe import Recipe
from vfl.searching.search import plan_of
from vfl.searching.spaces import KEYS
from vfl.searching.trying import Plan
from vfl_common.config.base import Section, parse
from vfl_common.config.kind_of_file import read_tables
from vfl_common.config.recipe_tables import Name
from vfl_common.errors import InputError

TABLE = "search"


class SearchTable(Section):
    """The table ``[search]``: the arguments of ``vfl.search``, which checks them."""

    # Of the validation rows, such as "validation auc".
    objective: str
    # Trials; pruned and failed ones count.
    runs: int
    # {key of the recipe: values, or {from, to, log}}.
    spaces: dict[str, Any]
    # tpe, random or grid.
    by: str = "tpe"
    prune: bool = True
    # Of what chooses; the recipe's own seed is that of every run.
    seed: int = 0


class SearchFile(Section):
    """A study file with a search."""

    name: Name
    # With [simulate], or the files of all parties.
    recipe: str | tuple[str, ...] = Field(min_length=1)
    search: SearchTable


def is_search(path: Path) -> bool:
    """Returns whether a study file has a search. Raises InputError if it cannot be read."""
    return TABLE in read_tables(path, "study")


def load_search(path: Path, out: Path) -> Plan:
    """Reads a search; its folder is that of a study, in ``out``. Raises InputError if it, or its
    recipe, is wrong.
    """
    file = parse(SearchFile, read_tables(path, "study"), str(path))
    base, named = path.resolve().parent, file.recipe
    recipe = Recipe.of(base / named if isinstance(named, str) else [base / each for each in named])
    asked = file.search.model_dump() | {"spaces": dict(_flat(file.search.spaces))}
    spaces = asked.pop("spaces")
    try:
        return plan_of(recipe, spaces, None, out / file.name, **asked)
    except InputError as error:
        raise InputError(error.code, f"{path}: {TABLE}: {error}") from None


def _flat(spaces: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    """Returns (dotted key, space), also of keys that are written without quotes, which TOML takes
    for tables in tables.
    """
    found = []
    for key, each in spaces.items():
        nested = isinstance(each, Mapping) and each and not KEYS & set(each)
        found += _flat(each, f"{above}{key}.") if nested else [(f"{above}{key}", each)]
    return found

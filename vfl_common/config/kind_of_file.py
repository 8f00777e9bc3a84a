"""Reads a TOML file and refuses it if it is of another kind, such as a party file given in place of
its recipe.
"""

from __future__ import annotations

from os.path import normpath
from pathlib import Path
from typing import Any, Literal

from vfl_common.config.base import read_toml
from vfl_common.errors import Code, InputError

Kind = Literal["recipe", "party file", "study"]
_STUDY_KEYS = ("seeds", "methods", "finetune", "search")


def detect_kind(tables: dict[str, Any]) -> Kind | None:
    """Returns the kind of file that has these tables; None if no key shows it."""
    if "phases" in tables:
        return "recipe"
    if "recipe" not in tables:
        return None
    return "study" if any(key in tables for key in _STUDY_KEYS) else "party file"


def read_tables(path: Path, wanted: Kind) -> dict[str, Any]:
    """Reads the tables of a file of the kind ``wanted``. Raises InputError if the file is missing,
    is not TOML, or is of another kind.
    """
    tables = read_toml(path)
    kind = detect_kind(tables)
    if kind is not None and kind != wanted:
        raise InputError(
            Code.CONFIG_INVALID, f"{path}: is a {kind}. {_advice(path, tables, wanted)}"
        )
    return tables


def _advice(path: Path, tables: dict[str, Any], wanted: Kind) -> str:
    recipe_path = tables.get("recipe")
    if wanted == "recipe" and isinstance(recipe_path, str):
        return f"Give the recipe that it names: {normpath(path.parent / recipe_path)}."
    return f"Give a {wanted} instead."

"""Reads a file of tables, and refuses one of another kind: a party file is soon given where its
recipe is wanted.
"""

from __future__ import annotations

from os.path import normpath
from pathlib import Path
from typing import Any, Literal

from vfl_common.config.base import read_toml
from vfl_common.errors import Code, InputError

Kind = Literal["recipe", "party file", "study"]
_OF_STUDY = ("seeds", "methods", "finetune", "search")


def kind_of(tables: dict[str, Any]) -> Kind | None:
    """Returns of which kind of file the tables are; None if they have no key that tells."""
    if "phases" in tables:
        return "recipe"
    if "recipe" not in tables:
        return None
    return "study" if any(key in tables for key in _OF_STUDY) else "party file"


def read_tables(path: Path, wanted: Kind) -> dict[str, Any]:
    """Reads the tables of a file. Raises InputError if it is missing, is not TOML, or is of another
    kind.
    """
    tables = read_toml(path)
    kind = kind_of(tables)
    if kind is not None and kind != wanted:
        raise InputError(
            Code.CONFIG_INVALID, f"{path}: is a {kind}. {_advice(path, tables, wanted)}"
        )
    return tables


def _advice(path: Path, tables: dict[str, Any], wanted: Kind) -> str:
    named = tables.get("recipe")
    if wanted == "recipe" and isinstance(named, str):
        return f"Give the recipe that it names: {normpath(path.parent / named)}."
    return f"Give a {wanted} instead."

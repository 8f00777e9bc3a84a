"""A federation tried on one machine with its own party files, before there are keys, addresses or a
network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vfl_common.config.base import parse, read_toml
from vfl_common.config.kind_of_file import kind_of, read_tables
from vfl_common.config.party import PartyFile, load_party
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import listed

Tables = dict[str, Any]


def are_party_files(given: Sequence[Any]) -> bool:
    """Whether all of what is ``given`` are paths of party files, so that they are one recipe
    together. Raises InputError if a file cannot be read.
    """
    return bool(given) and all(
        isinstance(each, str | Path) and kind_of(read_toml(Path(each))) == "party file"
        for each in given
    )


def of_party_files(paths: Sequence[Path]) -> tuple[Tables, Path]:
    """Returns the recipe of party files, with [simulate] for their tables, and the recipe's folder.

    Each party trains with what its file says of its data, encoder, device, policy and
    threads. Raises
    InputError if a party has no file, or two, or if the files name different recipes.
    """
    files = {path: load_party(_party_path(path)) for path in paths}
    first, own = next(iter(files.items()))
    tables = read_tables(Path(own.recipe), "recipe")
    recipe = parse(Recipe, tables, own.recipe)
    found: dict[str, PartyFile] = {}
    for path, file in files.items():
        if (
            parse(Recipe, read_tables(Path(file.recipe), "recipe"), file.recipe).digest()
            != recipe.digest()
        ):
            text = (
                f"{path}: recipe: differs from that of {first}; all parties must have the same one"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        if recipe.party(file.name) is None or file.name in found:
            why = "is a second file of" if file.name in found else f"is no party of {own.recipe}:"
            raise InputError(
                Code.NOT_IN_RECIPE, f"{path}: {why} {file.name}; give one file of each party"
            )
        if file.data is None:
            raise InputError(
                Code.CONFIG_INVALID, f"{path}: data: missing; name the table of {file.name}"
            )
        found[file.name] = file
    missing = [party.name for party in recipe.parties if party.name not in found]
    if missing:
        text = (
            f"{first}: the recipe has other parties, whose files are missing here: "
            f"{listed(missing)}"
        )
        raise InputError(Code.CONFIG_INVALID, f"{text}; give them, too")
    return tables | {"parties": _roster(tables, found), "simulate": _simulate(found)}, Path(
        own.recipe
    ).parent


def _party_path(path: Path) -> Path:
    if kind_of(read_toml(path)) != "party file":
        text = (
            f"{path}: is no party file; give one recipe with [simulate], or the files of all "
            "parties"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    return path


def _roster(tables: Tables, files: dict[str, PartyFile]) -> list[Tables]:
    """Returns the parties of a recipe, with the encoders that their own files give them."""
    own = {
        name: file.encoder.model_dump(mode="json")
        for name, file in files.items()
        if file.encoder is not None
    }
    roster = [dict(party) for party in tables["parties"]]
    return [
        party | ({"encoder": own[party["name"]]} if party["name"] in own else {})
        for party in roster
    ]


def _simulate(files: dict[str, PartyFile]) -> Tables:
    data = {
        name: file.data.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
        for name, file in files.items()
        if file.data is not None
    }
    devices = {name: file.device for name, file in files.items()}
    policies = {
        name: file.policy
        if isinstance(file.policy, str)
        else file.policy.model_dump(mode="json", exclude_none=True)
        for name, file in files.items()
        if file.policy != "allow_all"
    }
    return {
        "threads": max(file.threads for file in files.values()),
        "devices": devices,
        **({"policies": policies} if policies else {}),
        "parties": data,
    }

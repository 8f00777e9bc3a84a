"""Makes a recipe for one machine from the real party files, to test a federation without keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vfl_common.config.base import detect_kind, parse, read_tables, read_toml
from vfl_common.config.party import PartyFile, load_party
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import list_names

Tables = dict[str, Any]


def are_party_files(paths: Sequence[Any]) -> bool:
    """Returns whether all values are paths of party files. Raises InputError if a file cannot be
    read.
    """
    return bool(paths) and all(
        isinstance(path, str | Path) and detect_kind(read_toml(Path(path))) == "party file"
        for path in paths
    )


def combine_party_files(paths: Sequence[Path]) -> tuple[Tables, Path]:
    """Returns the recipe that the party files name, with their data under [simulate], and the
    recipe's folder.

    Each party trains with the data, encoder, device, policy and threads of its file. Raises
    InputError if a party has no file, or two, or if the files name different recipes.
    """
    files = {path: load_party(_check_party_file(path)) for path in paths}
    first_path, first_file = next(iter(files.items()))
    tables = read_tables(Path(first_file.recipe), "recipe")
    recipe = parse(Recipe, tables, first_file.recipe)
    by_party: dict[str, PartyFile] = {}
    for path, file in files.items():
        if (
            parse(Recipe, read_tables(Path(file.recipe), "recipe"), file.recipe).digest()
            != recipe.digest()
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{path}: recipe: differs from the recipe of {first_path}. Give all parties the "
                "same recipe.",
            )
        if file.name in by_party:
            raise InputError(
                Code.NOT_IN_RECIPE,
                f"{path}: is a second file of {file.name}. Give one file of each party.",
            )
        if recipe.party(file.name) is None:
            raise InputError(
                Code.NOT_IN_RECIPE,
                f"{path}: {file.name} is not a party of {first_file.recipe}. Give one file of each "
                "party.",
            )
        if file.data is None:
            raise InputError(
                Code.CONFIG_INVALID, f"{path}: data: is missing. Name the table of {file.name}."
            )
        by_party[file.name] = file
    missing = [party.name for party in recipe.parties if party.name not in by_party]
    if missing:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{first_path}: the files of other parties of the recipe are missing: "
            f"{list_names(missing)}. Give them, too.",
        )
    return tables | {
        "parties": _add_encoders(tables, by_party),
        "simulate": _make_simulate_table(by_party),
    }, Path(first_file.recipe).parent


def _check_party_file(path: Path) -> Path:
    if detect_kind(read_toml(path)) != "party file":
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: is not a party file. Give one recipe with [simulate], or the files of all "
            "parties.",
        )
    return path


def _add_encoders(tables: Tables, files: dict[str, PartyFile]) -> list[Tables]:
    """Returns the parties of a recipe, with the encoders from their party files."""
    encoders = {
        name: file.encoder.model_dump(mode="json")
        for name, file in files.items()
        if file.encoder is not None
    }
    roster = [dict(party) for party in tables["parties"]]
    return [
        party | ({"encoder": encoders[party["name"]]} if party["name"] in encoders else {})
        for party in roster
    ]


def _make_simulate_table(files: dict[str, PartyFile]) -> Tables:
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

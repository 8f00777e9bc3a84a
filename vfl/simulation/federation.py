"""The files of a federation on one machine.

``Federation`` writes certificates of a temporary authority, party files and the recipe.
``combine_party_files`` reads the parties' real files as one recipe, to test a federation without
keys. ``Origin`` records where a run's data and modules come from, for later predictions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.certs.authority import create_authority, issue
from vfl_common.config.base import detect_kind, parse, read_tables, read_toml
from vfl_common.config.data import DataSettings
from vfl_common.config.party import PartyFile, list_factories, load_party
from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe, get_simulate_settings
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_atomic, write_error
from vfl_common.text import list_names

# The deadline for a lost party to rejoin, in seconds. It is short, because restarts are automatic.
REJOIN_S = 60.0
# The limits of alignments per day and of another party's rows. One person owns all tables of a
# simulation, so these limits have no effect.
_NO_LIMIT = 10**9


@dataclass(frozen=True)
class Federation:
    """The files of a simulated federation, in ``<out>/<run id>/federation``.

    ``data``: {party: its data settings}, with absolute paths. ``base``: the folder of the original
    recipe.
    """

    recipe: Recipe
    out: Path
    folder: Path
    data: Mapping[str, DataSettings]
    base: Path

    @property
    def recipe_path(self) -> Path:
        """The path of the recipe."""
        return self.folder / "recipe.toml"

    def party_path(self, name: str) -> Path:
        """Returns the path of a party's file."""
        return self.folder / f"{name}.toml"

    def write(self, source: Mapping[str, Any]) -> None:
        """Writes the certificates and the recipe. ``source``: the tables of the recipe.

        The party files are written later, because they need the server's address.
        """
        tables = {key: value for key, value in source.items() if key != "simulate"}
        certs = self.folder / "certs"
        try:
            certs.mkdir(parents=True)
            write_atomic(self.recipe_path, to_toml(tables))
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{certs}: cannot be written ({error.strerror}). Give another --out.",
            ) from None
        create_authority(certs, f"simulation of {self.recipe.name}"[:64], days=7)
        for name in (self.recipe.server, *(party.name for party in self.recipe.parties)):
            issue(certs, name, days=7)
        # Without the key of the authority, no other party can join.
        (certs / "ca.key").unlink()

    def write_party(self, name: str, server: str) -> None:
        """Writes the party file of ``name``, with the server's address, for ``vfl-party run``."""
        simulate = get_simulate_settings(self.recipe)
        certs, code = self.folder / "certs", list_factories(self.recipe, name)
        tables = {
            "name": name,
            "recipe": self.recipe_path.name,
            "server": server,
            "device": simulate.devices.get(name, "cpu"),
            "policy": _unpin_policy(simulate.policies.get(name, "allow_all")),
            "threads": simulate.threads,
            "out": str(self.out.resolve()),
            # The record of a simulation is separate from the party's real record.
            "record": {"folder": str(self.folder.resolve())},
            "alignments_a_day": _NO_LIMIT,
            "peer_rows_at_most": _NO_LIMIT,
            # Short keys are allowed in a trial on one machine.
            "trees": {"least_key_bits": 1024},
            # Initial weights from the recipe's seed make runs of one recipe equal.
            "init": "recipe",
            # The user has written the recipe, so its code is trusted.
            "allow_code": code,
            "tls": {
                "ca": f"{certs.name}/ca.pem",
                "certificate": f"{certs.name}/{name}.pem",
                "key": f"{certs.name}/{name}.key",
            },
            "data": self.data[name].model_dump(
                mode="json", exclude_defaults=True, exclude_none=True
            ),
        }
        # Only the owner may read the file, because the URL of a database may contain a password.
        with private_file(self.party_path(name)) as file:
            file.write(to_toml(tables).encode())


def _unpin_policy(policy: str | PolicySettings) -> str | dict[str, Any]:
    """Returns a policy for a party file without pinned keys, because keys are made for each run."""
    if isinstance(policy, str):
        return policy
    unpinned = policy.model_copy(update={"pinned": False, "peers": None})
    return unpinned.model_dump(mode="json", exclude_none=True)


def add_rejoin_deadline(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's tables with a short deadline for lost parties to rejoin, unless the recipe
    sets a deadline.
    """
    run = tables.get("run", {})
    return (
        {**tables, "run": {"rejoin_deadline_s": REJOIN_S} | run}
        if isinstance(run, dict)
        else dict(tables)
    )


def to_toml(tables: Mapping[str, Any]) -> str:
    """Returns a TOML document. Simple keys come first, then tables and arrays of tables. Nested
    tables are inline.
    """
    simple, sections = [], []
    for key, value in tables.items():
        if isinstance(value, dict):
            sections.append(f"[{_format_key(key)}]\n{to_lines(value)}")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            sections.extend(f"[[{_format_key(key)}]]\n{to_lines(item)}" for item in value)
        else:
            simple.append(f"{_format_key(key)} = {_format_value(value)}\n")
    return "\n".join(["".join(simple), *sections])


def to_lines(table: Mapping[str, Any]) -> str:
    """Returns a line of TOML for each key. Nested tables are inline."""
    return "".join(f"{_format_key(key)} = {_format_value(value)}\n" for key, value in table.items())


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(
                f"{_format_key(key)} = {_format_value(item)}" for key, item in value.items()
            )
            + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_format_value(item) for item in value) + "]"
    return _quote(value)


def _format_key(key: str) -> str:
    without_dashes = key.replace("-", "").replace("_", "")
    return key if without_dashes.isascii() and without_dashes.isalnum() else _quote(key)


def _quote(value: Any) -> str:
    """Formats text, a number or a boolean as TOML. Unlike JSON, TOML does not allow DEL in text."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007F")


FILE = "simulated.json"


@dataclass(frozen=True)
class Origin:
    """The origin of a run. ``base``: the folder with the recipe's own modules. ``data``: {party:
    its data settings}, with absolute paths.
    """

    base: Path
    data: Mapping[str, DataSettings]

    def parts(self) -> dict[str, DataSettings]:
        """Returns the data of each party, including those whose columns a baseline has joined."""
        return {
            name: part
            for party, joint in self.data.items()
            for name, part in (joint.parts or {party: joint}).items()
        }

    def note(self, folder: Path) -> None:
        """Writes the origin into a run's folder, which is created if it does not exist. Raises
        InputError.

        Only the owner may read the file, because the URL of a database may contain a password.
        """
        data = {
            name: party.model_dump(mode="json", exclude_defaults=True)
            for name, party in self.data.items()
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(folder, error) from None
        text = json.dumps({"base": str(self.base.resolve()), "data": data}, indent=1) + "\n"
        with private_file(folder / FILE) as file:
            file.write(text.encode())

    @classmethod
    def of(cls, folder: Path) -> Origin:
        """Reads the origin of a run. Raises InputError if the folder has no origin, because the
        parties of the run have separate machines.
        """
        path = folder / FILE
        try:
            tables = json.loads(path.read_bytes())
            data = {name: DataSettings.model_validate(d) for name, d in tables["data"].items()}
            return cls(Path(tables["base"]), data)
        except FileNotFoundError:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: does not record the parties' data ({FILE} is missing). Run "
                "vfl-party predict at every party if they have separate machines.",
            ) from None
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be read ({error.strerror}). Make the file readable.",
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise InputError(
                Code.FILE_INVALID, f"{path}: is damaged. Train again, or restore it."
            ) from None


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

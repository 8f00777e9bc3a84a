"""Writes the files of a whole federation on one machine: certificates of a temporary authority,
party files and the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.certs.authority import create_authority, issue
from vfl_common.config.data import DataSettings
from vfl_common.config.party import list_factories
from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe, get_simulate_settings
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_atomic

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

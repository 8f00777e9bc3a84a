"""Writes a whole federation's files on one machine: a throwaway authority, certificates, party
files, the recipe.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.certs.authority import create_authority, issue
from vfl_common.config.data import DataSettings
from vfl_common.config.division import settings_of
from vfl_common.config.party import code_named
from vfl_common.config.policy import PolicySettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, write_atomic

# The deadline to rejoin, in seconds: a process restarts without human help.
REJOIN_S = 60.0
# The limit of alignments a day, and of rows of another party: all tables belong to one person here.
_OFTEN = 10**9


@dataclass(frozen=True)
class Federation:
    """The files of a simulated federation, in ``<out>/<run id>/federation``.

    ``data``: {party: its [data]}, with absolute paths. ``base``: the folder of the original recipe.
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
        """Writes all but the party files, which need the server's address. ``source``: the recipe's
        tables.
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
        # No further party can join.
        (certs / "ca.key").unlink()

    def write_party(self, name: str, server: str) -> None:
        """Writes the party file of ``name``, with the server's address, for ``vfl-party run``."""
        simulate = settings_of(self.recipe)
        certs, code = self.folder / "certs", code_named(self.recipe, name)
        tables = {
            "name": name,
            "recipe": self.recipe_path.name,
            "server": server,
            "device": simulate.devices.get(name, "cpu"),
            "policy": _policy(simulate.policies.get(name, "allow_all")),
            "threads": simulate.threads,
            "out": str(self.out.resolve()),
            # The record belongs to this simulation, not to the party's own.
            "record": {"folder": str(self.folder.resolve())},
            "alignments_a_day": _OFTEN,
            "peer_rows_at_most": _OFTEN,
            # Short keys are allowed in a trial on one machine.
            "trees": {"least_key_bits": 1024},
            # Equal weights make runs of one recipe equal.
            "init": "recipe",
            # The user wrote the recipe and trusts its code.
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
        # The URL of a database may hold a password.
        with private_file(self.party_path(name)) as file:
            file.write(to_toml(tables).encode())


def _policy(policy: str | PolicySettings) -> str | dict[str, Any]:
    """Returns a policy for a party file. On one machine there are no keys before the run."""
    if isinstance(policy, str):
        return policy
    here = policy.model_copy(update={"pinned": False, "peers": None})
    return here.model_dump(mode="json", exclude_none=True)


def on_one_machine(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recipe's tables with a short deadline for lost parties, unless they set one."""
    run = tables.get("run", {})
    return (
        {**tables, "run": {"rejoin_deadline_s": REJOIN_S} | run}
        if isinstance(run, dict)
        else dict(tables)
    )


def to_toml(tables: Mapping[str, Any]) -> str:
    """Returns a TOML document: plain keys first, then tables and arrays of tables, their values
    inline.
    """
    plain, sections = [], []
    for key, value in tables.items():
        if isinstance(value, dict):
            sections.append(f"[{_key(key)}]\n{to_lines(value)}")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            sections.extend(f"[[{_key(key)}]]\n{to_lines(item)}" for item in value)
        else:
            plain.append(f"{_key(key)} = {_inline(value)}\n")
    return "\n".join(["".join(plain), *sections])


def to_lines(table: Mapping[str, Any]) -> str:
    """Returns a line of TOML for each key; tables are inline."""
    return "".join(f"{_key(key)} = {_inline(value)}\n" for key, value in table.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return _quote(value)


def _key(key: str) -> str:
    bare = key.replace("-", "").replace("_", "")
    return key if bare.isascii() and bare.isalnum() else _quote(key)


def _quote(value: Any) -> str:
    """Formats text, a number or a boolean as TOML, which unlike JSON allows no DEL."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007F")

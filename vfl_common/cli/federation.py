"""A whole federation's files on one machine: a throwaway authority, certificates, party files, the recipe."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings, ViewSettings
from vfl_common.config.recipe import PartySettings, Recipe, SimulateSettings
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.identity.authority import create_authority, issue

_NAMED = ("sklearn:", "torchvision:")


@dataclass(frozen=True)
class Federation:
    """Where the files of a simulated federation lie: ``<out>/<run id>/federation``.

    ``data``: {party: its [data]}, paths absolute. ``base``: the folder of the recipe as it was given.
    """

    recipe: Recipe
    out: Path
    folder: Path
    data: Mapping[str, DataSettings]
    base: Path

    @property
    def recipe_path(self) -> Path:
        return self.folder / "recipe.toml"

    def party_path(self, name: str) -> Path:
        return self.folder / f"{name}.toml"

    def write(self, source: Mapping[str, Any]) -> None:
        """Everything but the party files, which need the server's address. ``source``: the recipe's tables."""
        tables = {key: value for key, value in source.items() if key != "simulate"}
        certs = self.folder / "certs"
        try:
            certs.mkdir(parents=True)
            write_atomic(self.recipe_path, to_toml(tables))
        except OSError as error:
            raise InputError(Code.FILE_INVALID, f"{certs}: cannot be written ({error.strerror})") from None
        create_authority(certs, f"simulation of {self.recipe.name}"[:64], days=7)
        for name in (self.recipe.server, *(party.name for party in self.recipe.parties)):
            issue(certs, name, days=7)
        (certs / "ca.key").unlink()  # nobody else joins

    def write_party(self, name: str, server: str) -> None:
        """The party file of ``name``, with the server's address: ``vfl-party run`` takes it."""
        simulate = settings_of(self.recipe)
        certs = self.folder / "certs"
        tables = {
            "name": name,
            "recipe": self.recipe_path.name,
            "server": server,
            "device": simulate.devices.get(name, "cpu"),
            "threads": simulate.threads,
            "out": str(self.out.resolve()),
            "tls": {
                "ca": f"{certs.name}/ca.pem",
                "certificate": f"{certs.name}/{name}.pem",
                "key": f"{certs.name}/{name}.key",
            },
            "data": self.data[name].model_dump(mode="json", exclude_defaults=True, exclude_none=True),
        }
        write_atomic(self.party_path(name), to_toml(tables))


def settings_of(recipe: Recipe) -> SimulateSettings:
    """The recipe's [simulate]. Raises InputError where it has none."""
    if recipe.simulate is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe {recipe.name}: simulate: missing; say where each party's data comes from: [simulate.data] and "
            "simulate.scheme, or a [simulate.parties.NAME] for each party",
        )
    return recipe.simulate


def divide(recipe: Recipe, base: Path) -> dict[str, DataSettings]:
    """Each party's data: its own, or its part of the one data set; relative paths are taken from ``base``.

    The parts go to the parties that have features, in roster order. An active party without features reads the label
    alone. Raises InputError where a party has no data, or the scheme does not fit their number.
    """
    simulate = settings_of(recipe)
    roster = [party.name for party in recipe.parties]
    for key, named in (("parties", simulate.parties), ("devices", simulate.devices)):
        for name in named:
            if name not in roster:
                near = difflib.get_close_matches(name, roster, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"parties: {', '.join(roster)}"
                raise _invalid(recipe, f"{key}.{name}: no party of the recipe; {hint}")
    data = {}
    for party in recipe.parties:
        own = simulate.parties.get(party.name)
        if own is None and simulate.data is None:
            raise _invalid(recipe, f"parties.{party.name}: missing; every party needs data of its own, or all a part")
        data[party.name] = _absolute(own or _part(recipe, simulate, party), base)
    return data


def _part(recipe: Recipe, simulate: SimulateSettings, party: PartySettings) -> DataSettings:
    """One party's part of the one data set."""
    whole = simulate.data
    assert whole is not None  # noqa: S101 - checked by the caller
    if whole.view is not None:
        raise _invalid(recipe, "data.view: simulate.scheme divides the data set; remove the view")
    if not party.features:
        return whole.model_copy(update={"columns": (), "image_shape": None, "numeric": (), "categorical": ()})
    sharing = recipe.sharing
    view = {"scheme": simulate.scheme, "part": sharing.index(party.name), "parts": len(sharing)}
    where = f"recipe {recipe.name}: simulate.scheme ({len(sharing)} parties share the data set)"
    return whole.model_copy(update={"view": parse(ViewSettings, view, where)})


def _absolute(data: DataSettings, base: Path) -> DataSettings:
    source = data.source if data.source.startswith(_NAMED) else str((base / data.source).resolve())
    paths = {"source": source, "download_dir": str((base / data.download_dir).resolve())}
    if data.unaligned is not None:
        paths["unaligned"] = str((base / data.unaligned).resolve())
    return data.model_copy(update=paths)


def _invalid(recipe: Recipe, what: str) -> InputError:
    return InputError(Code.CONFIG_INVALID, f"recipe {recipe.name}: simulate.{what}")


def to_toml(tables: Mapping[str, Any]) -> str:
    """A TOML document: plain keys first, then tables and arrays of tables; what they hold is written inline."""
    plain, sections = [], []
    for key, value in tables.items():
        if isinstance(value, dict):
            sections.append(f"[{_key(key)}]\n{_lines(value)}")
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            sections.extend(f"[[{_key(key)}]]\n{_lines(item)}" for item in value)
        else:
            plain.append(f"{_key(key)} = {_inline(value)}\n")
    return "\n".join(["".join(plain), *sections])


def _lines(table: Mapping[str, Any]) -> str:
    return "".join(f"{_key(key)} = {_inline(value)}\n" for key, value in table.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(key)} = {_inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_inline(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False, default=str)


def _key(key: str) -> str:
    bare = key.replace("-", "").replace("_", "")
    return key if bare.isascii() and bare.isalnum() else json.dumps(key, ensure_ascii=False)

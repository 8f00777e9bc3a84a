"""What the folder of a run says: its summary, recipe, predictions, columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vfl.report.quality.kept import KeptRows, read_kept
from vfl.report.reading import RunRecord
from vfl_common.config.base import read_toml
from vfl_common.config.recipe import Recipe, recorded_recipe
from vfl_common.errors import InputError
from vfl_party.data.inputs import profile

_SPLITS = ("train", "validation", "test")
# Bytes of a file of JSON beside a run that is read.
_MOST_BYTES = 50_000_000
# Of a whole number that every float can take.
_MOST_DIGITS = 300


@dataclass(frozen=True)
class Facts:
    """A finished run and what it left."""

    run: RunRecord

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def active(self) -> str:
        """The name of the party that has the labels."""
        return next(each.name for each in self.run.summary.parties if each.role == "active")

    @property
    def passives(self) -> list[str]:
        return [each.name for each in self.run.summary.parties if each.role == "passive"]

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe that a process of the run has kept; None if none is here."""
        for party in self.run.summary.parties:
            path = self.folder / party.name / "recipe.json"
            found = read_json(path)
            if found:
                try:
                    return recorded_recipe(found, str(path))
                except InputError:
                    continue
        return None

    @property
    def partial(self) -> bool:
        """Whether rows count that only some parties hold."""
        return self.recipe is not None and self.recipe.rows.partial

    @cached_property
    def kept(self) -> dict[str, KeptRows]:
        """The predictions of each split, in the usual order; empty if the active party's folder is
        not here. Raises InputError if they are damaged.
        """
        if self.recipe is None:
            return {}
        found = read_kept(self.folder / self.active, self.recipe.task.kind)
        order = {name: place for place, name in enumerate(_SPLITS)}
        return {name: found[name] for name in sorted(found, key=lambda each: order.get(each, 9))}

    @property
    def judged(self) -> str:
        """The split by which the model is judged: its test rows, else the last one; '' if none was
        kept.
        """
        whole = [name for name in self.kept if name in _SPLITS]
        return "test" if "test" in whole else whole[-1] if whole else ""

    @cached_property
    def label(self) -> str:
        """The name of the label's column; '' if no file here says it."""
        noted = read_json(self.folder / self.active / "run.json").get("label")
        return str(noted or self._data(self.active).get("label") or "")

    def columns(self, party: str) -> list[str]:
        """Returns the names of a party's columns, if its folder is here and it has a table."""
        return columns_of(self.folder / party)

    @cached_property
    def leaks(self) -> Mapping[str, Any]:
        """What ``vfl leaks --out RUN`` has written; empty if it has not."""
        return read_json(self.folder / "leaks.json")

    @property
    def party_files(self) -> list[Path]:
        """The files of all parties, if the run was made on this machine and kept them; else
        none.
        """
        names = [self.active, *self.passives]
        paths = [self.folder / "federation" / f"{name}.toml" for name in names]
        return paths if all(path.is_file() for path in paths) else []

    def _data(self, party: str) -> Mapping[str, Any]:
        try:
            found = read_toml(self.folder / "federation" / f"{party}.toml").get("data", {})
        except InputError:
            found = read_json(self.folder / "simulated.json").get("data", {})
            found = found.get(party, {}) if isinstance(found, dict) else {}
        return found if isinstance(found, dict) else {}


def columns_of(folder: Path) -> list[str]:
    """Returns the names of the columns that a party has trained with; empty if it has no table."""
    try:
        return [each.name for each in profile.load(folder)]
    except InputError:
        return []


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if there is none, or if it is damaged or larger than any of
    ours.
    """
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        found = json.loads(path.read_bytes(), parse_int=_whole)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _whole(text: str) -> int | float:
    # Of more digits than a float can have, a number is infinite and not an error.
    return int(text) if len(text) <= _MOST_DIGITS else float(text)

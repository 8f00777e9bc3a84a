"""Reads the folder of a run for its page: summary, recipe, predictions, columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vfl.summary.reading import RunRecord
from vfl_common.config.base import read_toml
from vfl_common.config.recipe import Recipe, read_recorded_recipe
from vfl_common.errors import InputError
from vfl_lab.report.quality.kept import SplitPredictions, read_kept
from vfl_party.data.inputs import profile

_SPLITS = ("train", "validation", "test")
# Maximum size of a JSON file in the folder of a run, in bytes.
_MAX_BYTES = 50_000_000
# Number of digits of an integer that always fits a float.
_MAX_DIGITS = 300


@dataclass(frozen=True)
class Facts:
    """A finished run and the files in its folder."""

    run: RunRecord

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run.folder

    @property
    def active(self) -> str:
        """The name of the party that has the labels."""
        return next(party.name for party in self.run.summary.parties if party.role == "active")

    @property
    def passives(self) -> list[str]:
        """The names of the passive parties."""
        return [party.name for party in self.run.summary.parties if party.role == "passive"]

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe, from the copy of any process of the run; None without one."""
        for party in self.run.summary.parties:
            path = self.folder / party.name / "recipe.json"
            content = read_json(path)
            if content:
                try:
                    return read_recorded_recipe(content, str(path))
                except InputError:
                    continue
        return None

    @property
    def partial(self) -> bool:
        """Whether the run uses rows that only some parties have."""
        return self.recipe is not None and self.recipe.rows.partial

    @cached_property
    def predictions(self) -> dict[str, SplitPredictions]:
        """The predictions of each split, in the usual order; empty without the active party's
        folder.

        Raises InputError if they are damaged.
        """
        if self.recipe is None:
            return {}
        by_split = read_kept(self.folder / self.active, self.recipe.task.kind)
        order = {name: place for place, name in enumerate(_SPLITS)}
        return {
            name: by_split[name] for name in sorted(by_split, key=lambda split: order.get(split, 9))
        }

    @property
    def judged(self) -> str:
        """The split that the model is judged by: the test rows, otherwise the last split; ''
        without stored predictions.
        """
        whole = [name for name in self.predictions if name in _SPLITS]
        return "test" if "test" in whole else whole[-1] if whole else ""

    @cached_property
    def label(self) -> str:
        """The name of the label column; '' if no file here has it."""
        noted = read_json(self.folder / self.active / "run.json").get("label")
        return str(noted or self._data(self.active).get("label") or "")

    def columns(self, party: str) -> list[str]:
        """Returns the names of a party's columns, if its folder is here and it has a table."""
        return read_column_names(self.folder / party)

    @cached_property
    def leaks(self) -> Mapping[str, Any]:
        """What ``vfl leaks --out RUN`` has written; empty if it has not."""
        return read_json(self.folder / "leaks.json")

    @property
    def party_files(self) -> list[Path]:
        """The party files of all parties, if the run was made on this machine; otherwise empty."""
        names = [self.active, *self.passives]
        paths = [self.folder / "federation" / f"{name}.toml" for name in names]
        return paths if all(path.is_file() for path in paths) else []

    def _data(self, party: str) -> Mapping[str, Any]:
        try:
            data = read_toml(self.folder / "federation" / f"{party}.toml").get("data", {})
        except InputError:
            data = read_json(self.folder / "simulated.json").get("data", {})
            data = data.get(party, {}) if isinstance(data, dict) else {}
        return data if isinstance(data, dict) else {}


def read_column_names(folder: Path) -> list[str]:
    """Returns the names of the columns that a party has trained with; empty if it has no table."""
    try:
        return [column.name for column in profile.load(folder)]
    except InputError:
        return []


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if it is missing, damaged, or larger than any file of ours."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        content = json.loads(path.read_bytes(), parse_int=_parse_int)
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _parse_int(text: str) -> int | float:
    # A number with too many digits for a float becomes infinite instead of an error.
    return int(text) if len(text) <= _MAX_DIGITS else float(text)

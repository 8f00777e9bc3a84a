"""Finds the baselines of a run, which are trained on the same rows, and trains missing ones."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from vfl.summary.reading import RunRecord
from vfl_common.config.base import read_toml
from vfl_common.config.recipe import Recipe, read_recorded_recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import LINE, clean
from vfl_lab.report.quality import SplitPredictions, read_kept
from vfl_party.data.inputs import profile

_SPLITS = ("train", "validation", "test")


# Maximum size of a JSON file in the folder of a run, in bytes.
_MAX_BYTES = 50_000_000


# Number of digits of an integer that always fits a float.
_MAX_DIGITS = 300


# summary, recipe, predictions, columns.
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


# {value of ``vfl simulate --baseline``: description}, in the order in which they are shown.
KINDS = {
    "alone": "{active} alone",
    "gbdt-alone": "{active} alone, with trees",
    "combined": "all in one place",
    "gbdt": "all in one place, with trees",
}
ALONE = ("alone", "gbdt-alone")
# The name of the party with all columns in a centralized baseline.
_COMBINED = "combined"
# Keys of the recipe's rows that decide which rows are test rows.
_ROWS = ("split", "test", "validation", "folds", "fold", "labelled", "aligned")


@dataclass(frozen=True)
class Baseline:
    """A run of one party to compare a federation with."""

    kind: str
    folder: Path
    predictions: Mapping[str, SplitPredictions]


def find_baselines(facts: Facts) -> dict[str, Baseline]:
    """Returns the newest baseline of each kind in the same folder of runs: with the same recipe
    name, task, seed and split of the rows.
    """
    recipe = facts.recipe
    if recipe is None or len(recipe.parties) < 2:
        return {}
    wanted = _select_settings(recipe.model_dump(mode="json"))
    baselines: dict[str, Baseline] = {}
    for path in sorted(facts.folder.resolve().parent.glob("*/*/recipe.json")):
        folder = path.parents[1]
        if folder == facts.folder.resolve() or not (folder / "summary.json").is_file():
            continue
        tables = read_json(path)
        kind = _find_kind(tables)
        if not kind or path.parent.name != tables["parties"][0].get("name"):
            continue
        if _has_settings(tables, wanted):
            try:
                predictions = read_kept(path.parent, recipe.task.kind)
            except InputError:
                continue
            baselines[kind] = Baseline(kind, folder, predictions)
    return {kind: baselines[kind] for kind in KINDS if kind in baselines}


def list_possible_baselines(facts: Facts) -> list[str]:
    """Returns the possible baselines of a run: none for a run of one party, and no local-only
    baseline if the active party has no columns.
    """
    recipe = facts.recipe
    if recipe is None or len(recipe.parties) < 2:
        return []
    return [kind for kind in KINDS if recipe.active.features or kind not in ALONE]


def get_training_command(facts: Facts) -> str:
    """Returns the command that trains the missing baselines; '' without one."""
    if facts.party_files:
        return f"vfl report {shlex.quote(str(facts.folder))} --baselines"
    recipe = facts.recipe
    if recipe is not None and not recipe.active.features:
        return ""
    return f"vfl simulate {shlex.quote(facts.active)}.toml --baseline alone"


def train_baselines(facts: Facts, kinds: list[str]) -> None:
    """Trains baselines in the same folder of runs, one after the other, with ``vfl simulate``.

    Raises InputError if not all tables are on this machine, or if a run fails.
    """
    if not facts.party_files:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{facts.folder}: --baselines needs the tables of all parties on one machine, but this "
            "run does not name them. Omit --baselines, and run this at the active party: "
            f"{get_training_command(facts) or 'vfl simulate PARTY-FILE --baseline gbdt'}.",
        )
    for kind in kinds:
        command = [sys.executable, "-m", "vfl", "simulate", *map(str, facts.party_files)]
        command += ["--baseline", kind, "--out", str(facts.folder.resolve().parent), "--json"]
        click.echo(f"training {KINDS[kind].format(active=facts.active)}", err=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            why = clean(lines[-1] if lines else f"exit code {done.returncode}", LINE)
            why = why.removeprefix("error: ")
            raise InputError(
                Code.CONFIG_INVALID,
                f"--baselines: {kind}: {why.rstrip('.')}. Correct this, or omit --baselines.",
            )


def _select_settings(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in which a run and its baseline are equal."""
    rows, task = tables.get("rows") or {}, tables.get("task") or {}
    return {
        "name": tables.get("name"),
        "seed": tables.get("seed"),
        "kind": task.get("kind"),
        **{key: rows.get(key) for key in _ROWS},
    }


def _has_settings(tables: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a recorded recipe, which may lack defaults, has the wanted settings."""
    common = _select_settings(tables)
    return all(common[key] in (None, wanted[key]) for key in wanted)


def _find_kind(tables: Mapping[str, Any]) -> str:
    """Returns the kind of baseline of a recipe; '' if it is not a baseline."""
    parties, phases = tables.get("parties"), tables.get("phases")
    if not isinstance(parties, list) or not isinstance(phases, list) or len(parties) != 1:
        return ""
    trees = any(isinstance(phase, dict) and phase.get("kind") == "gbdt" for phase in phases)
    if parties[0].get("name") == _COMBINED:
        return "gbdt" if trees else "combined"
    return "gbdt-alone" if trees else "alone"

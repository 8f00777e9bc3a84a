"""Finds the baselines of a run, which are trained on the same rows, and trains missing ones."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vfl_common.errors import Code, InputError
from vfl_common.text import LINE, clean
from vfl_lab.report.page.facts import Facts, read_json
from vfl_lab.report.quality.kept import SplitPredictions, read_kept

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

"""The baselines of a run: what else was trained on the same rows; how to make what is missing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vfl.report.page.facts import Facts, read_json
from vfl.report.quality.kept import KeptRows, read_kept
from vfl_common.errors import Code, InputError
from vfl_common.text import LINE, clean

# {as ``vfl simulate --baseline`` names it: what it is}. In the order in which they are shown.
KINDS = {
    "alone": "{active} alone",
    "gbdt-alone": "{active} alone, with trees",
    "combined": "all in one place",
    "gbdt": "all in one place, with trees",
}
ALONE = ("alone", "gbdt-alone")
# The party that has all columns, as baselines name it.
_COMBINED = "combined"
# Keys of the rows that decide which are for testing.
_ROWS = ("split", "test", "validation", "folds", "fold", "labelled", "aligned")


@dataclass(frozen=True)
class Baseline:
    """A run of one party, to be seen beside a federation's. ``kept``: its predictions."""

    kind: str
    folder: Path
    kept: Mapping[str, KeptRows]


def find_baselines(facts: Facts) -> dict[str, Baseline]:
    """Returns the newest baseline of each kind beside a run: of the same recipe's name, task, seed
    and division of the rows.
    """
    recipe = facts.recipe
    if recipe is None or len(recipe.parties) < 2:
        return {}
    wanted = _alike(recipe.model_dump(mode="json"))
    found: dict[str, Baseline] = {}
    for path in sorted(facts.folder.resolve().parent.glob("*/*/recipe.json")):
        folder = path.parents[1]
        if folder == facts.folder.resolve() or not (folder / "summary.json").is_file():
            continue
        tables = read_json(path)
        kind = _kind(tables)
        if not kind or path.parent.name != tables["parties"][0].get("name"):
            continue
        if _same(tables, wanted):
            try:
                kept = read_kept(path.parent, recipe.task.kind)
            except InputError:
                continue
            found[kind] = Baseline(kind, folder, kept)
    return {kind: found[kind] for kind in KINDS if kind in found}


def possible(facts: Facts) -> list[str]:
    """Returns the baselines that a federation has: none of a party by itself, and no party alone
    that has no columns.
    """
    recipe = facts.recipe
    if recipe is None or len(recipe.parties) < 2:
        return []
    return [kind for kind in KINDS if recipe.active.features or kind not in ALONE]


def how_to_get(facts: Facts) -> str:
    """Returns the command that makes the missing baselines."""
    if facts.party_files:
        return f"vfl report {shlex.quote(str(facts.folder))} --baselines"
    recipe = facts.recipe
    if recipe is not None and not recipe.active.features:
        return ""
    return f"vfl simulate {shlex.quote(facts.active)}.toml --baseline alone"


def make(facts: Facts, kinds: list[str]) -> None:
    """Runs baselines beside a run, one after the other, by the command that people use for them.

    Raises InputError if not all tables are on this machine, or if a run fails.
    """
    if not facts.party_files:
        text = (
            f"{facts.folder}: --baselines needs the tables of all parties in one place, and this "
            "run does not say where they are"
        )
        ways = "leave --baselines out, and let the active party run: "
        raise InputError(Code.CONFIG_INVALID, f"{text}; {ways}{how_to_get(facts) or 'nothing'}")
    for kind in kinds:
        command = [sys.executable, "-m", "vfl", "simulate", *map(str, facts.party_files)]
        command += ["--baseline", kind, "--out", str(facts.folder.resolve().parent), "--json"]
        click.echo(f"training {KINDS[kind].format(active=facts.active)}", err=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            why = clean(said[-1] if said else f"exit code {done.returncode}", LINE)
            why = why.removeprefix("error: ")
            raise InputError(Code.CONFIG_INVALID, f"--baselines: {kind}: {why}")


def _alike(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a run and its baseline have in common."""
    rows, task = tables.get("rows") or {}, tables.get("task") or {}
    return {
        "name": tables.get("name"),
        "seed": tables.get("seed"),
        "kind": task.get("kind"),
        **{key: rows.get(key) for key in _ROWS},
    }


def _same(tables: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a recipe as recorded, without its defaults perhaps, has what is wanted."""
    found = _alike(tables)
    return all(found[key] in (None, wanted[key]) for key in wanted)


def _kind(tables: Mapping[str, Any]) -> str:
    """Returns which baseline a recipe is of; '' if of none."""
    parties, phases = tables.get("parties"), tables.get("phases")
    if not isinstance(parties, list) or not isinstance(phases, list) or len(parties) != 1:
        return ""
    trees = any(isinstance(each, dict) and each.get("kind") == "gbdt" for each in phases)
    if parties[0].get("name") == _COMBINED:
        return "gbdt" if trees else "combined"
    return "gbdt-alone" if trees else "alone"

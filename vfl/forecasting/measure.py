"""Measures the computing time of a step with a few rounds in this process, without a network."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.forecasting.network import BatchWork, Network
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.summary import Summary

if TYPE_CHECKING:
    from vfl_party.forecast.count import Outlook

_ROUNDS = 2
_STEPS = 40
_SHORT = {"epochs": _ROUNDS, "rounds": _ROUNDS, "trees": _ROUNDS, "steps": _STEPS}


def measure(outlook: Outlook, network: Network) -> Network:
    """Returns ``network`` with the computing time of a step of each phase. Raises InputError
    without data.
    """
    from vfl.simulation.inprocess import run_in_process
    from vfl_party.forecast.count import forecast, outlook_of

    if outlook.recipe.simulate is None or outlook.folder is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "--measure: needs a recipe with [simulate.parties.NAME], the data of each party "
            "(docs/how-to/recipes/simulate.md). Add it, or give --step-time instead.",
        )
    recipe = shorten_phases(outlook.recipe)
    trips = {
        phase.name: sum(run.times * run.steps // run.parts for run in phase.runs if run.trains)
        for phase in forecast(outlook_of(recipe, outlook.folder)).phases
    }
    data = divide(recipe, outlook.folder)
    with tempfile.TemporaryDirectory(prefix="vfl-measure-") as place:
        # The first run includes torch's one-time initialisation.
        for turn in ("warm", "measured"):
            summary = run_in_process(recipe, data, Path(place) / turn, modules=outlook.folder)
    work = {
        name: batch_work
        for name, steps in trips.items()
        if (batch_work := work_of(summary, name, steps)) is not None
    }
    return replace(network, work=work)


def with_masking(recipe: Recipe, network: Network, workers: int) -> Network:
    """Returns ``network`` with the time that ``workers`` processes of each party take to mask a
    batch. Raises InputError if no ids are masked.
    """
    from vfl_party.align import masking_time

    if recipe.rows.align != "psi" or not recipe.passives:
        raise InputError(
            Code.CONFIG_INVALID,
            '--workers: needs rows.align = "psi" and a passive party. Leave --workers out.',
        )
    # In the first round a party masks its own rows as well.
    rounds = len(recipe.passives)
    return replace(network, masking_s=masking_time.measure_masking().batch_s(workers, rounds))


def shorten_phases(recipe: Recipe) -> Recipe:
    """Returns a recipe whose phases have a few rounds, and no early stopping."""
    tables = recipe.model_dump(mode="json", exclude_unset=True)
    for phase in tables["phases"]:
        settings: dict[str, Any] = phase.pop("settings", {})
        settings.pop("early_stopping", None)
        phase |= settings | {
            key: min(limit, settings[key]) for key, limit in _SHORT.items() if settings.get(key)
        }
    return parse(Recipe, tables, "recipe")


def work_of(summary: Summary, phase: str, steps: int) -> BatchWork | None:
    """Returns the computing time of a step of ``phase``; ``steps``: those of the run. None if the
    parties made none.

    The passive parties compute at the same time, and the active party when all have sent. The
    processor time is that of all parties, without gRPC and TLS for a run in one process.
    """
    own: dict[str, list[float]] = {"active": [], "passive": []}
    cpu_s = 0.0
    for party in summary.parties:
        for times in party.times:
            if times.phase == phase and party.role in own:
                own[party.role].append(times.busy_s / max(1, steps))
                cpu_s += times.cpu_s
    if not (steps and own["passive"]):
        return None
    active_s, passive_s = max(own["active"], default=0.0), max(own["passive"])
    return BatchWork(active_s + passive_s, max(active_s, passive_s), cpu_s / steps)

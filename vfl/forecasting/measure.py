"""Measures the computing time of a step by a run of a few rounds in this process."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vfl.forecasting.network import BatchWork, Network
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe, divide
from vfl_common.errors import Code, InputError
from vfl_common.summary import Summary

if TYPE_CHECKING:
    from vfl_party.forecast.count import Outlook

_ROUNDS = 2
_STEPS = 40
_SHORT = {"epochs": _ROUNDS, "rounds": _ROUNDS, "trees": _ROUNDS, "steps": _STEPS}


def measure_computation(outlook: Outlook, network: Network) -> Network:
    """Returns ``network`` with the measured computing time of a step for each phase. Raises
    InputError if the recipe names no data.
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
    steps_by_phase = {
        phase.name: sum(run.times * run.steps // run.parts for run in phase.runs if run.trains)
        for phase in forecast(outlook_of(recipe, outlook.folder)).phases
    }
    data = divide(recipe, outlook.folder)
    with tempfile.TemporaryDirectory(prefix="vfl-measure-") as folder:
        # The first run is not used, because it includes torch's one-time initialisation.
        for run_name in ("warm", "measured"):
            summary = run_in_process(recipe, data, Path(folder) / run_name, modules=outlook.folder)
    work = {
        name: batch_work
        for name, steps in steps_by_phase.items()
        if (batch_work := compute_batch_work(summary, name, steps)) is not None
    }
    return replace(network, work=work)


def add_masking_time(recipe: Recipe, network: Network, workers: int) -> Network:
    """Returns ``network`` with the measured time to mask a batch of ids with ``workers`` processes
    of each party. Raises InputError if the recipe masks no ids.
    """
    from vfl_party.align import masking_time

    if recipe.rows.align != "psi" or not recipe.passives:
        raise InputError(
            Code.CONFIG_INVALID,
            '--workers: needs rows.align = "psi" and a passive party. Leave --workers out.',
        )
    # In the first round, a party also masks its own rows.
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


def compute_batch_work(summary: Summary, phase: str, steps: int) -> BatchWork | None:
    """Returns the computing time of a step of ``phase``; None if the phase has no steps.

    ``steps``: the number of steps in the measured run. The passive parties compute at the same
    time, and then the active party. The processor time is the sum over all parties. It does not
    include gRPC and TLS, because the run is in one process.
    """
    times_by_role: dict[str, list[float]] = {"active": [], "passive": []}
    cpu_s = 0.0
    for party in summary.parties:
        for times in party.times:
            if times.phase == phase and party.role in times_by_role:
                times_by_role[party.role].append(times.busy_s / max(1, steps))
                cpu_s += times.cpu_s
    if not (steps and times_by_role["passive"]):
        return None
    active_s, passive_s = max(times_by_role["active"], default=0.0), max(times_by_role["passive"])
    return BatchWork(active_s + passive_s, max(active_s, passive_s), cpu_s / steps)

"""Measures what a step computes: a few rounds of the recipe in this process, without a network."""

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


def measured(outlook: Outlook, network: Network) -> Network:
    """Returns ``network`` with what a step of each phase computes. Raises InputError if there are
    no data here.
    """
    from vfl.simulation.inprocess import run_in_process
    from vfl_party.forecast.count import forecast, outlook_of

    if outlook.recipe.simulate is None or outlook.folder is None:
        text = (
            "--measure runs a few steps of all parties, so it needs a recipe with "
            "[simulate.parties.NAME], the data of"
            " each (docs/how-to/recipes/simulate.md); give --step-time instead"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    recipe = shortened(outlook.recipe)
    trips = {
        phase.name: sum(run.times * run.steps // run.parts for run in phase.runs if run.trains)
        for phase in forecast(outlook_of(recipe, outlook.folder)).phases
    }
    data = divide(recipe, outlook.folder)
    with tempfile.TemporaryDirectory(prefix="vfl-measure-") as place:
        # What torch does once is not what a step takes.
        for turn in ("warm", "measured"):
            summary = run_in_process(recipe, data, Path(place) / turn, modules=outlook.folder)
    work = {
        name: found
        for name, steps in trips.items()
        if (found := work_of(summary, name, steps)) is not None
    }
    return replace(network, work=work)


def with_masking(recipe: Recipe, network: Network, workers: int) -> Network:
    """Returns ``network`` with what ``workers`` processes of each party take to mask a batch.
    Raises InputError if no ids are masked.
    """
    from vfl_party.align import masking_time

    if recipe.rows.align != "psi" or not recipe.passives:
        text = '--workers counts how long ids are masked: it needs rows.align = "psi"'
        raise InputError(Code.CONFIG_INVALID, f"{text}, and a passive party; leave it out")
    # In the first round a party masks its own rows, too.
    rounds = len(recipe.passives)
    return replace(network, masking_s=masking_time.measured().batch_s(workers, rounds))


def shortened(recipe: Recipe) -> Recipe:
    """Returns a recipe whose phases make a few rounds, and do not end early."""
    tables = recipe.model_dump(mode="json", exclude_unset=True)
    for phase in tables["phases"]:
        settings: dict[str, Any] = phase.pop("settings", {})
        settings.pop("early_stopping", None)
        phase |= settings | {
            key: min(most, settings[key]) for key, most in _SHORT.items() if settings.get(key)
        }
    return parse(Recipe, tables, "recipe")


def work_of(summary: Summary, phase: str, steps: int) -> BatchWork | None:
    """Returns what a step of ``phase`` has computed; ``steps``: those of the run. None if the
    parties made none.

    The passive parties compute at the same time, and the active party when all have sent. The
    processor time is that of all; of a run in one process it lacks what gRPC and TLS take.
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

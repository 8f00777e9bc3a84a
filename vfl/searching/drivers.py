"""Runs the trials of a search in other processes. Each process is a driver of the search."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vfl.jobs.pool import open_pool, open_waiting_threads
from vfl.library.data import add_data
from vfl.library.plugins import get_import_paths, import_plugins
from vfl.library.recipe import Recipe
from vfl.library.simulate import Order
from vfl.searching import journal
from vfl.searching.spaces import parse_spaces, write_spaces
from vfl.searching.trying import TrialPlan, drive
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import VflError
from vfl_party.base.plugins import use_plugins

# The function that carries out an order, in a form that other processes can import.
ORDER_FUNCTION = "vfl.searching.drivers:drive_order"
# The interval at which ended trials are reported and Ctrl-C is handled.
_TICK_S = 0.2


def run_in_processes(
    plan: TrialPlan,
    data: Mapping[str, Any] | None,
    jobs: int,
    backend: str | None,
    look: Callable[[], None],
) -> None:
    """Runs the trials of a search with ``jobs`` drivers in other processes.

    The arguments are those of ``drive`` and ``pool``. Raises VflError if a driver failed and the
    other drivers did not finish its trials.
    """
    simulate = plan.recipe.settings.simulate
    threads_each = simulate.threads if simulate is not None else 1
    errors: list[BaseException] = []
    with (
        _make_order(plan, data) as order,
        open_pool(ORDER_FUNCTION, jobs, threads_each, backend) as workers,
        open_waiting_threads(workers, jobs) as threads,
    ):
        pending = {threads.submit(workers.run, order) for _ in range(jobs)}
        while pending:
            done, pending = wait(pending, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            errors += [error for future in done if (error := future.exception()) is not None]
            look()
    defects = [error for error in errors if not isinstance(error, VflError)]
    if defects or (errors and len(journal.get_ended_trials(plan.open_study())) < plan.trial_count):
        raise (defects or errors)[0]


@contextmanager
def _make_order(plan: TrialPlan, data: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Writes data frames to temporary files, and yields an order for the drivers. Raises
    InputError.
    """
    recipe = plan.recipe
    tables, frames = add_data(recipe.to_dict(), data or {})
    settings = parse(Settings, tables, "recipe")
    data_by_party = divide(settings, recipe.base)
    with tempfile.TemporaryDirectory(prefix="rows-", dir=plan.folder) as rows:
        run = Order(tables, settings, data_by_party, recipe.base, Path(rows), tables, None, frames)
        yield {
            "recipe": run.in_files("jobs=1"),
            "base": str(recipe.base),
            "spaces": write_spaces(plan.spaces),
            "folder": str(plan.folder),
            "plugins": get_import_paths("jobs=1"),
            "objective": plan.objective,
            "runs": plan.runs,
            "by": plan.by,
            "prune": plan.prune,
            "seed": plan.seed,
            "digest": plan.digest,
        }


def drive_order(order: dict[str, Any]) -> None:
    """Carries out an order: runs trials of a search in this process until all trials have ended."""
    with use_plugins(import_plugins(order["plugins"])), journal.silence_optuna():
        plan = TrialPlan(
            Recipe.from_dict(order["recipe"], order["base"]),
            parse_spaces(order["spaces"]),
            order["objective"],
            order["runs"],
            Path(order["folder"]),
            order["by"],
            order["prune"],
            order["seed"],
            order["digest"],
        )
        drive(plan, None)

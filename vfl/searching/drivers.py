"""Makes the trials of a search in other processes, each of which is a driver."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vfl.jobs.pool import pool, waiting
from vfl.library.data import with_data
from vfl.library.plugins import get_import_paths, import_plugins
from vfl.library.recipe import Recipe
from vfl.library.simulate import Order
from vfl.searching import journal
from vfl.searching.spaces import spaces_of, write_spaces
from vfl.searching.trying import TrialPlan, drive
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe as Settings
from vfl_common.errors import VflError
from vfl_party.base.plugins import use_plugins

DRIVES = "vfl.searching.drivers:as_ordered"
# The longest wait until ended trials are reported, and Ctrl-C is seen.
_TICK_S = 0.2


def in_others(
    plan: TrialPlan,
    data: Mapping[str, Any] | None,
    jobs: int,
    backend: str | None,
    look: Callable[[], None],
) -> None:
    """Has ``jobs`` drivers in other processes make the trials.

    The arguments are those of ``drive`` and ``pool``. Raises VflError if a driver was lost, and the
    others have not done its work.
    """
    simulate = plan.recipe.settings.simulate
    threads_each = simulate.threads if simulate is not None else 1
    errors: list[BaseException] = []
    with (
        _make_order(plan, data) as order,
        pool(DRIVES, jobs, threads_each, backend) as workers,
        waiting(workers, jobs) as threads,
    ):
        left = {threads.submit(workers.run, order) for _ in range(jobs)}
        while left:
            done, left = wait(left, timeout=_TICK_S, return_when=FIRST_COMPLETED)
            errors += [error for future in done if (error := future.exception()) is not None]
            look()
    odd = [error for error in errors if not isinstance(error, VflError)]
    if odd or (errors and len(journal.get_ended_trials(plan.open_study())) < plan.every):
        raise (odd or errors)[0]


@contextmanager
def _make_order(plan: TrialPlan, data: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the order to drive a search, with frames as files. Raises InputError."""
    recipe = plan.recipe
    tables, frames = with_data(recipe.to_dict(), data or {})
    settings = parse(Settings, tables, "recipe")
    divided = divide(settings, recipe.base)
    with tempfile.TemporaryDirectory(prefix="rows-", dir=plan.folder) as rows:
        run = Order(tables, settings, divided, recipe.base, Path(rows), tables, None, frames)
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
            "asked": plan.asked,
        }


def as_ordered(order: dict[str, Any]) -> None:
    """Drives a search in this process until all of its trials have ended. Raises whatever it
    raises.
    """
    with use_plugins(import_plugins(order["plugins"])), journal.quiet():
        plan = TrialPlan(
            Recipe.from_dict(order["recipe"], order["base"]),
            spaces_of(order["spaces"]),
            order["objective"],
            order["runs"],
            Path(order["folder"]),
            order["by"],
            order["prune"],
            order["seed"],
            order["asked"],
        )
        drive(plan, None)

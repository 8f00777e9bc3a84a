"""Runs as orders: the keys of their dict, and the function that makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vfl.jobs.answers import Order
from vfl.jobs.pool import WorkerPool, pool
from vfl_common.errors import Code, InputError

# The library's function that makes a run; other processes import it by this name.
MAKES = "vfl.library.orders:make"


def make(
    workers: WorkerPool,
    recipe: dict[str, Any],
    base: Path,
    folder: Path,
    plugins: dict[str, dict[str, str]] | None = None,
) -> None:
    """Has a process of ``workers`` make a run with all of its parties in itself.

    Args:
        workers: the processes, which carry out ``MAKES``.
        recipe: its tables.
        base: the folder of relative paths.
        folder: the run's.
        plugins: {group: {name: ``module:object``}}.

    Raises VflError.
    """
    order: Order = {
        "recipe": recipe,
        "base": str(base.resolve()),
        "folder": str(folder.resolve()),
        "plugins": plugins or {},
    }
    workers.run(order)
    if not (folder / "summary.json").exists():
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: another machine made the run and wrote to another folder. Set out to a "
            "folder that all machines share.",
        )


@contextlib.contextmanager
def making(
    jobs: int, backend: str | None = None
) -> Iterator[Callable[[dict[str, Any], Path, Path], None]]:
    """Yields a function that makes a run of a study (``vfl.studies.run.Make``) in another process.
    The arguments are those of ``pool``.
    """
    with pool(MAKES, jobs, 1, backend) as workers:

        def make_run(recipe: dict[str, Any], base: Path, folder: Path) -> None:
            make(workers, recipe, base, folder)

        yield make_run

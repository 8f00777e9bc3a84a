"""Makes runs in other processes, as orders."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vfl.jobs.answers import Order
from vfl.jobs.pool import WorkerPool, open_pool
from vfl_common.errors import Code, InputError

# The function that makes a run, by the name under which other processes import it.
RUN_FUNCTION = "vfl.library.orders:make"


def make(
    workers: WorkerPool,
    recipe: dict[str, Any],
    base: Path,
    folder: Path,
    plugins: dict[str, dict[str, str]] | None = None,
) -> None:
    """Makes a run in one process of ``workers``, with all parties in the same process.

    Args:
        workers: The processes, which carry out orders with the function ``RUN_FUNCTION``.
        recipe: The tables of the recipe.
        base: The folder that relative paths in the recipe start from.
        folder: The folder of the run.
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
            f"{folder}: the run was made on another machine, which does not share this folder. Set "
            "out to a folder that all machines share.",
        )


@contextlib.contextmanager
def open_run_maker(
    jobs: int, backend: str | None = None
) -> Iterator[Callable[[dict[str, Any], Path, Path], None]]:
    """Yields a function that makes a run of a study in another process (a ``Make`` function of
    ``vfl_lab.studies.run``). The arguments are those of ``pool``.
    """
    with open_pool(RUN_FUNCTION, jobs, 1, backend) as workers:

        def make_run(recipe: dict[str, Any], base: Path, folder: Path) -> None:
            make(workers, recipe, base, folder)

        yield make_run

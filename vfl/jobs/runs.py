"""Runs as orders: what their dict has, and which function makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vfl.jobs.answers import Order
from vfl.jobs.pool import Pool, pool
from vfl_common.errors import Code, InputError

# Of the library, which other processes import by this name.
MAKES = "vfl.library.orders:make"


def make(
    workers: Pool,
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
        folder: of the run.
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
        text = "the run was made on a machine that writes to another folder"
        raise InputError(
            Code.FILE_INVALID, f"{folder}: {text}; set out to a folder that all machines share"
        )


@contextlib.contextmanager
def making(
    jobs: int, backend: str | None = None
) -> Iterator[Callable[[dict[str, Any], Path, Path], None]]:
    """Yields what makes a run of a study of files (``vfl.studies.run.Make``) in another process.
    The arguments are those of ``pool``.
    """
    with pool(MAKES, jobs, 1, backend) as workers:

        def made(recipe: dict[str, Any], base: Path, folder: Path) -> None:
            make(workers, recipe, base, folder)

        yield made

"""Makes runs in other processes, as orders (``vfl.jobs``). Each process makes whole runs, with all
parties of a run in it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vfl.jobs import WorkerPool, open_pool
from vfl.library.plugins import get_import_paths, import_plugins
from vfl.library.simulate import Order, run_files
from vfl_common.errors import Code, InputError
from vfl_party.base.plugins import use_plugins

# The function that makes a run, by the name under which other processes import it.
RUN_FUNCTION = "vfl.library.orders:make"


def send(pool: WorkerPool, order: Order) -> None:
    """Makes a run in a process of ``pool``, which carries out orders with ``RUN_FUNCTION``, and
    waits for its end. Raises VflError.
    """
    tables, plugins = order.in_files("jobs=1"), get_import_paths("jobs=1")
    _send(pool, tables, order.base, order.folder, plugins)


def _send(
    pool: WorkerPool,
    tables: dict[str, Any],
    base: Path,
    folder: Path,
    plugins: dict[str, dict[str, str]],
) -> None:
    pool.run(
        {
            "recipe": tables,
            "base": str(base.resolve()),
            "folder": str(folder.resolve()),
            "plugins": plugins,
        }
    )
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
    ``vfl_lab.studies.run``). The arguments are those of ``open_pool``.
    """
    with open_pool(RUN_FUNCTION, jobs, 1, backend) as pool:
        yield lambda recipe, base, folder: _send(pool, recipe, base, folder, {})


def make(order: dict[str, Any]) -> None:
    """Makes a run in this process. ``order``: the request that ``_send`` sent."""
    folder = clear_folder(order["folder"])
    with use_plugins(import_plugins(order["plugins"])):
        run_files(order["recipe"], Path(order["base"]), folder)


def clear_folder(path: str) -> Path:
    """Removes the files of a lost process from the folder of a run, and returns the folder.

    A backend may start an order again. The folder ``federation`` with the rows is kept, because the
    rows were written before the order was sent.
    """
    folder = Path(path)
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name != "federation":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return folder

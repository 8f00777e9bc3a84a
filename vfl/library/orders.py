"""Makes runs in other processes. Each process makes whole runs, with all parties of a run in it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from vfl.jobs import runs
from vfl.jobs.pool import WorkerPool
from vfl.library.plugins import get_import_paths, import_plugins
from vfl.library.simulate import Order, run_files
from vfl_party.base.plugins import use_plugins


def send(pool: WorkerPool, order: Order) -> None:
    """Makes a run in a process of ``pool`` and waits for its end. Raises VflError."""
    tables, plugins = order.in_files("jobs=1"), get_import_paths("jobs=1")
    runs.make(pool, tables, order.base, order.folder, plugins)


def make(order: dict[str, Any]) -> None:
    """Makes a run in this process. ``order``: the request that ``runs.make`` sent."""
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

"""Runs as orders for other processes, each of which makes a run with all of its parties in
itself.
"""

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
    """Has a process of ``pool``, which carries out ``runs.MAKES``, make a run. Raises VflError."""
    tables, plugins = order.in_files("jobs=1"), get_import_paths("jobs=1")
    runs.make(pool, tables, order.base, order.folder, plugins)


def make(order: dict[str, Any]) -> None:
    """Makes a run in this process. Raises whatever it raises."""
    folder = clear_folder(order["folder"])
    with use_plugins(import_plugins(order["plugins"])):
        run_files(order["recipe"], Path(order["base"]), folder)


def clear_folder(path: str) -> Path:
    """Removes what a lost process left in the folder of an order's run, and returns the folder.

    A backend may start an order again. The rows stay: they were written before.
    """
    folder = Path(path)
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.name != "federation":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return folder

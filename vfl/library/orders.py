"""Runs as orders for other processes, each of which makes a run with all of its parties in
itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from vfl.jobs import runs
from vfl.jobs.pool import Pool
from vfl.library.plugins import imported, named_now
from vfl.library.simulate import Order, run_files
from vfl_party.base.plugins import using


def send(pool: Pool, order: Order) -> None:
    """Has a process of ``pool``, which carries out ``runs.MAKES``, make a run. Raises VflError."""
    tables, plugins = order.in_files("jobs=1"), named_now("jobs=1")
    runs.make(pool, tables, order.base, order.folder, plugins)


def make(order: dict[str, Any]) -> None:
    """Makes a run in this process. Raises whatever it raises."""
    folder = emptied(order["folder"])
    with using(imported(order["plugins"])):
        run_files(order["recipe"], Path(order["base"]), folder)


def emptied(path: str) -> Path:
    """Returns the folder of an order's run, without what a lost process had begun: a backend may
    begin it again. The rows stay; they were written before.
    """
    folder = Path(path)
    for begun in folder.iterdir() if folder.is_dir() else ():
        if begun.name != "federation":
            shutil.rmtree(begun) if begun.is_dir() else begun.unlink()
    return folder

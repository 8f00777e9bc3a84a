"""What a table has that computes its cells itself, in place of a study."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.papers import shelf
from benchmarks.papers.data import Sources
from benchmarks.papers.describe import Column, Data, Scale, Table, Tables
from benchmarks.papers.plan import Variant, base_recipe
from vfl_common.errors import VflError
from vfl_common.files import write_atomic


@dataclass(frozen=True)
class Work:
    """``seeds``: to be run. ``folder``: for the table's own files. ``say``: tells a person."""

    scale: Scale
    seeds: Sequence[int]
    folder: Path
    sources: Sources
    say: Callable[[str], None]
    # {data: how it differs from the official one}, as far as recipes were made.
    notes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # {data: why it was not run}.
    absent: dict[str, str] = field(default_factory=dict)

    def data(self, table: Table) -> Iterator[Data]:
        """Yields the table's data sets that the scale has and that are there; notes the others."""
        for each in table.data:
            if self.scale not in each.at:
                continue
            why = self.sources.missing(each.prepare)
            if why is None:
                yield each
            else:
                self.absent[each.name] = why

    def recipe(self, data: Data, column: Column) -> Tables:
        """Returns a recipe of a data set, without phases of its own. Raises VflError if it is not
        there.
        """
        variant = Variant(data, (column,), ())
        base = self.sources.base(variant, self.scale)
        self.notes.setdefault(data.name, base.notes)
        return base_recipe("papers", variant, self.scale, base.tables)

    def once(self, key: str, value: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Returns named numbers, from an earlier call with the same key if there was one. Several
        processes may share a folder.
        """
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
        if path.exists():
            found: dict[str, float] = json.loads(path.read_text())["values"]
            return found
        self.say(key)
        values = value()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"key": key, "values": values}, indent=1) + "\n")
        return values


def computed(order: dict[str, Any]) -> None:
    """Computes the cells of a table, for what it keeps by ``Work.once``; a table that cannot be
    computed says so when it is shown. ``order``: as ``order_of`` makes it.
    """
    compute = shelf.load(order["table"]).compute
    if compute is None:
        return
    sources = Sources(Path(order["given"]), Path(order["own"]))
    work = Work(order["scale"], [order["seed"]], Path(order["folder"]), sources, print)
    # Of many at a time, none may take all cores.
    torch.set_num_threads(1)
    with contextlib.suppress(VflError):
        for _ in compute(work):
            pass


def order_of(table: str, work: Work, seed: int) -> dict[str, Any]:
    """Returns the order to compute a seed of a table in another process."""
    given, own = map(str, work.sources.folders)
    folder = str(work.folder.absolute())
    places = {"folder": folder, "given": given, "own": own}
    return {"table": table, "scale": work.scale, "seed": seed, **places}

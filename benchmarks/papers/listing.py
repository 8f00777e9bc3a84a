"""Lists tables: their data, how long their last runs took, and when these were."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table as Shown

from benchmarks.papers import result, shelf
from benchmarks.papers.data import present
from benchmarks.papers.describe import SCALES, Scale, Table


def listing(names: list[str], scale: Scale, data: Path | None, results: Path) -> Shown:
    """Returns the list. ``data``: the folder in which data sets are looked for."""
    shown = Shown(box=box.SIMPLE)
    heads = ("table", "in the paper", "compares", "data", "measured", "last run")
    for head in heads:
        shown.add_column(head)
    for name in names:
        table = shelf.load(name)
        last = {each: result.load(name, each, results) for each in SCALES}
        own = last[scale]
        shown.add_row(
            name,
            f"{shelf.PAPERS[name.partition('.')[0]].name}, {table.place}",
            table.title,
            "\n".join(_data(table, data)),
            _time(own.seconds if own is not None else None),
            ", ".join(f"{each}: {found.day}" for each, found in last.items() if found is not None),
        )
    return shown


def _data(table: Table, folder: Path | None) -> list[str]:
    return [
        f"{name}: {'present' if present(name, folder) else 'not present'}"
        if folder is not None
        else name
        for name in dict.fromkeys(each.prepare for each in table.data)
    ]


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"

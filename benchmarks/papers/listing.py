"""Lists tables: their data, how long they take, and what was last run."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table as Shown

from benchmarks.papers import result, shelf
from benchmarks.papers.data import present
from benchmarks.papers.describe import SCALES, Data, Scale, Table, Tables, resolved, run_at
from benchmarks.papers.plan import work

# Of a data set for which the scale says no number.
_ROWS = 50_000


def listing(names: list[str], scale: Scale, data: Path | None, results: Path) -> Shown:
    """Returns the list. ``data``: the folder in which data sets are looked for."""
    shown = Shown(box=box.SIMPLE)
    heads = ("table", "in the paper", "compares", "data", "forecast", "measured", "last run")
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
            _time(_forecast(name, table, scale, results)),
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


def _forecast(name: str, table: Table, scale: Scale, results: Path) -> float | None:
    """Returns seconds: those measured at the other scale, by the rows that pass.

    None without such a measurement, and if the scales differ in networks, images or data sets:
    rows do not take the same time there. ``--forecast`` measures.
    """
    if table.compute is not None or not _costs_alike(table):
        return None
    for other in SCALES:
        known = result.load(name, other, results)
        if known is not None and other != scale:
            return (
                known.seconds
                * work(run_at(table, scale), scale, _ROWS)
                / work(run_at(table, other), other, _ROWS)
            )
    return None


def _costs_alike(table: Table) -> bool:
    """Returns whether a row costs the same at both scales."""
    paper, small = (run_at(table, scale) for scale in ("paper", "small"))
    return [_costs(e, "paper") for e in paper.data] == [_costs(e, "small") for e in small.data]


def _costs(data: Data, scale: Scale) -> Tables:
    costs: Tables = resolved([data.name, data.model, data.reading, data.options], scale)
    return costs


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"

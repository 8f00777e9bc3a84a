"""The results of a table: kept as JSON, shown as Markdown."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.papers.definition import runs_digest
from benchmarks.papers.describe import (
    Column,
    Data,
    Line,
    Place,
    Scale,
    Table,
    digits_of,
    has,
    resolved,
)
from benchmarks.papers.rules import Cells, Claim, Finding, judge_all, overall, resolve
from benchmarks.papers.run import Filled
from vfl_common.files import write_atomic
from vfl_party.base.arithmetic import describe_arithmetic

RESULTS = Path(__file__).parents[1] / "results" / "papers"


@dataclass(frozen=True)
class Result:
    """A table's results at a scale.

    Args:
        seconds: of all runs, one after the other.
        machine: the processor, instruction set, threads and versions of the process that wrote
            them.
        commit: the commit of the repository, with a "+" if files differed from it.
        definition: the digest of what the table ran; "" in files without one.
        claims: the tests of its claims, as plain data, with their verdicts.
    """

    name: str
    scale: Scale
    seeds: tuple[int, ...]
    values: Mapping[Place, tuple[float, ...]]
    rates: Mapping[Place, float] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: float = 0.0
    day: str = ""
    cores: int = 0
    machine: str = ""
    commit: str = ""
    definition: str = ""
    claims: Sequence[Mapping[str, Any]] = ()

    def is_current(self, table: Table) -> bool:
        """Returns whether the table still runs what gave these results, on their data sets."""
        return self.definition == runs_digest(self.name, table, self.scale, self.data)

    @property
    def data(self) -> frozenset[str]:
        """The names of the data sets that have results."""
        return frozenset(name for name, _, _ in self.values)

    def save(self, folder: Path) -> Path:
        """Writes ``NAME-SCALE.json``."""
        path = folder / f"{self.name}-{self.scale}.json"
        cells = [
            {"data": data, "line": line, "column": column, "values": [round(v, 6) for v in values]}
            | ({"rate": self.rates[place]} if place in self.rates else {})
            for place, values in self.values.items()
            for data, line, column in [place]
        ]
        written: dict[str, Any] = {
            "table": self.name,
            "scale": self.scale,
            "seeds": list(self.seeds),
            "seconds": round(self.seconds, 1),
            "day": self.day,
            "cores": self.cores,
            "machine": self.machine,
            "commit": self.commit,
            "definition": self.definition,
            "absent": dict(self.absent),
            "left_out": dict(self.left_out),
            "notes": dict(self.notes),
            "claims": list(self.claims),
            "cells": cells,
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(written, indent=1, ensure_ascii=False) + "\n")
        return path


def result_of(
    name: str, table: Table, scale: Scale, seeds: Sequence[int], filled: Filled
) -> Result:
    """Returns the results of a table that was run today on this machine."""
    found = Result(
        name,
        scale,
        tuple(seeds),
        filled.values,
        filled.rates,
        filled.absent,
        filled.left_out,
        filled.notes,
        filled.seconds,
        date.today().isoformat(),
        os.cpu_count() or 0,
        str(describe_arithmetic(torch.device("cpu"))),
        commit(),
    )
    definition = runs_digest(name, table, scale, found.data)
    return with_verdicts(table, replace(found, definition=definition))


def with_verdicts(table: Table, result: Result) -> Result:
    """Returns a result with its tests and their verdicts, which another program can check."""
    verdicts = {
        (claim.says, each.data): each.verdict
        for claim, findings in judged(table, result)
        for each in findings
    }
    return replace(
        result,
        claims=[
            {
                "data": data,
                "says": claim.says,
                "runs": runs_of(table, result),
                "test": None if test is None else asdict(test),
                "verdict": verdicts[claim.says, data],
            }
            for claim, data, test in resolve(table, result.scale)
        ],
    )


def runs_of(table: Table, result: Result) -> int:
    """Returns how many values a whole cell has: one for each seed and fold."""
    folds: int = resolved(table.folds, result.scale) or 1
    return len(result.seeds) * folds


def commit() -> str:
    """Returns the commit of the repository, with a "+" if tracked files differ from it."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*git, "status", "--porcelain", "-uno", "--", "../..", ":!../results"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def load(name: str, scale: Scale, folder: Path = RESULTS) -> Result | None:
    """Returns the kept results of a table at a scale, or None."""
    path = folder / f"{name}-{scale}.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    if (kept["table"], kept["scale"]) != (name, scale):
        raise ValueError(
            f"{path}: holds {kept['table']} at scale {kept['scale']}. Rename the file, or delete it."
        )
    places = {(e["data"], e["line"], e["column"]): e for e in kept["cells"]}
    return Result(
        kept["table"],
        kept["scale"],
        tuple(kept["seeds"]),
        {place: tuple(each["values"]) for place, each in places.items()},
        {place: each["rate"] for place, each in places.items() if "rate" in each},
        kept["absent"],
        kept["left_out"],
        {data: tuple(notes) for data, notes in kept["notes"].items()},
        kept["seconds"],
        kept["day"],
        kept["cores"],
        kept.get("machine", ""),
        kept.get("commit", ""),
        kept.get("definition", ""),
        kept.get("claims", ()),
    )


def judged(table: Table, result: Result | None) -> list[tuple[Claim, list[Finding]]]:
    """Judges the claims of a table."""
    if result is None:
        return judge_all(Cells(table, {}))
    return judge_all(Cells(table, result.values, result.scale, runs_of(table, result)))


# -- Markdown
# ----------------------------------------------------------------------


def markdown(table: Table, result: Result | None, *, briefly: bool = False) -> str:
    """Returns the paper's layout, each cell with the paper's number and ours, and the verdicts.
    ``briefly``: only of data sets, lines and columns that were run.
    """
    values = dict(result.values) if result is not None else {}
    ran = {name for name, _, _ in values}
    lines: list[str] = []
    for data in table.data:
        if briefly and data.name not in ran:
            continue
        if block := [*_block(_ran_of(table, data, values) if briefly else table, data, values)]:
            lines += [*block, ""]
    return "\n".join([*lines, *_verdicts(table, result)])


def _ran_of(table: Table, data: Data, values: Mapping[Place, tuple[float, ...]]) -> Table:
    """Returns a table with the lines and columns that were run of a data set; all if none was."""
    lines = {line for name, line, _ in values if name == data.name}
    columns = {column for name, _, column in values if name == data.name}
    if not lines:
        return table
    shown = [at for at, each in enumerate(table.columns) if each.name in columns]
    return replace(
        table,
        lines=tuple(each for each in table.lines if each.name in lines),
        columns=tuple(table.columns[at] for at in shown),
        figures={
            name: {line: [row[at] for at in shown] for line, row in rows.items()}
            for name, rows in table.figures.items()
        },
    )


def _block(table: Table, data: Data, values: Mapping[Place, tuple[float, ...]]) -> Iterator[str]:
    """Yields the lines of one data set, if the paper or we have numbers of it."""
    columns = [each for each in table.columns if any(has(line, data, each) for line in table.lines)]
    rows = [
        [_cell(table, line, data, column, values) for column in columns] for line in table.lines
    ]
    # At a smaller scale some columns of a chart have neither the paper's numbers nor ours.
    shown = [at for at in range(len(columns)) if any(row[at] for row in rows)]
    if not shown:
        return
    columns, rows = [columns[at] for at in shown], [[row[at] for at in shown] for row in rows]
    beside = f" (in place of {data.stands_for})" if data.stands_for else ""
    yield f"| {data.name}{beside} | " + " | ".join(each.name for each in columns) + " |"
    yield "| --- " * (len(columns) + 1) + "|"
    for line, row in zip(table.lines, rows, strict=True):
        if any(row):
            yield f"| {line.name} | " + " | ".join(cell or "–" for cell in row) + " |"


def _cell(
    table: Table,
    line: Line,
    data: Data,
    column: Column,
    values: Mapping[Place, tuple[float, ...]],
) -> str:
    """Returns ``paper → ours``, or what there is of the two."""
    if not has(line, data, column):
        return ""
    place = (data.name, line.name, column.name)
    paper, ours = table.paper(place), values.get(place, ())
    digits = digits_of(table, data)
    left = "" if paper is None else f"{paper:.{digits}f}"
    right = ""
    if ours:
        right = f"**{fmean(ours):.{digits}f}**"
        spread = f"{stdev(ours) if len(ours) > 1 else 0.0:.{digits}f}"
        # What is counted, such as bytes, has none.
        right += f" ± {spread}" if float(spread) else ""
    return " → ".join(each for each in (left, right) if each)


def _verdicts(table: Table, result: Result | None) -> Iterator[str]:
    for claim, findings in judged(table, result):
        seen = [each for each in findings if each.verdict != "not run"]
        whole = overall(findings)
        alike = all(each.verdict == whole for each in seen)
        told = "; ".join(
            f"{each.data}: {'' if alike else f'{each.verdict}, '}{each.found}" for each in seen
        )
        own = " (our own claim)" if claim.ours and not table.ours else ""
        yield f"- **{whole}**: {claim.says}{own}{f' ({told})' if told else ''}"

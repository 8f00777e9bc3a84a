"""Makes the page ``docs/results/papers.md`` from the study files and the kept results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.papers import shelf
from benchmarks.papers.describe import SCALES, Table
from benchmarks.papers.result import Result, judged, load, markdown
from benchmarks.papers.rules import overall

PAGE = Path(__file__).parents[2] / "docs" / "results" / "papers.md"
_HEAD = """# The papers' tables

**For:** readers who ask what of the papers was run here, and whether it was found.

This page is made by `python -m benchmarks.papers --page` from the study files in
`benchmarks/papers` and from the results in `benchmarks/results/papers`. Do not edit it.

`python -m benchmarks.papers TABLE --data DIR --scale paper|small` runs a table from the files of
its data sets, which [`vfl prepare`](../reference/commands.md) reads; `--list` shows all tables. The
scale `small` is a reduction that each table states: it shows that a table runs, and where an effect
is large; it does not settle tenths of a point. A cell is *paper → **ours** ± standard deviation
over the seeds*; of a data set that stands in place of the paper's there is no number of the paper.
Each claim was written down with its rule before the runs, unless a deviation says otherwise:

- **holds**: found, and at least half as large as in the paper, or as near as the rule says.
- **direction**: the sign is the paper's, but it is smaller, within the noise, or found for only
  some of the data sets.
- **not found**: otherwise.
- **not run**: the data are not at hand, or the product lacks something.

Not among them: tables that describe data sets and settings (FedHSSL I to III and VIII, FedOnce 1 to
3, 5, 9 and 10), which the study files follow; diagrams; SS-VFL's Fig. 2, a picture of densities
without numbers; and the tables of MocoSFL's main part, whose text was not at hand.
"""


def text() -> str:
    """Returns the page."""
    return "\n".join([_HEAD, *_coverage(), *_papers()]).rstrip() + "\n"


def write() -> None:
    PAGE.write_text(text())


def kept(name: str) -> Result | None:
    """Returns the results of the larger scale that was run."""
    return next((found for each in SCALES if (found := load(name, each)) is not None), None)


def _coverage() -> Iterator[str]:
    yield "## Coverage\n"
    yield "| paper | tables and figures | with results | claims | hold | direction | not found |"
    yield "| --- " * 7 + "|"
    for key, paper in shelf.PAPERS.items():
        names = [each for each in shelf.names() if each.startswith(f"{key}.")]
        results = {name: kept(name) for name in names}
        verdicts = [
            overall(findings)
            for name in names
            for _, findings in judged(shelf.load(name), results[name])
        ]
        counts = [verdicts.count(each) for each in ("holds", "direction", "not found")]
        ran = sum(each is not None for each in results.values())
        cells = [f"{paper.name} ({paper.of})", len(names), ran, len(verdicts), *counts]
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""


def _papers() -> Iterator[str]:
    for key, paper in shelf.PAPERS.items():
        yield f"## {paper.name}\n"
        for name in shelf.names():
            if name.startswith(f"{key}."):
                yield section(name, shelf.load(name), kept(name), level=3)
                yield ""


def section(name: str, table: Table, result: Result | None, level: int = 1) -> str:
    """Returns what the page says of a table."""
    paper = shelf.PAPERS[name.partition(".")[0]].name
    lines = [f"{'#' * level} {paper}, {table.place}: {table.title}\n"]
    lines.append(f"`{name}`; the paper's numbers: {table.source}. {_run(table, result)}\n")
    lines += [markdown(table, result)]
    lines += [f"- Deviation: {note}" for note in table.notes]
    if result is not None:
        told = {
            note: [d for d, own in result.notes.items() if note in own]
            for each in result.notes.values()
            for note in each
        }
        lines += [f"- Data ({', '.join(data)}): {note}" for note, data in told.items()]
        lines += [f"- Not run: {what}." for what in _reasons(result)]
    elif table.needs:
        lines.append(f"- Not run: it needs {table.needs}.")
    return "\n".join(lines)


def _run(table: Table, result: Result | None) -> str:
    if result is None:
        return "Not run yet."
    how = f"Scale `{result.scale}`"
    if result.scale == "small":
        how += f" ({table.small})"
    seeds = f"{len(result.seeds)} seeds" if len(result.seeds) > 1 else "1 seed"
    return (
        f"{how}, {seeds}, {result.day}, {result.seconds / 60:.1f} minutes of runs on "
        f"{result.cores} cores."
    )


def _reasons(result: Result) -> Iterator[str]:
    """Yields what was not run: data sets that are absent together, lines with their reasons."""
    if result.absent:
        yield f"the data of {', '.join(result.absent)} are not at hand"
    for line, why in result.left_out.items():
        yield f"{line}: {why.partition(' (')[0]}"

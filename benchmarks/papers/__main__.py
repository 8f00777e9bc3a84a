"""Runs tables and figures of the papers, and shows them beside the papers' numbers.

A TABLE is a name as --list shows it, or a paper (fedhssl, fedonce, ssvfl, mocosfl); without any,
all are run whose data are there. The data sets are the files as their makers distribute them, as
`vfl prepare --list` names them. A command that was stopped or killed goes on where it was: finished
runs are not repeated.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import click
from rich.console import Console
from rich.markdown import Markdown

from benchmarks.papers import definition, page, shelf
from benchmarks.papers.data import Sources
from benchmarks.papers.describe import SCALES, Scale, resolved
from benchmarks.papers.forecast import forecast
from benchmarks.papers.listing import listing
from benchmarks.papers.result import Result, load, markdown, result_of
from benchmarks.papers.run import Runner


@click.command(help=__doc__)
@click.argument("tables", nargs=-1, metavar="[TABLE]...")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder with the data sets.",
)
@click.option(
    "--scale",
    type=click.Choice(SCALES),
    default="small",
    show_default=True,
    help="The paper's settings, or a stated reduction.",
)
@click.option("--list", "only_list", is_flag=True, help="List the tables; run nothing.")
@click.option(
    "--jobs",
    default=max(1, (os.cpu_count() or 1) // 2),
    show_default=True,
    type=click.IntRange(1),
    help="Runs at a time, each in a process of its own.",
)
@click.option("--backend", help="A backend of joblib that makes the runs, such as loky or dask.")
@click.option(
    "--out",
    default="runs/papers",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of runs and of prepared data.",
)
@click.option("--seeds", help="Seeds in place of the table's, with commas between.")
@click.option(
    "--results",
    default="runs/papers/results",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of results.",
)
@click.option(
    "--forecast",
    "only_forecast",
    is_flag=True,
    help="Measure two short runs of each data set, and print how long the tables take.",
)
@click.option(
    "--freeze", is_flag=True, help="Write today's date beside the claims that were changed."
)
@click.option(
    "--page", "only_page", is_flag=True, help="Write the pages results/papers/PAPER.md again."
)
def main(
    tables: tuple[str, ...],
    data: Path | None,
    scale: str,
    only_list: bool,
    jobs: int,
    backend: str | None,
    out: Path,
    seeds: str | None,
    results: Path,
    only_forecast: bool,
    freeze: bool,
    only_page: bool,
) -> None:
    console, of_scale = Console(width=160), cast(Scale, scale)
    names = shelf.chosen(tables)
    if only_list:
        console.print(listing(names, of_scale, data, results))
        return
    if freeze:
        console.print("changed: " + (", ".join(definition.freeze()) or "none"), highlight=False)
        return
    if only_page:
        page.write()
        return
    if data is None:
        raise click.UsageError("give --data DIR, the folder with the data sets, or --list")
    runner = Runner(
        of_scale,
        Sources(data, out / "data"),
        out,
        jobs,
        lambda text: console.print(text),
        backend,
    )
    for name in names:
        table = shelf.load(name)
        if only_forecast:
            if table.compute is None:
                for of, seconds in forecast(name, table, runner):
                    console.print(f"{name}: {of}: {seconds / 3600:.1f} h", highlight=False)
            continue
        wanted = (
            [int(each) for each in seeds.split(",")] if seeds else resolved(table.seeds, of_scale)
        )
        console.print(f"{name}: {table.place}, {table.title}", highlight=False)
        filled = runner.fill(table.runs_of or name, table, wanted)
        found = result_of(name, table, of_scale, wanted, filled)
        for what, why in {**found.absent, **found.left_out}.items():
            console.print(f"not run: {what}: {why}", highlight=False, markup=False)
        before = load(name, of_scale, results)
        if before is not None and before.is_current(table) and not covers(found, before):
            folder = results / "partial"
            console.print(
                f"{name}: some cells of {results} are missing from this run. It is kept in {folder}.",
                highlight=False,
            )
        else:
            folder = results
        if found.values:
            found.save(folder)
            console.print(Markdown(markdown(table, found)))


def covers(new: Result, old: Result) -> bool:
    """Returns whether a result has every value of an older one, so that it may replace it."""
    return all(len(new.values.get(place, ())) >= len(each) for place, each in old.values.items())


if __name__ == "__main__":
    main()

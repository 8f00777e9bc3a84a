"""The command ``vfl prepare``, which makes tables and a recipe from a paper's data set."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import LINE, clean

if TYPE_CHECKING:
    from rich.table import Table

    from vfl_papers.dataset import DataSet
    from vfl_papers.making import Progress
    from vfl_papers.prepare import PreparedData


@click.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Read the official files from this folder.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write to this folder, empty or missing. [default: NAME]",
)
@click.option(
    "--parties", type=click.IntRange(1), help="Set the number of parties. [default: as the paper]"
)
@click.option(
    "--rows",
    type=click.IntRange(1),
    help="Draw this many rows, with the same share of each class. [default: all]",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--paper", metavar="PAPER", help="Use the division and recipe of PAPER. [default: the first]"
)
@click.option(
    "--divide", metavar="HOW", help="Choose a division of the list. [default: as the paper]"
)
@click.option(
    "--deal",
    metavar="HOW",
    help="Deal rows to clients: even, classes:2 or dirichlet:0.5. [default: as the paper]",
)
@click.option(
    "--active",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Choose the number of the party with the labels.",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1, max_open=True),
    help="Set the share of training rows for validation. [default: as the paper]",
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a setting of the data set."
)
@click.option("--replace", is_flag=True, help="Remove the files of an earlier call in DIR.")
@click.option(
    "--list", "as_list", is_flag=True, help="List the data sets; with NAME, describe one."
)
def prepare(
    name: str | None,
    source: Path | None,
    out: Path | None,
    sets: tuple[str, ...],
    as_list: bool,
    **options: Any,
) -> None:
    """Make parties' tables and a recipe from a paper's data set.

    NAME is a data set of `vfl prepare --list`, and DIR the folder with its official files, packed
    or not. Nothing is downloaded. The command compares names, sizes and numbers of rows with the
    published values. It prints the differences, and writes them into PREPARED.md next to the
    recipe.

    \b
    Examples:
      vfl prepare --list
      vfl prepare mnist --from downloads --out mnist
      vfl prepare cifar10 --from downloads --out clients --paper mocosfl --parties 20
      vfl simulate mnist/recipe.toml
    """
    from vfl.summary.table import wide_console

    if as_list or name is None:
        if name is None:
            wide_console(160).print(make_listing())
        else:
            click.echo("\n".join(describe(name)))
        return
    if source is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--from: is missing. Give the folder of the files that `vfl prepare {name} --list` "
            "prints.",
        )
    from vfl_papers.prepare import prepare as run

    settings = _parse_settings(sets)
    with _show_progress() as progress, _name_options(settings):
        result = run(name, source, out or Path(name), progress=progress, **options, **settings)
    _print_result(result)


@contextmanager
def _name_options(settings: Mapping[str, Any]) -> Iterator[None]:
    """Replaces names of arguments in error messages by names of options."""
    options = {param.name: f"--{param.name}" for param in prepare.params}
    options |= {key: f"--set {key}" for key in settings}
    try:
        yield
    except InputError as error:
        name, _, problem = str(error).partition(":")
        if name not in options:
            raise
        problem = re.sub(r"\bdivide = (\w+)", r"--divide \1", problem)
        raise InputError(error.code, options[name] + ":" + problem) from None


@contextmanager
def _show_progress() -> Iterator[Progress | None]:
    """Shows a progress bar of the written rows, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _parse_settings(sets: tuple[str, ...]) -> dict[str, Any]:
    """Parses the values of ``--set``, each as TOML or otherwise as text. Raises InputError."""
    import tomllib

    settings: dict[str, Any] = {}
    for pair in sets:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise InputError(
                Code.CONFIG_INVALID, f"--set: must be KEY=VALUE (got {pair!r}). Correct it."
            )
        try:
            settings[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            settings[key] = text
    return settings


def _print_result(result: PreparedData) -> None:
    from vfl.summary.table import format_size, new_table, wide_console

    table = new_table(f"Written into {result.recipe.parent}")
    for heading in ("party", "table", "rows", "features", "size"):
        table.add_column(heading, justify="left" if heading in ("party", "table") else "right")
    # There may be a thousand clients, so only the first 20 are printed.
    for part in result.written[:20]:
        table.add_row(
            part.name, part.path.name, f"{part.rows:,}", part.features, format_size(part.bytes)
        )
    wide_console().print(table)
    if len(result.written) > 20:
        click.echo(f"and {len(result.written) - 20} more")
    for note in result.notes:
        click.echo(clean(note, LINE), err=True)
    click.echo(f"Next: vfl simulate {result.recipe}")


def make_listing() -> Table:
    """Returns a table of all data sets."""
    from vfl.summary.table import new_table
    from vfl_papers.prepare import REGISTRY, load

    table = new_table("Data sets of `vfl prepare`")
    for heading in ("name", "rows", "size", "needs", "used by"):
        table.add_column(heading, justify="right" if heading in ("rows", "size") else "left")
    for name in REGISTRY.names():
        table.add_row(*_make_row(name, load(name)))
    return table


def describe(name: str) -> Iterable[str]:
    """Yields the description of a data set, line by line. Raises InputError."""
    from vfl_papers.prepare import load

    dataset = load(name)
    yield f"{dataset.title}: {dataset.rows:,} rows, {dataset.holds}."
    yield f"Published by {dataset.publisher}."
    for place, form in enumerate(dataset.forms):
        names = [f"{need.name}{' (optional)' if need.optional else ''}" for need in form.needs]
        unofficial = f", not the official files but {form.unofficial}" if form.unofficial else ""
        yield f"{'or' if place else 'Needs'}: {', '.join(names)}{unofficial}"
    for use in dataset.uses:
        says = dataset.divisions[use.division].says
        yield f"{use.paper} ({use.where}): {use.parties} parties, {says}. {use.silent}".strip()
    for key, division in dataset.divisions.items():
        yield f"--divide {key}: {division.says}"
    for key, (default, says) in dataset.options.items():
        yield f"--set {key}=…: {says}{f' [default: {default}]' if default != '' else ''}"
    yield f"Preparing it needs {dataset.memory} of memory, in addition to the program's own."


def _make_row(name: str, dataset: DataSet) -> tuple[str, str, str, str, str]:
    from vfl.summary.table import format_size

    needs = [need.name for need in dataset.forms[0].needs if not need.optional]
    total = format_size(dataset.bytes) if dataset.bytes is not None else "–"
    uses = [f"{use.paper} {use.where}" for use in dataset.uses]
    return name, f"{dataset.rows:,}", total, "\n".join(needs), "\n".join(uses)

"""``vfl prepare``: a paper's data set, from its official files to tables and a recipe."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import LINE, clean

if TYPE_CHECKING:
    from vfl.preparing.making import Progress
    from vfl.preparing.prepare import PreparedData


@click.command(epilog=EXIT_CODES)
@click.argument("name", required=False)
@click.option(
    "--from",
    "source",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The folder of the official files.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="The folder to write, which must be empty or missing. [default: NAME]",
)
@click.option("--parties", type=click.IntRange(1), help="Parties. [default: as the paper]")
@click.option(
    "--rows",
    type=click.IntRange(1),
    help="Take so many rows, with the whole's share of each class. [default: all]",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--paper", metavar="PAPER", help="Whose division and recipe. [default: the first]")
@click.option("--divide", metavar="HOW", help="Divide otherwise than the paper does.")
@click.option(
    "--deal",
    metavar="HOW",
    help="Deal whole rows to clients: even, classes:2 or dirichlet:0.5. [default: as the paper]",
)
@click.option(
    "--active",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="The number of the party that has the labels.",
)
@click.option(
    "--validation",
    type=click.FloatRange(0, 1, max_open=True),
    help="Set a share of the training rows apart for validation. [default: as the paper]",
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="A setting of the data set's own."
)
@click.option("--replace", is_flag=True, help="Remove what an earlier call has written into DIR.")
@click.option(
    "--list", "as_list", is_flag=True, help="List the data sets; with NAME, describe one."
)
def prepare(
    name: str | None,
    source: Path | None,
    out: Path | None,
    sets: tuple[str, ...],
    as_list: bool,
    **given: Any,
) -> None:
    """Make the parties' tables and a recipe from the official files of a paper's data set.

    NAME is a data set of `vfl prepare --list`, and DIR the folder in which its files lie as its
    makers publish them, packed or not. Nothing is downloaded. Names, sizes and numbers of rows are
    compared with what is published. What differs is printed, and written into PREPARED.md beside
    the recipe.

    \b
    Examples:
      vfl prepare --list
      vfl prepare mnist --from downloads --out mnist
      vfl prepare cifar10 --from downloads --out clients --paper mocosfl --deal classes:2 --parties 20
      vfl simulate mnist/recipe.toml
    """  # noqa: E501
    from vfl.preparing.listing import described, listing
    from vfl.report.table import wide_console

    if as_list or name is None:
        if name is None:
            wide_console(160).print(listing())
        else:
            click.echo("\n".join(described(name)))
        return
    if source is None:
        text = (
            f"--from: missing; give the folder of the files that `vfl prepare {name} --list` names"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    from vfl.preparing.prepare import prepare as prepared

    settings = _settings(sets)
    with _progress() as progress, _as_options(settings):
        found = prepared(name, source, out or Path(name), progress=progress, **given, **settings)
    _tell(found)


@contextmanager
def _as_options(settings: Mapping[str, Any]) -> Iterator[None]:
    """Names options in errors: the function's own messages name its arguments. ``settings``: those
    of ``--set``.
    """
    options = {each.name: f"--{each.name}" for each in prepare.params}
    options |= {key: f"--set {key}" for key in settings}
    try:
        yield
    except InputError as error:
        name, _, says = str(error).partition(":")
        if name not in options:
            raise
        says = re.sub(r"\bdivide = (\w+)", r"--divide \1", says)
        raise InputError(error.code, f"{options[name]}:{says}") from None


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Shows rows that are written, if a person is there to see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("rows", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _settings(sets: tuple[str, ...]) -> dict[str, Any]:
    """Returns the settings of ``--set``: a value is TOML or plain text. Raises InputError."""
    import tomllib

    found: dict[str, Any] = {}
    for each in sets:
        key, equals, text = each.partition("=")
        if not (key and equals):
            raise InputError(Code.CONFIG_INVALID, f"--set: give KEY=VALUE, and not {each!r}")
        try:
            found[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = text
    return found


def _tell(found: PreparedData) -> None:
    from vfl.report.table import new_table, size, wide_console

    table = new_table(f"Written into {found.recipe.parent}")
    for heading in ("party", "table", "rows", "features", "size"):
        table.add_column(heading, justify="left" if heading in ("party", "table") else "right")
    # Of a thousand clients the first ones are enough.
    for each in found.written[:20]:
        table.add_row(each.name, each.path.name, f"{each.rows:,}", each.features, size(each.bytes))
    wide_console().print(table)
    if len(found.written) > 20:
        click.echo(f"and {len(found.written) - 20} more")
    for note in found.notes:
        click.echo(clean(note, LINE), err=True)
    click.echo(f"Next: vfl simulate {found.recipe}")

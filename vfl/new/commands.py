"""``vfl new``: writes a recipe and party files from the parties' own tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from vfl.new.options import Flags

_data = click.option(
    "--data",
    metavar="FILE",
    help="Read this table: a file, folder, database URL or duckdb:SELECT ….",
)
_id = click.option(
    "--id",
    "id_",
    multiple=True,
    metavar="COLUMN",
    help="Use this column as the id; repeat for a joint id.",
)
_drop = click.option(
    "--drop", multiple=True, metavar="COLUMN", help="Leave this column out; repeat for more."
)
_set = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set a key of [data] that controls how the table is read.",
)
_server = click.option(
    "--server",
    metavar="HOST:PORT",
    help="Connect to the server at this address. [default: this machine]",
)
_advertise = click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Set the active party's address for the other parties.",
)
_out = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default="this folder",
    help="Write the files to this folder.",
)
_force = click.option("--force", is_flag=True, help="Replace existing files.")


def _add_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that both commands have, and passes their values as ``options.Flags``."""

    @functools.wraps(command)
    def with_flags(
        data: str | None,
        id_: tuple[str, ...],
        label: str | None,
        drop: tuple[str, ...],
        server: str | None,
        advertise: str | None,
        out: Path,
        force: bool,
        sets: tuple[str, ...],
        **own: Any,
    ) -> None:
        from vfl.new.options import Flags

        command(Flags(data, id_, label, drop, server, advertise, out, force, sets), **own)

    result: Callable[..., None] = with_flags
    for option in (_force, _out, _advertise, _server, _drop, _id, _set, _data):
        result = option(result)
    return result


@click.group()
def new() -> None:
    """Write a recipe and party files from your own tables.

    The active party, which has the label, writes the recipe and sends it to the other parties. Each
    of them writes its party file from the recipe. Every guess is printed, with the key or the
    option that changes it. At a terminal, the commands ask for missing values.

    \b
      vfl new recipe --data bank.csv --active bank --passive shop --label default     at the bank
      vfl new party --recipe recipe.toml --data shop.csv --name shop                  at the shop
    """


@new.command()
@_add_options
@click.option(
    "--active",
    metavar="NAME",
    help="Set your own name in the recipe. [default: the table's name]",
)
@click.option(
    "--passive", "passives", multiple=True, metavar="NAME", help="Add a party; repeat for each."
)
@click.option("--label", metavar="COLUMN", help="Predict this column.")
@click.option(
    "--task",
    type=click.Choice(["binary", "multiclass", "regression"]),
    help="Set the task. [default: by the label's values]",
)
@click.option(
    "--positive",
    metavar="VALUE",
    help="Set the positive class of two classes. [default: the second]",
)
@click.option(
    "--align",
    type=click.Choice(["psi", "digest"]),
    default="psi",
    show_default=True,
    help="Align by private set intersection, or require equal ids.",
)
@click.option(
    "--method",
    type=click.Choice(["splitnn", "secureboost"]),
    default="splitnn",
    show_default=True,
    help="Train networks, or trees on encrypted gradients.",
)
@click.option(
    "--protect",
    type=click.Choice(["none", "labels", "columns", "both"]),
    help="Protect these with splitnn. [default: labels for classes, none for regression]",
)
def recipe(
    flags: Flags,
    active: str | None,
    passives: tuple[str, ...],
    task: str | None,
    positive: str | None,
    align: str,
    method: Literal["splitnn", "secureboost"],
    protect: Literal["none", "labels", "columns", "both"] | None,
) -> None:
    """Write recipe.toml and the active party's file.

    With --align psi, the parties find their common rows. With --align digest, they must hold the
    same ids. With --protect labels, no message depends on labels: the other parties upload once,
    and the active party trains trees on the uploads. --protect columns uses narrow, randomised
    embeddings. --protect both uses a narrow upload. The recipe states the cost of each choice.
    --method secureboost accepts missing cells.

    A table is a CSV or text file (.csv, .tsv, .txt, each also .gz), Excel (.xlsx, .xlsm), Parquet
    (.parquet), a folder of such files, the URL of a database with --set query="SELECT …", or
    duckdb:SELECT …. --set takes a key of [data] that says how the table is read, once for each key:
    sheet, query, format, names, separator, encoding, skip_lines, decimal, thousands, dates, na,
    categorical, categorical_buckets, numeric, limit, limit_by, memory_mib or scratch. A value is
    TOML or plain text.

    \b
    Examples:
      vfl new recipe --data bank.csv --active bank --passive shop --label default
      vfl new recipe --data bank.csv --passive shop --label default --method secureboost      trees, not networks
    """  # noqa: E501
    from vfl.new.flow import RecipeFlags, new_recipe

    new_recipe(flags, RecipeFlags(active, passives, task, align, positive, method, protect))


@new.command()
@_add_options
@click.option(
    "--recipe",
    "recipe_path",
    type=click.Path(path_type=Path),
    default=Path("recipe.toml"),
    show_default=True,
    help="Read the recipe of the active party.",
)
@click.option(
    "--name",
    metavar="NAME",
    help="Set your own name in the recipe. [default: the only passive party]",
)
@click.option("--label", metavar="COLUMN", help="Predict this column (active party only).")
def party(
    flags: Flags,
    recipe_path: Path,
    name: str | None,
) -> None:
    """Write a party's file for an existing recipe.

    The command prints the recipe's digest. Compare it with the other parties, for example by
    telephone: it must be the same.

    A table is a CSV or text file (.csv, .tsv, .txt, each also .gz), Excel (.xlsx, .xlsm), Parquet
    (.parquet), a folder of such files, the URL of a database with --set query="SELECT …", or
    duckdb:SELECT …. --set takes a key of [data] that says how the table is read, once for each key:
    sheet, query, format, names, separator, encoding, skip_lines, decimal, thousands, dates, na,
    categorical, categorical_buckets, numeric, limit, limit_by, memory_mib or scratch. A value is
    TOML or plain text.

    \b
    Example:
      vfl new party --recipe recipe.toml --data shop.csv --name shop --id customer
    """
    from vfl.new.flow import new_party

    new_party(flags, recipe_path, name)

"""``vfl new``: writes a recipe and party files from the parties' own tables."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

if TYPE_CHECKING:
    from vfl.new.flow import Given

_data = click.option(
    "--data",
    metavar="FILE",
    help=(
        "Your table: a CSV or text file (.csv, .tsv, .txt, each also .gz), Excel (.xlsx, "
        ".xlsm), .parquet or a folder"
        ' of such files, the URL of a database, with --set query="SELECT …", or duckdb:SELECT ….'
    ),
)
_id = click.option(
    "--id",
    "id_",
    multiple=True,
    metavar="COLUMN",
    help="Says who a row is about; several are one id.",
)
_drop = click.option("--drop", multiple=True, metavar="COLUMN", help="A column to leave out.")
_set = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="How the table is read: sheet, query, format, names, separator, encoding, skip_lines, "
    "decimal, thousands, dates, na, categorical, categorical_buckets, numeric, limit, limit_by, "
    "memory_mib or scratch, as in [data] of a party file; once for each key. A "
    "value is TOML or plain text.",
)
_server = click.option(
    "--server", metavar="HOST:PORT", help="Where the server will listen. [default: this machine]"
)
_advertise = click.option(
    "--advertise",
    metavar="HOST:PORT",
    help="Active party: where the others reach it, if not on this machine.",
)
_out = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    show_default="this folder",
    help="Folder for the files.",
)
_force = click.option("--force", is_flag=True, help="Replace existing files.")


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of both commands, in this order, and gives their values as one:
    ``flow.Given``.
    """

    @functools.wraps(command)
    def with_given(
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
        from vfl.new.flow import Given

        command(Given(data, id_, label, drop, server, advertise, out, force, sets), **own)

    found: Callable[..., None] = with_given
    for option in (_force, _out, _advertise, _server, _drop, _id, _set, _data):
        found = option(found)
    return found


@click.group()
def new() -> None:
    """Write a recipe and party files from your own tables.

    The active party, which knows the label, writes the recipe and sends it to the others; each of
    them writes its party file with it. What was guessed is printed, a line each, with the key or
    the flag that changes it. At a terminal, what is missing is asked.

    \b
      vfl new recipe --data bank.csv --active bank --passive shop --label default     at the bank
      vfl new party --recipe recipe.toml --data shop.csv --name shop                  at the shop
    """


@new.command()
@_shared
@click.option(
    "--active", metavar="NAME", help="Your own name in the recipe. [default: the table's]"
)
@click.option(
    "--passive", "passives", multiple=True, metavar="NAME", help="Another party; once for each."
)
@click.option("--label", metavar="COLUMN", help="The column to predict.")
@click.option(
    "--task",
    type=click.Choice(["binary", "multiclass", "regression"]),
    help="[default: by the label's values]",
)
@click.option(
    "--positive",
    metavar="VALUE",
    help="Of two classes, the one that scores, AUC and f1 are of. [default: the second]",
)
@click.option(
    "--align",
    type=click.Choice(["psi", "digest"]),
    default="psi",
    show_default=True,
    help="psi: find the rows that all parties hold; digest: they hold the same ids already.",
)
@click.option(
    "--method",
    type=click.Choice(["splitnn", "secureboost"]),
    default="splitnn",
    show_default=True,
    help="splitnn: as --protect says; secureboost: grow trees on encrypted gradients, which take "
    "missing cells as they are.",
)
@click.option(
    "--protect",
    type=click.Choice(["none", "labels", "columns", "both"]),
    help="splitnn: what is made harder to read, at a price that the recipe tells. labels: no "
    "message depends on labels, because the others upload once and trees grow on that; columns: "
    "narrow embeddings that are drawn; both: a narrow upload. [default: labels for classes, none "
    "for a regression]",
)
def recipe(
    given: Given,
    active: str | None,
    passives: tuple[str, ...],
    task: str | None,
    positive: str | None,
    align: str,
    method: Literal["splitnn", "secureboost"],
    protect: Literal["none", "labels", "columns", "both"] | None,
) -> None:
    """Write recipe.toml, for all parties, and the active party's own file NAME.toml.

    \b
    Examples:
      vfl new recipe --data bank.csv --active bank --passive shop --label default
      vfl new recipe --data bank.csv --passive shop --label default --method secureboost      trees, not networks
    """  # noqa: E501
    from vfl.new.flow import Wishes, new_recipe

    new_recipe(given, Wishes(active, passives, task, align, positive, method, protect))


@new.command()
@_shared
@click.option(
    "--recipe",
    "recipe_path",
    type=click.Path(path_type=Path),
    default=Path("recipe.toml"),
    show_default=True,
    help="The recipe that the active party has sent.",
)
@click.option(
    "--name", metavar="NAME", help="Your own name in the recipe. [default: the only passive one]"
)
@click.option("--label", metavar="COLUMN", help="Active party: the column to predict.")
def party(
    given: Given,
    recipe_path: Path,
    name: str | None,
) -> None:
    """Write the file NAME.toml of a party of an existing recipe, and print the recipe's digest.

    The digest is the same at every party: compare it on the telephone.

    \b
    Example:
      vfl new party --recipe recipe.toml --data shop.csv --name shop --id customer
    """
    from vfl.new.flow import new_party

    new_party(given, recipe_path, name)

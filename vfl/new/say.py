"""Prints each guess, with the key of a file or the option that changes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from vfl.new.files import LABEL_FREE, MEASURED, TREES, Chosen, describe_leakage_with_units
from vfl.new.look import Look
from vfl.new.options import find_flags
from vfl.new.rules import Counts, Kind, ModelSizes
from vfl_common.config.recipe import Recipe
from vfl_common.text import LINE, clean, format_percent, host_and_port, list_names, make_printable
from vfl_party.data.ids import ASK, about_zeros

_WIDTH = 12
# Below this share of rows with a unique id, the id is doubtful.
_FEW_KEPT = 0.8
# The maximum loss of a method, in points, that still counts as equally good.
_AS_GOOD = 1.0
# The maximum length of a label's value, in characters.
_MAX_CHARS = 40


def say(about: str, text: str, change: str = "") -> None:
    """Prints one line. ``change``: the key or option that changes the guess."""
    click.echo(f"{about:<{_WIDTH}}{clean(text, LINE)}{f'  ({change})' if change else ''}")


def say_table(table: Look, id_: tuple[str, ...], path: Path, *, classes: bool, trees: bool) -> None:
    """Prints the contents of a table.

    ``path``: the party file. ``classes``: whether the label has classes. ``trees``: whether the
    recipe grows trees.
    """
    for note in table.notes:
        say("table", note, ", ".join(find_flags(note)))
    for text in (*table.odd, *(table.label_leaks if classes else ())):
        say("look at", text, ", ".join(find_flags(text)))
    labelled = table.all_rows - table.unlabelled
    if table.rows < _FEW_KEPT * labelled:
        say(
            "look at",
            f"only {table.rows:,} of {labelled:,} rows ({format_percent(table.rows, labelled)}) "
            "have a unique id, and the others are left out; is this the id?",
            "--id",
        )
    say("id", f"{list_names(list(map(repr, id_)))}, of {table.rows:,} rows", "--id")
    if table.left_out:
        first = "; of rows with the same id the first stays" if table.repeated else ""
        keys = [
            *(["data.duplicates"] if table.repeated else []),
            *(["data.unlabelled"] if table.unlabelled else []),
        ]
        say("rows", f"{table.left_out}{first}", f"{', '.join(keys) or 'data.id'} in {path}")
    if table.numbers:
        say(
            "numbers",
            list_names(list(map(make_printable, table.numbers))),
            f"data.categorical in {path}",
        )
    if table.categories:
        say(
            "categories",
            list_names(list(map(make_printable, table.categories))),
            f"data.numeric in {path}",
        )
    for name, why in table.drop.items():
        say("left out", f"{make_printable(name)}: {why}", f"data.drop in {path}")
    if trees and (table.missing or table.blank):
        where = list_names(list(map(make_printable, (*table.missing, *table.blank))))
        say("missing", f"{where}, in some rows; trees accept empty cells")
    elif table.missing:
        where = list_names(list(map(make_printable, table.missing)))
        say(
            "missing",
            f"{where}, in some rows; replaced by the column's mean",
            f"data.missing in {path}",
        )


def say_id_advice(table: Look, id_rules: Sequence[str]) -> None:
    """Prints what to compare with the other parties, so that equal ids are written the same way."""
    say("ids", ASK)
    zeros = about_zeros(table.ids, id_rules)
    if zeros:
        say("ids", zeros)


def say_recipe(recipe: Recipe, label: str, table: Look, path: Path) -> None:
    """Prints the task and the rows of the recipe in the file ``path``."""
    task, rows = recipe.task, recipe.rows
    several = f" with {task.classes} classes" if task.classes is not None else ""
    text = f"{label!r} has {len(table.labels):,} different values: {task.kind}{several}"
    if task.kind == "binary":
        positive = (
            _describe_positive(table.labels)
            if task.positive is None
            else f"{_shorten(task.positive)}, as you say"
        )
        text = f"{label!r} is binary; scores, AUC and f1 are of {positive}"
    change = "--positive, or task.positive" if task.kind == "binary" else "--task, or task.kind"
    say("label", text, f"{change} in {path}")
    if rows.align == "psi":
        text = f"the parties find their common rows; fewer than {rows.at_least} end the run"
        say("alignment", text, f"rows.align, rows.at_least in {path}")
    else:
        say("alignment", "all parties must hold the same ids", f"rows.align in {path}")


def say_training(sizes: ModelSizes, table: Look, path: Path) -> None:
    """Prints the training of networks of the recipe in the file ``path``."""
    model = f"{sizes.hidden} hidden units, embeddings of {sizes.embedding_size} numbers"
    training = (
        f"for {table.rows:,} rows: batches of {sizes.batch_size}, at most {sizes.epochs} epochs"
    )
    say("model", model, f"[model] in {path}; trees: --method secureboost")
    say("training", training, f"[[phases]] in {path}")


def say_uploads(recipe: Recipe, path: Path) -> None:
    """Prints the training of trees on uploads of the recipe in the file ``path``."""
    width = recipe.model.embedding_size
    text = f"the other parties upload at most {width} numbers a row, once, computed without labels"
    say("model", text, f"[model] in {path}; networks: --protect none")
    text = f"trees on these and your own columns, at most {TREES['trees']} rounds"
    say("training", text, f"[model.top] in {path}")


def say_leaks(kind: Kind, chosen: Chosen, path: Path) -> None:
    """Prints the measured leakage of the chosen training, and whether encrypted trees would leak
    less.
    """
    leakage = describe_leakage_with_units(kind, chosen)
    leaks = f"{leakage}, in rehearsals on public tables; yours: vfl leaks"
    say("leaks", leaks, f"--protect; all presets in {path}")
    measured, trees = MEASURED[kind].get(chosen), MEASURED[kind]["trees"]
    # The messages of encrypted trees depend on labels, so they are no alternative to label-free
    # training.
    if chosen in LABEL_FREE or measured is None:
        return
    if trees.lost - measured.lost <= _AS_GOOD and trees.columns < measured.columns:
        labels = "but more" if trees.shows_more_labels(measured) else "and less"
        say(
            "consider",
            f"trees were as good there, and leaked less of the columns {labels} of the labels: "
            f"{describe_leakage_with_units(kind, 'trees')}",
            "--method secureboost",
        )


def say_trees(recipe: Recipe, table: Look, path: Path) -> None:
    """Prints the training of trees of the recipe in the file ``path``."""
    settings = recipe.phases[0].settings
    trees = "one tree for each class" if recipe.task.kind == "multiclass" else "one tree"
    say(
        "training",
        f"for {table.rows:,} rows: at most {settings['trees']} rounds of {trees}, of depth "
        f"{settings['depth']}",
        f"[[phases]] in {path}",
    )
    say(
        "encryption",
        'of gradients, by Paillier; "ou" is about ten times as fast, and needs HEU at all parties',
        f"encryption in {path}",
    )


def _describe_positive(labels: Counts) -> str:
    """Describes the default positive class of a binary label: the second value in the order of
    ``vfl_party.data.inputs.labels``.
    """
    # The values are all numbers, or all text.
    first, second = sorted(labels)
    if not isinstance(second, str) or not isinstance(first, str):
        return f"{second:g}, the larger number"
    capitals = ", capitals first" if second.casefold() < first.casefold() else ""
    return f"{_shorten(second)}, the second in alphabetical order{capitals}"


def _shorten(value: object) -> str:
    """Formats a class for a sentence. Text is put into quotes, and shortened."""
    long = isinstance(value, str) and len(value) > _MAX_CHARS
    return repr(f"{str(value)[:_MAX_CHARS]}…" if long else value)


def say_addresses(server: str, advertise: str | None, path: Path) -> None:
    """Prints the server's address and, for the active party, the address for the other parties."""
    say("server", f"{server}{' on this machine' if is_here(server) else ''}", f"server in {path}")
    if advertise is not None:
        say(
            "listens",
            f"on all addresses; the other parties connect to {advertise}",
            f"listen, advertise in {path}",
        )


def format_digest(recipe: Recipe) -> str:
    """Formats a recipe's digest as `vfl-party check` does."""
    return f"digest {recipe.digest()} (the same at every party)"


def is_here(address: str) -> bool:
    """Returns whether an address is on this machine."""
    host = host_and_port(address)[0]
    return host in ("localhost", "::1") or host.startswith("127.")

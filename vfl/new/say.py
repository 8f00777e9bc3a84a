"""Says what was guessed, a line each, with the key of a file or the flag that changes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from vfl.new.look import Look
from vfl.new.protect import LABEL_FREE, MEASURED, TREES, Chosen, in_units
from vfl.new.rules import Counts, Kind, ModelSizes
from vfl.new.settings import flags_of
from vfl_common.config.recipe import Recipe
from vfl_common.text import LINE, clean, host_and_port, listed, percent, printable
from vfl_party.data.ids import ASK, about_zeros

_WIDTH = 12
# The share of the rows below which an id is doubtful.
_FEW_KEPT = 0.8
# Points that a method may cost and still be as good.
_AS_GOOD = 1.0
# Characters of a label's value.
_LONGEST = 40


def say(about: str, text: str, change: str = "") -> None:
    """Says one thing; ``change``: the key or flag that changes it."""
    click.echo(f"{about:<{_WIDTH}}{clean(text, LINE)}{f'  ({change})' if change else ''}")


def say_table(found: Look, id_: tuple[str, ...], path: Path, *, classes: bool, trees: bool) -> None:
    """Says what a table shows.

    ``path``: the party file; ``classes``: whether the label is of classes; ``trees``: whether the
    recipe grows trees.
    """
    for note in found.notes:
        say("table", note, ", ".join(flags_of(note)))
    for text in (*found.odd, *(found.told if classes else ())):
        say("look at", text, ", ".join(flags_of(text)))
    labelled = found.all_rows - found.unlabelled
    if found.rows < _FEW_KEPT * labelled:
        what = f"{found.rows:,} of {labelled:,} rows ({percent(found.rows, labelled)})"
        say(
            "look at",
            f"only {what} have an id of their own, and the others are left out; is this the id?",
            "--id",
        )
    say("id", f"{listed(list(map(repr, id_)))}, of {found.rows:,} rows", "--id")
    if found.left_out:
        first = "; of rows that share an id the first stays" if found.repeated else ""
        keys = [
            *(["data.duplicates"] if found.repeated else []),
            *(["data.unlabelled"] if found.unlabelled else []),
        ]
        say("rows", f"{found.left_out}{first}", f"{', '.join(keys) or 'data.id'} in {path}")
    if found.numbers:
        say("numbers", listed(list(map(printable, found.numbers))), f"data.categorical in {path}")
    if found.categories:
        say("categories", listed(list(map(printable, found.categories))), f"data.numeric in {path}")
    for name, why in found.drop.items():
        say("left out", f"{printable(name)}: {why}", f"data.drop in {path}")
    if trees and (found.missing or found.blank):
        where = listed(list(map(printable, (*found.missing, *found.blank))))
        say("missing", f"{where}, in some rows; trees take empty cells as they are")
    elif found.missing:
        where = listed(list(map(printable, found.missing)))
        say(
            "missing",
            f"{where}, in some rows; the column's mean takes their place",
            f"data.missing in {path}",
        )


def say_alike(found: Look, id_rules: Sequence[str]) -> None:
    """Says what must be compared with the other parties before their ids fit together."""
    say("ids", ASK)
    zeros = about_zeros(found.ids, id_rules)
    if zeros:
        say("ids", zeros)


def say_recipe(recipe: Recipe, label: str, found: Look, path: Path) -> None:
    """Says what the recipe, in the file ``path``, predicts, and with which rows."""
    task, rows = recipe.task, recipe.rows
    several = f" with {task.classes} classes" if task.classes is not None else ""
    text = f"{label!r} has {len(found.labels):,} different values: {task.kind}{several}"
    if task.kind == "binary":
        whose = (
            _second(found.labels)
            if task.positive is None
            else f"{_short(task.positive)}, as you say"
        )
        text = f"{label!r} is binary; scores, AUC and f1 are of {whose}"
    change = "--positive, or task.positive" if task.kind == "binary" else "--task, or task.kind"
    say("label", text, f"{change} in {path}")
    if rows.align == "psi":
        text = f"the parties find those in common; fewer than {rows.at_least} end the run"
        say("alignment", text, f"rows.align, rows.at_least in {path}")
    else:
        say("alignment", "all parties must hold the same ids", f"rows.align in {path}")


def say_training(sizes: ModelSizes, found: Look, path: Path) -> None:
    """Says how the recipe in the file ``path`` trains networks."""
    model = f"{sizes.hidden} hidden units, embeddings of {sizes.embedding_size} numbers"
    training = (
        f"for {found.rows:,} rows: batches of {sizes.batch_size}, at most {sizes.epochs} epochs"
    )
    say("model", model, f"[model] in {path}; trees: --method secureboost")
    say("training", training, f"[[phases]] in {path}")


def say_uploads(recipe: Recipe, path: Path) -> None:
    """Says how the recipe in the file ``path`` grows trees on uploads."""
    width = recipe.model.embedding_size
    text = f"the other parties upload at most {width} numbers a row, once, learnt without labels"
    say("model", text, f"[model] in {path}; networks: --protect none")
    text = f"trees on these and your own columns, at most {TREES['trees']} rounds"
    say("training", text, f"[model.top] in {path}")


def say_leaks(kind: Kind, chosen: Chosen, path: Path) -> None:
    """Says what others read of such a recipe, and whether encrypted trees would give away less."""
    told = f"{in_units(kind, chosen)}, in rehearsals on public tables; yours: vfl leaks"
    say("leaks", told, f"--protect; all presets in {path}")
    mine, trees = MEASURED[kind].get(chosen), MEASURED[kind]["trees"]
    # The messages of encrypted trees depend on labels.
    if chosen in LABEL_FREE or mine is None:
        return
    if trees.lost - mine.lost <= _AS_GOOD and trees.columns < mine.columns:
        labels = "but more" if trees.shows_more_labels(mine) else "and less"
        text = f"trees were as good there, and gave away less of the columns {labels} of the labels"
        say("consider", f"{text}: {in_units(kind, 'trees')}", "--method secureboost")


def say_trees(recipe: Recipe, found: Look, path: Path) -> None:
    """Says how the recipe in the file ``path`` grows trees."""
    of = recipe.phases[0].settings
    each = " for each class" if recipe.task.kind == "multiclass" else ""
    text = (
        f"for {found.rows:,} rows: at most {of['trees']} rounds, each of a tree{each}, of "
        f"depth {of['depth']}"
    )
    say("training", text, f"[[phases]] in {path}")
    text = (
        'of gradients, by Paillier; "ou" is about ten times as fast, and needs HEU at all parties'
    )
    say("encryption", text, f"encryption in {path}")


def _second(labels: Counts) -> str:
    """Words the class of a binary label to which scores belong, as ``vfl_party.data.inputs.labels``
    sorts them.
    """
    # All are numbers, or all are text.
    first, second = sorted(labels)
    if not isinstance(second, str) or not isinstance(first, str):
        return f"{second:g}, the larger number"
    capitals = ", capitals first" if second.casefold() < first.casefold() else ""
    return f"{_short(second)}, the second in alphabetical order{capitals}"


def _short(value: object) -> str:
    """Words a class as a sentence has it: text in quotes, and not too long."""
    short = (
        value if not isinstance(value, str) or len(value) <= _LONGEST else f"{value[:_LONGEST]}…"
    )
    return f"{short!r}"


def say_addresses(server: str, advertise: str | None, path: Path) -> None:
    """Says where the server is and, if others reach this party, where."""
    say("server", f"{server}{' on this machine' if is_here(server) else ''}", f"server in {path}")
    if advertise is not None:
        say(
            "listens",
            f"on all addresses; the others reach it at {advertise}",
            f"listen, advertise in {path}",
        )


def said_digest(recipe: Recipe) -> str:
    """Words a recipe's digest as `vfl-party check` does."""
    return f"digest {recipe.digest()} (the same at every party)"


def is_here(address: str) -> bool:
    """Whether an address is one of this machine's own."""
    host = host_and_port(address)[0]
    return host in ("localhost", "::1") or host.startswith("127.")

"""The two commands of ``vfl new``. The first makes a recipe and a party file from a table. The
second makes another party's file from a recipe and a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from vfl.measured import MEASURED, WHERE
from vfl.new import rules
from vfl.new.files import (
    DEFAULTS,
    LABEL_FREE,
    TREES,
    Chosen,
    Protect,
    describe_leakage_with_units,
    make_comments,
    make_party_tables,
    make_party_text,
    make_preset_training,
    make_recipe_tables,
    make_recipe_text,
    refuse_existing,
    write_all,
)
from vfl.new.options import (
    RECIPE,
    Flags,
    adding_flags,
    ask_addresses,
    ask_id,
    ask_label,
    ask_name,
    ask_own_name,
    ask_passives,
    ask_server,
    ask_table,
    check_drop,
    find_flags,
    is_here,
    stem,
)
from vfl.new.rules import Counts, Kind, Look, ModelSizes, Task, inspect_table, read_values
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import LINE, clean, format_percent, hide_passwords, list_names, make_printable
from vfl_party.data.id_rules import ASK, about_zeros, shapes_of
from vfl_party.methods.secureboost.settings import MAX_CODES

Method = Literal["splitnn", "secureboost"]
# The maximum number of categories of a column, including missing cells.
MAX_CATEGORIES = MAX_CODES
# With at least this number of the active party's rows, trees have one more level.
DEEPER = 10_000
# The minimum number of rows in a leaf for a regression.
_MIN_ROWS = 5


def grows_trees(recipe: Recipe) -> bool:
    """Returns whether the recipe grows trees, which accept missing cells."""
    return any(phase.kind == "secureboost" for phase in recipe.phases)


def make_tree_training(rows: int, task: Task) -> dict[str, Any]:
    """Returns the tables of a recipe about the training of trees, for ``rows`` rows.

    The number of rounds is an upper bound because of early stopping. A round of a multiclass task
    grows a tree for each class and takes longer, so there are fewer rounds and a higher learning
    rate. Paillier encryption works with every version of Python.
    """
    is_multiclass = task.kind == "multiclass"
    phase: dict[str, Any] = {
        "kind": "secureboost",
        "trees": 20 if is_multiclass else 40,
        "depth": 3 if rows < DEEPER else 4,
        "learning_rate": 0.3 if is_multiclass else 0.2,
        "early_stopping": 5 if is_multiclass else 8,
        "encryption": "paillier",
    }
    # In a regression, the weight (second derivative) of each row is 1, so the sum is a row count.
    if task.kind == "regression":
        phase["min_child_weight"] = float(_MIN_ROWS)
    return {"phases": [phase]}


@dataclass(frozen=True)
class RecipeFlags:
    """The options that only ``vfl new recipe`` has."""

    active: str | None
    passives: tuple[str, ...]
    task: str | None
    align: str
    positive: str | None = None
    method: Method = "splitnn"
    protect: Protect | None = None


@adding_flags()
def new_recipe(flags: Flags, recipe_flags: RecipeFlags) -> None:
    """Writes the recipe and the active party's file. Raises InputError."""
    out, recipe_path = flags.out, flags.out / RECIPE
    refuse_existing(recipe_path, force=flags.force)
    table, names = ask_table(flags)
    source = hide_passwords(table.source)
    active = ask_name(
        recipe_flags.active, "--active", "Name of this party, which has the label", stem(source)
    )
    path = out / f"{active}.toml"
    refuse_existing(path, force=flags.force)
    passives = ask_passives(recipe_flags.passives)
    drop = check_drop(flags, names, source)
    label = ask_label(flags, names, table)
    id_, values = ask_id(flags, names, label, table)
    id_rules = rules.choose_id_rules(read_values(table, id_).different)
    trees = recipe_flags.method == "secureboost"
    contents = inspect_table(
        table,
        id_,
        id_rules,
        lambda name: values((name,)),
        label=label,
        drop=drop,
        max_categories=MAX_CATEGORIES if trees else None,
    )
    where = f"{source}: label column {label!r}"
    task = rules.choose_task(contents.labels, where, label, recipe_flags.task)
    task = rules.set_positive(task, contents.labels, where, recipe_flags.positive)
    server, advertise = ask_addresses(flags, active)
    preset = _choose_preset(recipe_flags, task.kind)
    label_free = preset in LABEL_FREE
    settings = rules.make_rows_table(
        contents.rows, task, recipe_flags.align, id_rules, label_free=label_free
    )
    features = bool(contents.numbers or contents.categories)
    name = rules.make_recipe_name(label, (active, *passives))
    sizes = rules.choose_sizes(contents.rows)
    training = (
        make_tree_training(contents.rows, task)
        if preset == "trees"
        else make_preset_training(sizes, task.kind, preset)
    )
    tables = make_recipe_tables(name, task, active, passives, settings, training, features=features)
    text, recipe = make_recipe_text(tables, recipe_path, make_comments(task.kind, preset))
    own = make_party_tables(
        active,
        recipe_path,
        server,
        advertise,
        table,
        id_,
        contents,
        label=label,
        out=out,
        trees=trees,
    )
    write_all({recipe_path: text, path: make_party_text(own, path)}, force=flags.force)
    say_table(contents, id_, path, classes=task.kind != "regression", trees=trees)
    if not features:
        say("features", f"none: {active} has the label alone", f"parties.features in {recipe_path}")
    shapes = f"{', '.join(id_rules)}; then their shapes are {shapes_of(contents.ids)}"
    say("ids", shapes, f"rows.id_rules in {recipe_path}")
    say_id_advice(contents, id_rules)
    say_recipe(recipe, label, contents, recipe_path)
    if trees:
        say_trees(recipe, contents, recipe_path)
    elif label_free:
        say_uploads(recipe, recipe_path)
    else:
        say_training(sizes, contents, recipe_path)
    say_leaks(task.kind, preset, recipe_path)
    say_addresses(server, advertise, path)
    say("wrote", f"{recipe_path}: send it to {list_names(passives)}; {format_digest(recipe)}")
    say("wrote", f"{path}: stays here")
    say("next", f"vfl certs ca, then vfl certs issue {recipe.server} {active}")


@adding_flags()
def new_party(flags: Flags, recipe_path: Path, name: str | None) -> None:
    """Writes the file of a party of the recipe. Raises InputError."""
    recipe = load_recipe(recipe_path)
    name = ask_own_name(recipe, recipe_path, name)
    path = flags.out / f"{name}.toml"
    if path.exists() and path.samefile(recipe_path):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: is the recipe, which the file of {name} would replace. Rename the recipe.",
        )
    refuse_existing(path, force=flags.force)
    table, names = ask_table(flags)
    source = hide_passwords(table.source)
    active = name == recipe.active.name
    if flags.label is not None and not active:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--label: is for {recipe.active.name}, the recipe's active party. Remove it, or "
            "put the column in --drop.",
        )
    drop = check_drop(flags, names, source)
    label = ask_label(flags, names, table) if active else None
    id_, values = ask_id(flags, names, label, table)
    id_rules = recipe.rows.id_rules
    trees = grows_trees(recipe)
    contents = inspect_table(
        table,
        id_,
        id_rules,
        lambda name: values((name,)),
        label=label,
        drop=drop,
        max_categories=MAX_CATEGORIES if trees else None,
    )
    features = bool(contents.numbers or contents.categories)
    place = recipe.party(name)
    if not features and place is not None and place.features:
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: has no usable columns except the id (left out: "
            f"{list_names(list(map(make_printable, contents.drop)))}). Add feature columns.",
        )
    if label is not None:
        rules.choose_task(
            contents.labels, f"{source}: label column {label!r}", label, recipe.task.kind
        )
    server, advertise = ask_addresses(flags, name) if active else (ask_server(flags), None)
    tables = make_party_tables(
        name,
        recipe_path,
        server,
        advertise,
        table,
        id_,
        contents,
        label=label,
        out=flags.out,
        trees=trees,
    )
    write_all({path: make_party_text(tables, path)}, force=flags.force)
    say("recipe", f"{recipe.name}, {format_digest(recipe)}")
    say_table(contents, id_, path, classes=recipe.task.kind != "regression", trees=trees)
    rules_text = f"{', '.join(id_rules)}, the recipe's rules; then" if id_rules else "unchanged,"
    shapes = f"{rules_text} their shapes are {shapes_of(contents.ids)}"
    say("ids", shapes, f"data.id_rules in {path}")
    say_id_advice(contents, id_rules)
    say_addresses(server, advertise, path)
    say("wrote", f"{path}: stays here")
    has_keys = (flags.out / "certs" / f"{name}.pem").exists()
    first = "" if has_keys else f"vfl certs request {name}, which the CA must sign; then "
    say("next", f"{first}vfl-party check {path} --offline")


def _choose_preset(recipe_flags: RecipeFlags, kind: rules.Kind) -> Chosen:
    """Returns the preset of --protect, or ``trees`` for another method. Raises InputError."""
    if recipe_flags.method == "splitnn":
        return recipe_flags.protect or DEFAULTS[kind]
    if recipe_flags.protect not in (None, "none"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"--protect {recipe_flags.protect}: needs --method splitnn, as trees have no presets. "
            "Remove one of the two.",
        )
    return "trees"


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
    leaks = f"{leakage}; the highest of {WHERE[kind]}; yours: vfl leaks"
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

"""The two commands of ``vfl new``. The first makes a recipe and a party file from a table. The
second makes another party's file from a recipe and a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click

from vfl.new import options as ask
from vfl.new import rules
from vfl.new.files import (
    DEFAULTS,
    LABEL_FREE,
    RECIPE,
    Chosen,
    Protect,
    make_comments,
    make_party_tables,
    make_party_text,
    make_preset_training,
    make_recipe_tables,
    make_recipe_text,
    refuse_existing,
    write_all,
)
from vfl.new.look import Read, find_label_candidates, inspect_table, make_reader, read_values
from vfl.new.options import adding_flags, parse_settings
from vfl.new.rules import Task
from vfl.new.say import (
    format_digest,
    is_here,
    say,
    say_addresses,
    say_id_advice,
    say_leaks,
    say_recipe,
    say_table,
    say_training,
    say_trees,
    say_uploads,
)
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.passwords import hide_passwords
from vfl_common.text import list_names, make_printable
from vfl_party.data import TABLES, column_names
from vfl_party.data.ids import shapes_of
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


HERE = "127.0.0.1:7000"


@dataclass(frozen=True)
class Flags:
    """The options that both commands have. An option that is not given is None or empty."""

    data: str | None
    id: tuple[str, ...]
    label: str | None
    drop: tuple[str, ...]
    server: str | None
    advertise: str | None
    out: Path
    force: bool
    sets: tuple[str, ...] = ()


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
    table, names = _ask_table(flags)
    source = hide_passwords(table.source)
    active = _ask_name(
        recipe_flags.active, "--active", "Name of this party, which has the label", _stem(source)
    )
    path = out / f"{active}.toml"
    refuse_existing(path, force=flags.force)
    passives = _ask_passives(recipe_flags.passives)
    drop = _check_drop(flags, names, source)
    label = _ask_label(flags, names, table)
    id_, values = _ask_id(flags, names, label, table)
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
    server, advertise = _ask_addresses(flags, active)
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
    name = _ask_own_name(recipe, recipe_path, name)
    path = flags.out / f"{name}.toml"
    if path.exists() and path.samefile(recipe_path):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: is the recipe, which the file of {name} would replace. Rename the recipe.",
        )
    refuse_existing(path, force=flags.force)
    table, names = _ask_table(flags)
    source = hide_passwords(table.source)
    active = name == recipe.active.name
    if flags.label is not None and not active:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--label: is for {recipe.active.name}, the recipe's active party. Remove it, or "
            "put the column in --drop.",
        )
    drop = _check_drop(flags, names, source)
    label = _ask_label(flags, names, table) if active else None
    id_, values = _ask_id(flags, names, label, table)
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
    server, advertise = _ask_addresses(flags, name) if active else (_ask_server(flags), None)
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


# --- questions
# ------------------------------------------------------------


def _ask_table(flags: Flags) -> tuple[DataSettings, tuple[str, ...]]:
    """Returns the data settings of the table, and the names of its columns. Raises InputError."""
    tables_here = [
        path.name for path in sorted(Path().iterdir()) if path.name.lower().endswith(TABLES)
    ]

    def read_names(source: str) -> tuple[str, ...]:
        # The header of a text file is the line that contains these names.
        columns = {"id": tuple(dict.fromkeys(flags.id)), "label": flags.label}
        return column_names(parse_settings(source, flags.sets).model_copy(update=columns))

    @adding_flags()
    def check_readable(text: str) -> str:
        read_names(text)
        return text

    source = ask.get_answer(
        flags.data,
        "--data",
        "Your table",
        check_readable,
        default=tables_here[0] if len(tables_here) == 1 else "",
    )
    return parse_settings(source, flags.sets), read_names(source)


def _stem(source: str) -> str:
    """Returns a file's name without its suffix if it is a valid party name; otherwise ''."""
    try:
        return ask.check_party_name(Path(source).name.partition(".")[0])
    except InputError:
        return ""


def _ask_name(value: str | None, flag: str, question: str, default: str) -> str:
    return ask.get_answer(value, flag, question, check_own_name, default=default, sure=True)


def check_own_name(name: str) -> str:
    """Returns a party's name if it is valid, and its party file is not the recipe's file. Raises
    InputError otherwise.
    """
    if f"{ask.check_party_name(name)}.toml".casefold() == RECIPE:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{name!r}: the file of a party of this name would replace the recipe {RECIPE}. Give "
            "another --active or --passive.",
        )
    return name


def _ask_passives(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the passive parties. A value may have several names with commas. Raises
    InputError.
    """

    def check(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        return ",".join(check_own_name(name) for name in names)

    text = ask.get_answer(
        ",".join(values) or None, "--passive", "Names of the other parties, with commas", check
    )
    return tuple(text.split(","))


def _ask_label(flags: Flags, names: Sequence[str], table: DataSettings) -> str:
    """Returns the name of the label column, from the option or the user. Raises InputError."""
    names = [name for name in names if name not in flags.drop]
    check = ask.check_column(names, hide_passwords(table.source), "--label")
    if flags.label is not None:
        return check(flags.label)
    _show_columns(None, names)
    candidates = find_label_candidates(table, names)
    hint = (
        f"with two to twenty different values: {list_names(list(map(make_printable, candidates)))}"
        if candidates
        else ""
    )
    if hint and ask.at_terminal():
        click.echo(f"Columns {hint}", err=True)
    question, likely = "The column to predict", rules.guess_label(names, candidates)
    return ask.get_answer(
        None, "--label", question, check, default=likely, hint=f"columns {hint}" if hint else ""
    )


def _ask_id(
    flags: Flags, names: Sequence[str], label: str | None, table: DataSettings
) -> tuple[tuple[str, ...], Read]:
    """Returns the names of the id columns, and a function that reads columns. Raises
    InputError.
    """
    source = hide_passwords(table.source)
    dropped = [name for name in names if name in flags.drop]
    names = [name for name in names if name != label and name not in dropped]
    if not names:
        raise InputError(
            Code.DATA_INVALID, f"{source}: has no column except the label. Add the id column."
        )
    values, check = make_reader(table), ask.check_column(names, source, "--id")
    if flags.id:
        if label in flags.id or len(set(flags.id)) < len(flags.id):
            raise InputError(
                Code.CONFIG_INVALID,
                f"--id {' --id '.join(flags.id)}: the columns of the id and the label must "
                "differ. Correct --id or --label.",
            )
        return tuple(check(name) for name in flags.id), values
    guess = rules.guess_id(names, lambda name: values((name,)))
    if guess.sure:
        return (guess.name,), values
    if not ask.at_terminal():
        _refuse_dropped_id(guess, rules.guess_id(dropped, lambda name: values((name,))), source)
    if not guess.name and all(values((name,)) is None for name in names):
        # No column can be read. This call raises the reason, for example that there are no rows.
        read_values(table, (names[0],))
    if not guess.name and not ask.at_terminal():
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: no column has a different value in each row, as an id must. Name the id "
            "column with --id.",
        )
    _show_columns(None, names)
    return (ask.get_answer(None, "--id", "The id column", check, default=guess.name),), values


def _refuse_dropped_id(guess: rules.IdGuess, dropped: rules.IdGuess, source: str) -> None:
    """Raises InputError if a column in --drop is a better id than the other columns.

    ``guess``: the guess among the other columns. ``dropped``: the guess among the dropped columns.
    """
    if dropped.name and (dropped.sure or not guess.name):
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: only column {dropped.name!r} looks like an id, and --drop leaves it "
            "out. Name another with --id, or remove this --drop.",
        )


def _check_drop(flags: Flags, names: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the columns to leave out. Raises InputError for an unknown column, the id or the
    label.
    """
    check = ask.check_column(names, source, "--drop")
    for flag, roles in (("--id", flags.id), ("--label", (flags.label,))):
        conflict = next((name for name in flags.drop if name in roles), None)
        if conflict is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"--drop: leaves out column {conflict!r}, which {flag} names. Remove one of the "
                "two.",
            )
    return tuple(check(name) for name in flags.drop)


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


def _ask_own_name(recipe: Recipe, path: Path, value: str | None) -> str:
    """Returns this party's name in the recipe, from the option or the user. Raises InputError."""
    names = [party.name for party in recipe.parties]
    others = [party.name for party in recipe.passives]

    def check(name: str) -> str:
        if name not in names:
            raise InputError(
                Code.NOT_IN_RECIPE,
                f"{path}: {name!r} is not a party of the recipe (parties: {list_names(names)}). "
                "Correct --name.",
            )
        return name

    default = others[0] if len(others) == 1 else ""
    return ask.get_answer(
        value,
        "--name",
        f"Which party is this ({list_names(names)})",
        check,
        default=default,
        sure=True,
    )


def _ask_server(flags: Flags) -> str:
    question = "The server's address, host:port"
    return ask.get_answer(
        flags.server, "--server", question, ask.check_address, default=HERE, sure=True
    )


def _ask_addresses(flags: Flags, active: str) -> tuple[str, str | None]:
    """Returns the server's address and the active party's address. The second is None if the server
    is on this machine and --advertise is not given.
    """
    server = _ask_server(flags)
    if flags.advertise is None and is_here(server):
        return server, None
    question = f"The address of {active} for the others, host:port"
    proposal = f"{active}.example.org:7001"
    return server, ask.get_answer(
        flags.advertise, "--advertise", question, ask.check_address, default=proposal
    )


def _show_columns(value: str | None, names: Sequence[str]) -> None:
    if value is None and ask.at_terminal():
        click.echo(f"Columns: {', '.join(map(make_printable, names))}", err=True)

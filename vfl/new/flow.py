"""The two commands of ``vfl new``: from a table to a recipe and a party file, and from a recipe to
another party file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from vfl.new import ask, rules
from vfl.new.files import (
    RECIPE,
    party_tables,
    party_text,
    recipe_tables,
    recipe_text,
    refuse_existing,
    write_all,
)
from vfl.new.look import Read, few_valued, look, read_values, reader
from vfl.new.protect import DEFAULTS, LABEL_FREE, Chosen, Protect, comments, training_of
from vfl.new.say import (
    digest_text,
    is_here,
    say,
    say_addresses,
    say_alike,
    say_leaks,
    say_recipe,
    say_table,
    say_training,
    say_trees,
    say_uploads,
)
from vfl.new.settings import settings_for, telling_flags
from vfl.new.trees import MAX_CATEGORIES, Method, grows_trees, training_for
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.passwords import hide_passwords
from vfl_common.text import list_names, make_printable
from vfl_party.data import TABLES, column_names
from vfl_party.data.ids import shapes_of

HERE = "127.0.0.1:7000"


@dataclass(frozen=True)
class Flags:
    """The flags of both commands; None or empty: missing."""

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
class Wishes:
    """The other flags of ``vfl new recipe``."""

    active: str | None
    passives: tuple[str, ...]
    task: str | None
    align: str
    positive: str | None = None
    method: Method = "splitnn"
    protect: Protect | None = None


@telling_flags()
def new_recipe(flags: Flags, wishes: Wishes) -> None:
    """Writes the recipe and the active party's file. Raises InputError."""
    out, recipe_path = flags.out, flags.out / RECIPE
    refuse_existing(recipe_path, force=flags.force)
    table, names = _table(flags)
    source = hide_passwords(table.source)
    active = _name(
        wishes.active, "--active", "Name of this party, which knows the label", _stem(source)
    )
    path = out / f"{active}.toml"
    refuse_existing(path, force=flags.force)
    passives = _passives(wishes.passives)
    drop = _drop(flags, names, source)
    label = _label(flags, names, table)
    id_, values = _id(flags, names, label, table)
    id_rules = rules.id_rules_for(read_values(table, id_).different)
    trees = wishes.method == "secureboost"
    contents = look(
        table,
        id_,
        id_rules,
        lambda name: values((name,)),
        label=label,
        drop=drop,
        max_categories=MAX_CATEGORIES if trees else None,
    )
    what = f"{source}: label column {label!r}"
    task = rules.task_of(contents.labels, what, label, wishes.task)
    task = rules.with_positive(task, contents.labels, what, wishes.positive)
    server, advertise = _addresses(flags, active)
    chosen = _preset(wishes, task.kind)
    label_free = chosen in LABEL_FREE
    settings = rules.rows_for(contents.rows, task, wishes.align, id_rules, label_free=label_free)
    features = bool(contents.numbers or contents.categories)
    name = rules.recipe_name(label, (active, *passives))
    sizes = rules.sizes_for(contents.rows)
    training = (
        training_for(contents.rows, task)
        if chosen == "trees"
        else training_of(sizes, task.kind, chosen)
    )
    tables = recipe_tables(name, task, active, passives, settings, training, features=features)
    text, recipe = recipe_text(tables, recipe_path, comments(task.kind, chosen))
    own = party_tables(
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
    write_all({recipe_path: text, path: party_text(own, path)}, force=flags.force)
    say_table(contents, id_, path, classes=task.kind != "regression", trees=trees)
    if not features:
        say("features", f"none: {active} has the label alone", f"parties.features in {recipe_path}")
    shapes = f"{', '.join(id_rules)}; then their shapes are {shapes_of(contents.ids)}"
    say("ids", shapes, f"rows.id_rules in {recipe_path}")
    say_alike(contents, id_rules)
    say_recipe(recipe, label, contents, recipe_path)
    if trees:
        say_trees(recipe, contents, recipe_path)
    elif label_free:
        say_uploads(recipe, recipe_path)
    else:
        say_training(sizes, contents, recipe_path)
    say_leaks(task.kind, chosen, recipe_path)
    say_addresses(server, advertise, path)
    say("wrote", f"{recipe_path}: send it to {list_names(passives)}; {digest_text(recipe)}")
    say("wrote", f"{path}: stays here")
    say("next", f"vfl certs ca, then vfl certs issue {recipe.server} {active}")


@telling_flags()
def new_party(flags: Flags, recipe_path: Path, name: str | None) -> None:
    """Writes the file of a party of the recipe. Raises InputError."""
    recipe = load_recipe(recipe_path)
    name = _place(recipe, recipe_path, name)
    path = flags.out / f"{name}.toml"
    if path.exists() and path.samefile(recipe_path):
        raise InputError(
            Code.CONFIG_INVALID,
            f"{path}: is the recipe, which the file of {name} would replace. Rename the recipe.",
        )
    refuse_existing(path, force=flags.force)
    table, names = _table(flags)
    source = hide_passwords(table.source)
    active = name == recipe.active.name
    if flags.label is not None and not active:
        raise InputError(
            Code.CONFIG_INVALID,
            f"--label: is for {recipe.active.name}, the recipe's active party. Remove it, or "
            "put the column in --drop.",
        )
    drop = _drop(flags, names, source)
    label = _label(flags, names, table) if active else None
    id_, values = _id(flags, names, label, table)
    id_rules = recipe.rows.id_rules
    trees = grows_trees(recipe)
    contents = look(
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
        rules.task_of(contents.labels, f"{source}: label column {label!r}", label, recipe.task.kind)
    server, advertise = _addresses(flags, name) if active else (_server(flags), None)
    tables = party_tables(
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
    write_all({path: party_text(tables, path)}, force=flags.force)
    say("recipe", f"{recipe.name}, {digest_text(recipe)}")
    say_table(contents, id_, path, classes=recipe.task.kind != "regression", trees=trees)
    rules_text = f"{', '.join(id_rules)}, the recipe's rules; then" if id_rules else "unchanged,"
    shapes = f"{rules_text} their shapes are {shapes_of(contents.ids)}"
    say("ids", shapes, f"data.id_rules in {path}")
    say_alike(contents, id_rules)
    say_addresses(server, advertise, path)
    say("wrote", f"{path}: stays here")
    has_keys = (flags.out / "certs" / f"{name}.pem").exists()
    first = "" if has_keys else f"vfl certs request {name}, which the CA must sign; then "
    say("next", f"{first}vfl-party check {path} --offline")


# --- questions
# ------------------------------------------------------------


def _table(flags: Flags) -> tuple[DataSettings, tuple[str, ...]]:
    """Returns the settings of the table, and the names of its columns. Raises InputError."""
    here = [path.name for path in sorted(Path().iterdir()) if path.name.lower().endswith(TABLES)]

    def names_in(source: str) -> tuple[str, ...]:
        # The line that names these is the header.
        known = {"id": tuple(dict.fromkeys(flags.id)), "label": flags.label}
        return column_names(settings_for(source, flags.sets).model_copy(update=known))

    @telling_flags()
    def readable(text: str) -> str:
        names_in(text)
        return text

    source = ask.answer(
        flags.data, "--data", "Your table", readable, default=here[0] if len(here) == 1 else ""
    )
    return settings_for(source, flags.sets), names_in(source)


def _stem(source: str) -> str:
    """Returns a file's name without its ending, if a party can have this name; else ''."""
    try:
        return ask.party_name(Path(source).name.partition(".")[0])
    except InputError:
        return ""


def _name(value: str | None, flag: str, question: str, default: str) -> str:
    return ask.answer(value, flag, question, own_name, default=default, sure=True)


def own_name(name: str) -> str:
    """Checks the name of a party, whose file must not be the recipe's. Raises InputError."""
    if f"{ask.party_name(name)}.toml".casefold() == RECIPE:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{name!r}: a party of this name has the recipe's file {RECIPE}. Give another "
            "--active or --passive.",
        )
    return name


def _passives(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the other parties, split at commas. Raises InputError."""

    def check(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        return ",".join(own_name(name) for name in names)

    text = ask.answer(
        ",".join(values) or None, "--passive", "Names of the other parties, with commas", check
    )
    return tuple(text.split(","))


def _label(flags: Flags, names: Sequence[str], table: DataSettings) -> str:
    """Returns the label column, which must not be in --drop. Raises InputError."""
    names = [name for name in names if name not in flags.drop]
    check = ask.among(names, hide_passwords(table.source), "--label")
    if flags.label is not None:
        return check(flags.label)
    _show_columns(None, names)
    few = few_valued(table, names)
    hint = (
        f"with two to twenty different values: {list_names(list(map(make_printable, few)))}"
        if few
        else ""
    )
    if hint and ask.at_terminal():
        click.echo(f"Columns {hint}", err=True)
    question, likely = "The column to predict", rules.likely_label(names, few)
    return ask.answer(
        None, "--label", question, check, default=likely, hint=f"columns {hint}" if hint else ""
    )


def _id(
    flags: Flags, names: Sequence[str], label: str | None, table: DataSettings
) -> tuple[tuple[str, ...], Read]:
    """Returns the id columns, and a function that reads columns. Raises InputError."""
    source = hide_passwords(table.source)
    dropped = [name for name in names if name in flags.drop]
    names = [name for name in names if name != label and name not in dropped]
    if not names:
        raise InputError(
            Code.DATA_INVALID, f"{source}: has no column except the label. Add the id column."
        )
    values, check = reader(table), ask.among(names, source, "--id")
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
        # This raises the cause, such as that there are no rows.
        read_values(table, (names[0],))
    if not guess.name and not ask.at_terminal():
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: no column has a different value in each row, as an id has. Name the id "
            "column with --id.",
        )
    _show_columns(None, names)
    return (ask.answer(None, "--id", "The id column", check, default=guess.name),), values


def _refuse_dropped_id(guess: rules.IdGuess, dropped: rules.IdGuess, source: str) -> None:
    """Raises InputError if the best id is a column in --drop. ``guess``: of the others."""
    if dropped.name and (dropped.sure or not guess.name):
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: only column {dropped.name!r} looks like an id, and --drop leaves it "
            "out. Name another with --id, or remove this --drop.",
        )


def _drop(flags: Flags, names: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the columns to leave out. Raises InputError for an unknown column, the id or the
    label.
    """
    check = ask.among(names, source, "--drop")
    for flag, roles in (("--id", flags.id), ("--label", (flags.label,))):
        twice = next((name for name in flags.drop if name in roles), None)
        if twice is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"--drop: leaves out column {twice!r}, which {flag} names. Remove one of the two.",
            )
    return tuple(check(name) for name in flags.drop)


def _preset(wishes: Wishes, kind: rules.Kind) -> Chosen:
    """Returns the preset, or ``trees``. Raises InputError."""
    if wishes.method == "splitnn":
        return wishes.protect or DEFAULTS[kind]
    if wishes.protect not in (None, "none"):
        raise InputError(
            Code.CONFIG_INVALID,
            f"--protect {wishes.protect}: is for --method splitnn, as trees have no presets. "
            "Remove one of the two.",
        )
    return "trees"


def _place(recipe: Recipe, path: Path, value: str | None) -> str:
    """Returns this party's name in the recipe. Raises InputError."""
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
    return ask.answer(
        value,
        "--name",
        f"Which party is this ({list_names(names)})",
        check,
        default=default,
        sure=True,
    )


def _server(flags: Flags) -> str:
    question = "The server's address, host:port"
    return ask.answer(flags.server, "--server", question, ask.address, default=HERE, sure=True)


def _addresses(flags: Flags, active: str) -> tuple[str, str | None]:
    """Returns the server's address and the active party's; the latter is None if the server is on
    this machine.
    """
    server = _server(flags)
    if flags.advertise is None and is_here(server):
        return server, None
    question = f"The address of {active} for the others, host:port"
    proposal = f"{active}.example.org:7001"
    return server, ask.answer(
        flags.advertise, "--advertise", question, ask.address, default=proposal
    )


def _show_columns(value: str | None, names: Sequence[str]) -> None:
    if value is None and ask.at_terminal():
        click.echo(f"Columns: {', '.join(map(make_printable, names))}", err=True)

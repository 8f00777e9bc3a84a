"""The two walks of ``vfl new``: from a table to a recipe and a party file, and from a recipe to
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
    is_here,
    said_digest,
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
from vfl.new.trees import MOST_CATEGORIES, Method, grows_trees, training_for
from vfl_common.config.data import DataSettings, shown
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import listed, printable
from vfl_party.data import TABLES, column_names
from vfl_party.data.ids import shapes_of

HERE = "127.0.0.1:7000"


@dataclass(frozen=True)
class Given:
    """The flags of both commands; None or empty: not given."""

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
def new_recipe(given: Given, wishes: Wishes) -> None:
    """Writes the recipe and the active party's file. Raises InputError."""
    out, recipe_path = given.out, given.out / RECIPE
    refuse_existing(recipe_path, force=given.force)
    table, names = _table(given)
    source = shown(table.source)
    active = _name(
        wishes.active, "--active", "Name of this party, which knows the label", _stem(source)
    )
    path = out / f"{active}.toml"
    refuse_existing(path, force=given.force)
    passives = _passives(wishes.passives)
    drop = _drop(given, names, source)
    label = _label(given, names, table)
    id_, values = _id(given, names, label, table)
    id_rules = rules.id_rules_for(read_values(table, id_).different)
    trees = wishes.method == "secureboost"
    most = MOST_CATEGORIES if trees else None
    found = look(
        table,
        id_,
        id_rules,
        lambda name: values((name,)),
        label=label,
        drop=drop,
        most_categories=most,
    )
    what = f"{source}: label column {label!r}"
    task = rules.task_of(found.labels, what, label, wishes.task)
    task = rules.with_positive(task, found.labels, what, wishes.positive)
    server, advertise = _addresses(given, active)
    chosen = _preset(wishes, task.kind)
    label_free = chosen in LABEL_FREE
    settings = rules.rows_for(found.rows, task, wishes.align, id_rules, label_free=label_free)
    features = bool(found.numbers or found.categories)
    name = rules.recipe_name(label, (active, *passives))
    sizes = rules.sizes_for(found.rows)
    training = (
        training_for(found.rows, task)
        if chosen == "trees"
        else training_of(sizes, task.kind, chosen)
    )
    tables = recipe_tables(name, task, active, passives, settings, training, features=features)
    text, recipe = recipe_text(tables, recipe_path, comments(task.kind, chosen))
    own = party_tables(
        active, recipe_path, server, advertise, table, id_, found, label=label, out=out, trees=trees
    )
    write_all({recipe_path: text, path: party_text(own, path)}, force=given.force)
    say_table(found, id_, path, classes=task.kind != "regression", trees=trees)
    if not features:
        say("features", f"none: {active} has the label alone", f"parties.features in {recipe_path}")
    shapes = f"{', '.join(id_rules)}; then their shapes are {shapes_of(found.ids)}"
    say("ids", shapes, f"rows.id_rules in {recipe_path}")
    say_alike(found, id_rules)
    say_recipe(recipe, label, found, recipe_path)
    if trees:
        say_trees(recipe, found, recipe_path)
    elif label_free:
        say_uploads(recipe, recipe_path)
    else:
        say_training(sizes, found, recipe_path)
    say_leaks(task.kind, chosen, recipe_path)
    say_addresses(server, advertise, path)
    say("wrote", f"{recipe_path}: send it to {listed(passives)}; {said_digest(recipe)}")
    say("wrote", f"{path}: stays here")
    say("next", f"vfl certs ca, then vfl certs issue {recipe.server} {active}")


@telling_flags()
def new_party(given: Given, recipe_path: Path, name: str | None) -> None:
    """Writes the file of a party of the recipe. Raises InputError."""
    recipe = load_recipe(recipe_path)
    name = _place(recipe, recipe_path, name)
    path = given.out / f"{name}.toml"
    if path.exists() and path.samefile(recipe_path):
        text = (
            f"{path}: is the recipe, and the file of {name} would replace it; give the recipe "
            "another file name"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    refuse_existing(path, force=given.force)
    table, names = _table(given)
    source = shown(table.source)
    active = name == recipe.active.name
    if given.label is not None and not active:
        text = (
            f"--label is for {recipe.active.name}, the recipe's active party; remove it, or "
            "put the column in --drop"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    drop = _drop(given, names, source)
    label = _label(given, names, table) if active else None
    id_, values = _id(given, names, label, table)
    id_rules = recipe.rows.id_rules
    trees = grows_trees(recipe)
    most = MOST_CATEGORIES if trees else None
    found = look(
        table,
        id_,
        id_rules,
        lambda each: values((each,)),
        label=label,
        drop=drop,
        most_categories=most,
    )
    features = bool(found.numbers or found.categories)
    place = recipe.party(name)
    if not features and place is not None and place.features:
        text = (
            f"{source}: has no columns of use beside the id; left out: "
            f"{listed(list(map(printable, found.drop)))}"
        )
        raise InputError(Code.DATA_INVALID, text)
    if label is not None:
        rules.task_of(found.labels, f"{source}: label column {label!r}", label, recipe.task.kind)
    server, advertise = _addresses(given, name) if active else (_server(given), None)
    tables = party_tables(
        name,
        recipe_path,
        server,
        advertise,
        table,
        id_,
        found,
        label=label,
        out=given.out,
        trees=trees,
    )
    write_all({path: party_text(tables, path)}, force=given.force)
    say("recipe", f"{recipe.name}, {said_digest(recipe)}")
    say_table(found, id_, path, classes=recipe.task.kind != "regression", trees=trees)
    spelt = f"{', '.join(id_rules)}, the recipe's rules; then" if id_rules else "as they come,"
    say("ids", f"{spelt} their shapes are {shapes_of(found.ids)}", f"data.id_rules in {path}")
    say_alike(found, id_rules)
    say_addresses(server, advertise, path)
    say("wrote", f"{path}: stays here")
    has_keys = (given.out / "certs" / f"{name}.pem").exists()
    first = "" if has_keys else f"vfl certs request {name}, for the keeper of the CA to sign; then "
    say("next", f"{first}vfl-party check {path} --offline")


# --- questions
# ------------------------------------------------------------


def _table(given: Given) -> tuple[DataSettings, tuple[str, ...]]:
    """Returns how the table is read, and the names of its columns. Raises InputError."""
    here = [path.name for path in sorted(Path().iterdir()) if path.name.lower().endswith(TABLES)]

    def names_in(source: str) -> tuple[str, ...]:
        # The line that names these is the header.
        known = {"id": tuple(dict.fromkeys(given.id)), "label": given.label}
        return column_names(settings_for(source, given.sets).model_copy(update=known))

    @telling_flags()
    def readable(text: str) -> str:
        names_in(text)
        return text

    source = ask.answer(
        given.data, "--data", "Your table", readable, default=here[0] if len(here) == 1 else ""
    )
    return settings_for(source, given.sets), names_in(source)


def _stem(source: str) -> str:
    """Returns the name of a file without its ending, if a party can be called so; else ''."""
    try:
        return ask.party_name(Path(source).name.partition(".")[0])
    except InputError:
        return ""


def _name(given: str | None, flag: str, question: str, default: str) -> str:
    return ask.answer(given, flag, question, own_name, default=default, sure=True)


def own_name(name: str) -> str:
    """Checks the name of a party, whose file must not be the recipe's. Raises InputError."""
    if f"{ask.party_name(name)}.toml".casefold() == RECIPE:
        what = f"{name!r}: a party of this name would have the recipe's file {RECIPE}"
        raise InputError(Code.CONFIG_INVALID, f"{what}; give another --active or --passive")
    return name


def _passives(given: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the other parties, which may be separated by commas. Raises
    InputError.
    """

    def checked(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        return ",".join(own_name(name) for name in names)

    text = ask.answer(
        ",".join(given) or None, "--passive", "Names of the other parties, with commas", checked
    )
    return tuple(text.split(","))


def _label(given: Given, names: Sequence[str], table: DataSettings) -> str:
    """Returns the label column, which is none of those that are left out. Raises InputError."""
    names = [name for name in names if name not in given.drop]
    check = ask.among(names, shown(table.source), "--label")
    if given.label is not None:
        return check(given.label)
    _show_columns(None, names)
    few = few_valued(table, names)
    hint = (
        f"with two to twenty different values: {listed(list(map(printable, few)))}" if few else ""
    )
    if hint and ask.at_terminal():
        click.echo(f"Columns {hint}", err=True)
    question, likely = "The column to predict", rules.likely_label(names, few)
    return ask.answer(
        None, "--label", question, check, default=likely, hint=f"columns {hint}" if hint else ""
    )


def _id(
    given: Given, names: Sequence[str], label: str | None, table: DataSettings
) -> tuple[tuple[str, ...], Read]:
    """Returns the id columns, and what reads columns. Raises InputError."""
    source = shown(table.source)
    dropped = [name for name in names if name in given.drop]
    names = [name for name in names if name != label and name not in dropped]
    if not names:
        raise InputError(
            Code.DATA_INVALID, f"{source}: has no column beside the label; add the id column"
        )
    values, check = reader(table), ask.among(names, source, "--id")
    if given.id:
        if label in given.id or len(set(given.id)) < len(given.id):
            text = (
                f"--id {' --id '.join(given.id)}: the columns of the id and the label must be "
                "different ones"
            )
            raise InputError(Code.CONFIG_INVALID, text)
        return tuple(check(name) for name in given.id), values
    guess = rules.guess_id(names, lambda name: values((name,)))
    if guess.sure:
        return (guess.name,), values
    if not ask.at_terminal():
        _refuse_dropped_id(guess, rules.guess_id(dropped, lambda name: values((name,))), source)
    if not guess.name and all(values((name,)) is None for name in names):
        # Says why, such as that there are no rows.
        read_values(table, (names[0],))
    if not guess.name and not ask.at_terminal():
        text = (
            f"{source}: no column has another value in each row, as an id has; name the id "
            "column with --id"
        )
        raise InputError(Code.DATA_INVALID, text)
    _show_columns(None, names)
    return (
        ask.answer(
            None, "--id", "The column that says who a row is about", check, default=guess.name
        ),
    ), values


def _refuse_dropped_id(guess: rules.IdGuess, dropped: rules.IdGuess, source: str) -> None:
    """Raises InputError if the best id is a column that --drop leaves out. ``guess``: of the other
    columns.
    """
    if dropped.name and (dropped.sure or not guess.name):
        text = (
            f"{source}: column {dropped.name!r}, which --drop leaves out, is the only one that "
            "looks like an id"
        )
        raise InputError(
            Code.DATA_INVALID, f"{text}; name another with --id, or remove this --drop"
        )


def _drop(given: Given, names: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the columns to leave out. Raises InputError if one is unknown, the id or the
    label.
    """
    check = ask.among(names, source, "--drop")
    for flag, roles in (("--id", given.id), ("--label", (given.label,))):
        twice = next((name for name in given.drop if name in roles), None)
        if twice is not None:
            text = f"--drop leaves out column {twice!r}, which {flag} names; remove one of the two"
            raise InputError(Code.CONFIG_INVALID, text)
    return tuple(check(name) for name in given.drop)


def _preset(wishes: Wishes, kind: rules.Kind) -> Chosen:
    """Returns what is to be hidden, or ``trees``. Raises InputError."""
    if wishes.method == "splitnn":
        return wishes.protect or DEFAULTS[kind]
    if wishes.protect not in (None, "none"):
        text = (
            f"--protect {wishes.protect} is for --method splitnn: trees have no such presets; "
            "remove one of the two"
        )
        raise InputError(Code.CONFIG_INVALID, text)
    return "trees"


def _place(recipe: Recipe, path: Path, given: str | None) -> str:
    """Returns which party of the recipe this is. Raises InputError."""
    names = [party.name for party in recipe.parties]
    others = [party.name for party in recipe.passives]

    def known(name: str) -> str:
        if name not in names:
            text = (
                f"{path}: {name!r} is not a party of the recipe (parties: {listed(names)}); "
                "correct --name"
            )
            raise InputError(Code.NOT_IN_RECIPE, text)
        return name

    default = others[0] if len(others) == 1 else ""
    return ask.answer(
        given, "--name", f"Which party is this ({listed(names)})", known, default=default, sure=True
    )


def _server(given: Given) -> str:
    question = "Where the server will listen, host:port"
    return ask.answer(given.server, "--server", question, ask.address, default=HERE, sure=True)


def _addresses(given: Given, active: str) -> tuple[str, str | None]:
    """Returns the server's address and that of the active party, None if it is on this machine as
    the server is.
    """
    server = _server(given)
    if given.advertise is None and is_here(server):
        return server, None
    question, proposal = f"Where the others reach {active}, host:port", f"{active}.example.org:7001"
    return server, ask.answer(
        given.advertise, "--advertise", question, ask.address, default=proposal
    )


def _show_columns(given: str | None, names: Sequence[str]) -> None:
    if given is None and ask.at_terminal():
        click.echo(f"Columns: {', '.join(map(printable, names))}", err=True)

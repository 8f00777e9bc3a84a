"""The two walks of ``vfl new``: from a table to a recipe and a party file, and from a recipe to another party file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vfl.new import ask, rules
from vfl.new.files import RECIPE, party_tables, party_text, recipe_tables, recipe_text, refuse_existing, write_all
from vfl.new.look import Look, look, reader
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port, listed
from vfl_party.data.names import heading

HERE = "127.0.0.1:7000"
_LOOPBACK = ("localhost", "127.", "::1")
_TABLES = (".csv", ".csv.gz", ".parquet")
_WIDTH = 12


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


@dataclass(frozen=True)
class Wishes:
    """The other flags of ``vfl new recipe``."""

    active: str | None
    passives: tuple[str, ...]
    task: str | None
    align: str


def new_recipe(given: Given, wishes: Wishes) -> None:
    """Writes the recipe and the active party's file. Raises InputError."""
    out, recipe_path = given.out, given.out / RECIPE
    refuse_existing(recipe_path, force=given.force)
    source, names, notes = _table(given)
    active = _name(wishes.active, "--active", "Name of this party, which knows the label", _stem(source))
    path = out / f"{active}.toml"
    refuse_existing(path, force=given.force)
    passives = _passives(wishes.passives)
    label = _label(given, names, source)
    id_, values = _id(given, [name for name in names if name != label], source)
    id_rules = rules.id_rules_for(_ids(values, id_, source))
    found = look(source, id_, id_rules, lambda name: values((name,)), label=label, drop=_drop(given, names, source))
    task = rules.task_of(found.labels, f"{source}: label column {label!r}", label, wishes.task)
    server, advertise = _addresses(given, active)
    sizes = rules.sizes_for(found.rows)
    settings = rules.rows_for(found.rows, task, wishes.align, id_rules)
    features = bool(found.numbers or found.categories)
    tables = recipe_tables(rules.recipe_name(label), task, active, passives, settings, sizes, features=features)
    text, recipe = recipe_text(tables, recipe_path)
    own = party_tables(active, recipe_path, server, advertise, source, id_, found, label=label, out=out)
    write_all({recipe_path: text, path: party_text(own, path)}, force=given.force)
    _say_notes(notes)
    _say_table(found, id_, path)
    if not features:
        _say("features", f"none: {active} has the label alone", f"parties.features in {recipe_path}")
    spelt = f"{', '.join(id_rules)}; then most look like {rules.look_of(found.ids)}"
    _say("ids", spelt, f"rows.id_rules in {recipe_path}")
    _say_task(task, label, found, recipe_path)
    _say_rows(settings, recipe_path)
    model = f"{sizes.hidden} hidden units, embeddings of {sizes.embedding_size} numbers"
    training = f"batches of {sizes.batch_size}, at most {sizes.epochs} epochs"
    _say("model", f"for {found.rows:,} rows: {model}, {training}", f"[model], [[phases]] in {recipe_path}")
    _say_addresses(server, advertise, path)
    _say(
        "wrote",
        f"{recipe_path}: send it to {listed(passives)}; digest {recipe.digest()[:16]} (the same at every party)",
    )
    _say_party(path)


def new_party(given: Given, recipe_path: Path, name: str | None) -> None:
    """Writes the file of a party of the recipe. Raises InputError."""
    recipe = load_recipe(recipe_path)
    name = _place(recipe, recipe_path, name)
    path = given.out / f"{name}.toml"
    refuse_existing(path, force=given.force)
    source, names, notes = _table(given)
    active = name == recipe.active.name
    if given.label is not None and not active:
        text = f"--label is for {recipe.active.name}, the recipe's active party; remove it, or put the column in --drop"
        raise InputError(Code.CONFIG_INVALID, text)
    label = _label(given, names, source) if active else None
    id_, values = _id(given, [each for each in names if each != label], source)
    id_rules, drop = recipe.rows.id_rules, _drop(given, names, source)
    found = look(source, id_, id_rules, lambda each: values((each,)), label=label, drop=drop)
    features = bool(found.numbers or found.categories)
    place = recipe.party(name)
    if not features and place is not None and place.features:
        text = f"{source}: has no columns of use beside the id; left out: {listed(list(found.drop))}"
        raise InputError(Code.DATA_INVALID, text)
    if label is not None:
        rules.task_of(found.labels, f"{source}: label column {label!r}", label, recipe.task.kind)
    server, advertise = _addresses(given, name) if active else (_server(given), None)
    tables = party_tables(name, recipe_path, server, advertise, source, id_, found, label=label, out=given.out)
    write_all({path: party_text(tables, path)}, force=given.force)
    _say("recipe", f"{recipe.name}, digest {recipe.digest()[:16]} (the same at every party)")
    _say_notes(notes)
    _say_table(found, id_, path)
    spelt = f"by the recipe's rules ({', '.join(id_rules)})" if id_rules else "as they come"
    alike = f"most look like {rules.look_of(found.ids)}, as they must at every party"
    _say("ids", f"{spelt} {alike}", f"data.id_rules in {path}")
    _say_addresses(server, advertise, path)
    _say_party(path)


# --- questions ------------------------------------------------------------------------------------------------------


def _table(given: Given) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Returns the table, the names of its columns, and what its reader has guessed. Raises InputError."""
    here = [path.name for path in sorted(Path().iterdir()) if path.name.lower().endswith(_TABLES)]

    def readable(text: str) -> str:
        heading(text)
        return text

    source = ask.answer(given.data, "--data", "Your table", readable, default=here[0] if len(here) == 1 else "")
    found = heading(source)
    return source, found.names, found.notes


def _stem(source: str) -> str:
    """Returns the name of a file without its ending, if a party can be called so; else ''."""
    try:
        return ask.party_name(Path(source).name.partition(".")[0])
    except InputError:
        return ""


def _name(given: str | None, flag: str, question: str, default: str) -> str:
    return ask.answer(given, flag, question, ask.party_name, default=default, sure=True)


def _passives(given: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the other parties, which may be separated by commas. Raises InputError."""

    def checked(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        return ",".join(ask.party_name(name) for name in names)

    text = ask.answer(",".join(given) or None, "--passive", "Names of the other parties, with commas", checked)
    return tuple(text.split(","))


def _label(given: Given, names: Sequence[str], source: str) -> str:
    _show_columns(given.label, names)
    check, likely = ask.among(names, source, "--label"), rules.likely_label(names)
    return ask.answer(given.label, "--label", "The column to predict", check, default=likely)


def _id(given: Given, names: Sequence[str], source: str) -> tuple[tuple[str, ...], Any]:
    """Returns the id columns, and what reads columns. Raises InputError."""
    values, check = reader(source), ask.among(names, source, "--id")
    if given.id:
        return tuple(check(name) for name in given.id), values
    guess = rules.guess_id(names, lambda name: values((name,)))
    if guess.sure:
        return (guess.name,), values
    if not guess.name and not ask.at_terminal():
        text = f"{source}: no column has another value in each row, as an id has; name the id column with --id"
        raise InputError(Code.DATA_INVALID, text)
    _show_columns(None, names)
    return (ask.answer(None, "--id", "The column that says who a row is about", check, default=guess.name),), values


def _ids(values: Any, id_: tuple[str, ...], source: str) -> tuple[str, ...]:
    found: rules.Values | None = values(id_)
    if found is None:
        text = f"{source}: {listed(id_)} cannot be the id: ids are text or whole numbers; give another --id"
        raise InputError(Code.DATA_INVALID, text)
    return found.different


def _drop(given: Given, names: Sequence[str], source: str) -> tuple[str, ...]:
    check = ask.among(names, source, "--drop")
    return tuple(check(name) for name in given.drop)


def _place(recipe: Recipe, path: Path, given: str | None) -> str:
    """Returns which party of the recipe this is. Raises InputError."""
    names = [party.name for party in recipe.parties]
    others = [party.name for party in recipe.passives]

    def known(name: str) -> str:
        if name not in names:
            text = f"{path}: {name!r} is not a party of the recipe (parties: {listed(names)}); correct --name"
            raise InputError(Code.NOT_IN_RECIPE, text)
        return name

    default = others[0] if len(others) == 1 else ""
    return ask.answer(given, "--name", f"Which party is this ({listed(names)})", known, default=default, sure=True)


def _server(given: Given) -> str:
    question = "Where the server will listen, host:port"
    return ask.answer(given.server, "--server", question, ask.address, default=HERE, sure=True)


def _addresses(given: Given, active: str) -> tuple[str, str | None]:
    """Returns the server's address and that of the active party, None if it is on this machine as the server is."""
    server = _server(given)
    if given.advertise is None and host_and_port(server)[0].startswith(_LOOPBACK):
        return server, None
    question, proposal = f"Where the others reach {active}, host:port", f"{active}.example.org:7001"
    return server, ask.answer(given.advertise, "--advertise", question, ask.address, default=proposal)


def _show_columns(given: str | None, names: Sequence[str]) -> None:
    if given is None and ask.at_terminal():
        click.echo(f"Columns: {', '.join(names)}", err=True)


# --- what was guessed -----------------------------------------------------------------------------------------------


def _say(about: str, text: str, change: str = "") -> None:
    """Says one thing, and by which key of a file, or by which flag, it changes."""
    click.echo(f"{about:<{_WIDTH}}{text}{f'  ({change})' if change else ''}")


def _say_notes(notes: Sequence[str]) -> None:
    for note in notes:
        _say("table", note)


def _say_table(found: Look, id_: tuple[str, ...], path: Path) -> None:
    _say("id", f"{listed(list(map(repr, id_)))}, of {found.rows:,} rows", "--id")
    if found.left_out:
        first = "; of rows that share an id the first stays" if found.repeated else ""
        _say("rows", f"{found.left_out}{first}", f"data.duplicates in {path}")
    if found.numbers:
        _say("numbers", listed(found.numbers), f"data.categorical in {path}")
    if found.categories:
        _say("categories", listed(found.categories), f"data.numeric in {path}")
    for name, why in found.drop.items():
        _say("left out", f"{name}: {why}", f"data.drop in {path}")
    if found.missing:
        _say("missing", "numbers, in some rows; the column's mean takes their place", f"data.missing in {path}")


def _say_task(task: rules.Task, label: str, found: Look, recipe_path: Path) -> None:
    several = f" with {task.classes} classes" if task.classes is not None else ""
    text = f"{label!r} has {len(found.labels):,} different values: {task.kind}{several}"
    _say("label", text, f"--task, or task.kind in {recipe_path}")


def _say_rows(settings: dict[str, Any], recipe_path: Path) -> None:
    if settings.get("align") == "psi":
        text = f"the parties find those in common; fewer than {settings['at_least']} end the run"
        _say("alignment", text, f"rows.align, rows.at_least in {recipe_path}")
    else:
        _say("alignment", "all parties must hold the same ids", f"rows.align in {recipe_path}")


def _say_addresses(server: str, advertise: str | None, path: Path) -> None:
    here = " on this machine" if host_and_port(server)[0].startswith(_LOOPBACK) else ""
    _say("server", f"{server}{here}", f"server in {path}")
    if advertise is not None:
        _say("listens", f"on all addresses; the others reach it at {advertise}", f"listen, advertise in {path}")


def _say_party(path: Path) -> None:
    _say("wrote", f"{path}: stays here")
    _say("next", f"certificates (vfl certs --help), then vfl-party check {path} --offline")

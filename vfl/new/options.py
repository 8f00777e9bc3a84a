"""The values of options: the keys of ``[data]`` for ``--set``, the options for keys that an error
names, and questions at a terminal.

Each value is given by an option or by the user's answer. Without both, an error names the option.
"""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from vfl.new import rules
from vfl.new.rules import Read, find_label_candidates, make_reader, read_values
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.text import hide_passwords, host_and_port, list_names, make_printable
from vfl_party.data import TABLES, column_names

_TEXTS = (
    "sheet",
    "query",
    "format",
    "separator",
    "encoding",
    "decimal",
    "thousands",
    "dates",
    "limit_by",
    "scratch",
)
_LISTS = ("numeric", "categorical", "na")
# The keys that control how a table is read.
READING = (*_TEXTS, "skip_lines", "limit", "memory_mib", "names", "categorical_buckets", *_LISTS)
# The name of the recipe's file.
RECIPE = "recipe.toml"
# The default address of the server.
HERE = "127.0.0.1:7000"
_OTHER_FLAGS = {"source": "--data", "id": "--id", "label": "--label", "drop": "--drop"}
_NAMED = re.compile(r'\bdata\.([a-z_]+)(?:(?: =| to) (?:(\d+)|"([^"]*)")(?! or "))?')


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


def parse_settings(source: str, pairs: Sequence[str]) -> DataSettings:
    """Returns the data settings of a table. ``pairs``: the ``KEY=VALUE`` texts of ``--set``. Raises
    InputError.
    """
    keys: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().removeprefix("data.")
        if not equals or key not in READING or key in keys:
            raise _make_error(pair, key, twice=key in keys)
        keys[key] = _parse_value(key, text)
    return parse(DataSettings, {"source": source, **keys}, "--set" if keys else source)


def get_reading_keys(settings: DataSettings) -> dict[str, Any]:
    """Returns the keys that ``--set`` has set, for a party file."""
    return settings.model_dump(mode="json", include=settings.model_fields_set & set(READING))


def find_flags(text: str) -> list[str]:
    """Returns the options for the keys of ``[data]`` that a sentence names."""
    flags = []
    for key, number, word in _NAMED.findall(text):
        if key in _OTHER_FLAGS:
            flags.append(_OTHER_FLAGS[key])
        elif key in READING:
            flags.append(f"--set {key}={number or word or '…'}")
    return list(dict.fromkeys(flags))


@contextlib.contextmanager
def adding_flags() -> Iterator[None]:
    """Adds the matching options to an InputError that names keys of ``[data]``."""
    try:
        yield
    except InputError as error:
        text, flags = str(error), find_flags(str(error))
        if not flags or "(here: " in text:
            raise
        raise InputError(error.code, text + f" (here: {', '.join(flags)})") from None


def _parse_value(key: str, text: str) -> Any:
    """Parses a value as TOML. If the result does not have the key's type, the text itself is
    returned.
    """
    try:
        tables = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        tables = {}
    value = tables["value"] if tables.keys() == {"value"} else text
    # The key ``dates`` may be a table with a format for each column.
    if key == "dates" and isinstance(value, dict):
        return value
    if key in _TEXTS:
        return value if isinstance(value, str) else text
    if key in _LISTS:
        return value if isinstance(value, list) else [value if isinstance(value, str) else text]
    return value


def _make_error(pair: str, key: str, *, twice: bool) -> InputError:
    where = f"--set {pair!r}"
    if twice:
        return InputError(Code.CONFIG_INVALID, f"{where}: {key} is given twice. Give it once.")
    if key in _OTHER_FLAGS:
        return InputError(
            Code.CONFIG_INVALID, f"{where}: has its own option. Use {_OTHER_FLAGS[key]}."
        )
    if key in READING:
        return InputError(Code.CONFIG_INVALID, f"{where}: has no value. Write --set {key}=VALUE.")
    if key in DataSettings.model_fields:
        return InputError(
            Code.CONFIG_INVALID,
            f"{where}: does not affect how the table is read. Change data.{key} in the party "
            "file afterwards.",
        )
    near = difflib.get_close_matches(key, READING, n=1, cutoff=0.5)
    return InputError(
        Code.CONFIG_INVALID,
        f"{where}: unknown key {key!r}. Choose "
        f"{near[0] if near else 'one of ' + ', '.join(sorted(READING))}.",
    )


Check = Callable[[str], str]


def at_terminal() -> bool:
    """Returns whether standard input is a terminal, so that the user can be asked."""
    return sys.stdin.isatty()


def get_answer(
    value: str | None,
    flag: str,
    question: str,
    check: Check,
    *,
    default: str = "",
    sure: bool = False,
    hint: str = "",
) -> str:
    """Returns the value of the option or, at a terminal, the user's answer.

    Args:
        value: the option's value; None if it is missing.
        flag: the option's name, for errors.
        question: the question at a terminal.
        check: converts an answer. If it raises InputError, the question is asked again.
        default: the proposed answer; '' for no proposal.
        sure: whether to use the proposal if there is no terminal.
        hint: the possible answers, for the error about the missing option.

    Raises InputError if the value is not valid, or if it is missing and there is no terminal.
    """
    if value is not None:
        return check(value)
    if at_terminal():

        def parse(text: str) -> str:
            try:
                return check(text.strip())
            except InputError as error:
                raise click.UsageError(str(error)) from None

        text: str = click.prompt(question, default=default or None, value_proc=parse, err=True)
        return text
    if default and sure:
        return check(default)
    raise InputError(
        Code.CONFIG_INVALID,
        f"{flag}: is missing. Give {flag} {shlex.quote(default) if default else 'VALUE'}"
        f"{f' ({hint})' if hint else ''}, or use a terminal to be asked.",
    )


def check_column(names: Sequence[str], source: str, flag: str) -> Check:
    """Returns a function that checks whether a name is a column of the table."""

    def check(name: str) -> str:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            raise InputError(
                Code.DATA_INVALID,
                f"{source}: has no column {name!r}. Choose one of "
                f"{list_names([make_printable(other) for other in near or names])} for {flag}.",
            )
        return name

    return check


def check_party_name(name: str) -> str:
    """Returns the name if it is a valid party name. Raises InputError otherwise."""
    from vfl.certs.authority import check_name

    check_name(name)
    return name


def check_address(text: str) -> str:
    """Returns the text if it is a valid ``host:port``. Raises InputError otherwise."""
    try:
        host_and_port(text)
    except ValueError as error:
        raise InputError(Code.CONFIG_INVALID, str(error)) from None
    return text


# --- questions
# ------------------------------------------------------------


def ask_table(flags: Flags) -> tuple[DataSettings, tuple[str, ...]]:
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

    source = get_answer(
        flags.data,
        "--data",
        "Your table",
        check_readable,
        default=tables_here[0] if len(tables_here) == 1 else "",
    )
    return parse_settings(source, flags.sets), read_names(source)


def stem(source: str) -> str:
    """Returns a file's name without its suffix if it is a valid party name; otherwise ''."""
    try:
        return check_party_name(Path(source).name.partition(".")[0])
    except InputError:
        return ""


def ask_name(value: str | None, flag: str, question: str, default: str) -> str:
    """Returns a party's name, from the flag or the person."""
    return get_answer(value, flag, question, check_own_name, default=default, sure=True)


def check_own_name(name: str) -> str:
    """Returns a party's name if it is valid, and its party file is not the recipe's file. Raises
    InputError otherwise.
    """
    if f"{check_party_name(name)}.toml".casefold() == RECIPE:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{name!r}: the file of a party of this name would replace the recipe {RECIPE}. Give "
            "another --active or --passive.",
        )
    return name


def ask_passives(values: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names of the passive parties. A value may have several names with commas. Raises
    InputError.
    """

    def check(text: str) -> str:
        names = [name.strip() for name in text.split(",")]
        return ",".join(check_own_name(name) for name in names)

    text = get_answer(
        ",".join(values) or None, "--passive", "Names of the other parties, with commas", check
    )
    return tuple(text.split(","))


def ask_label(flags: Flags, names: Sequence[str], table: DataSettings) -> str:
    """Returns the name of the label column, from the option or the user. Raises InputError."""
    names = [name for name in names if name not in flags.drop]
    check = check_column(names, hide_passwords(table.source), "--label")
    if flags.label is not None:
        return check(flags.label)
    _show_columns(None, names)
    candidates = find_label_candidates(table, names)
    hint = (
        f"with two to twenty different values: {list_names(list(map(make_printable, candidates)))}"
        if candidates
        else ""
    )
    if hint and at_terminal():
        click.echo(f"Columns {hint}", err=True)
    question, likely = "The column to predict", rules.guess_label(names, candidates)
    return get_answer(
        None, "--label", question, check, default=likely, hint=f"columns {hint}" if hint else ""
    )


def ask_id(
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
    values, check = make_reader(table), check_column(names, source, "--id")
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
    if not at_terminal():
        _refuse_dropped_id(guess, rules.guess_id(dropped, lambda name: values((name,))), source)
    if not guess.name and all(values((name,)) is None for name in names):
        # No column can be read. This call raises the reason, for example that there are no rows.
        read_values(table, (names[0],))
    if not guess.name and not at_terminal():
        raise InputError(
            Code.DATA_INVALID,
            f"{source}: no column has a different value in each row, as an id must. Name the id "
            "column with --id.",
        )
    _show_columns(None, names)
    return (get_answer(None, "--id", "The id column", check, default=guess.name),), values


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


def check_drop(flags: Flags, names: Sequence[str], source: str) -> tuple[str, ...]:
    """Returns the columns to leave out. Raises InputError for an unknown column, the id or the
    label.
    """
    check = check_column(names, source, "--drop")
    for flag, roles in (("--id", flags.id), ("--label", (flags.label,))):
        conflict = next((name for name in flags.drop if name in roles), None)
        if conflict is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"--drop: leaves out column {conflict!r}, which {flag} names. Remove one of the "
                "two.",
            )
    return tuple(check(name) for name in flags.drop)


def ask_own_name(recipe: Recipe, path: Path, value: str | None) -> str:
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
    return get_answer(
        value,
        "--name",
        f"Which party is this ({list_names(names)})",
        check,
        default=default,
        sure=True,
    )


def ask_server(flags: Flags) -> str:
    """Returns the server's address, from the flags or the person."""
    question = "The server's address, host:port"
    return get_answer(flags.server, "--server", question, check_address, default=HERE, sure=True)


def ask_addresses(flags: Flags, active: str) -> tuple[str, str | None]:
    """Returns the server's address and the active party's address. The second is None if the server
    is on this machine and --advertise is not given.
    """
    server = ask_server(flags)
    if flags.advertise is None and is_here(server):
        return server, None
    question = f"The address of {active} for the others, host:port"
    proposal = f"{active}.example.org:7001"
    return server, get_answer(
        flags.advertise, "--advertise", question, check_address, default=proposal
    )


def _show_columns(value: str | None, names: Sequence[str]) -> None:
    if value is None and at_terminal():
        click.echo(f"Columns: {', '.join(map(make_printable, names))}", err=True)


def is_here(address: str) -> bool:
    """Returns whether an address is on this machine."""
    host = host_and_port(address)[0]
    return host in ("localhost", "::1") or host.startswith("127.")

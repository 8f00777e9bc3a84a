"""The keys of ``[data]`` for ``--set``, and the options for keys that an error names."""

from __future__ import annotations

import contextlib
import difflib
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port, list_names, make_printable

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
_OTHER_FLAGS = {"source": "--data", "id": "--id", "label": "--label", "drop": "--drop"}
_NAMED = re.compile(r'\bdata\.([a-z_]+)(?:(?: =| to) (?:(\d+)|"([^"]*)")(?! or "))?')


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

"""Gets answers from a flag of the command or a question at a terminal, or raises an error about the
missing flag.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Callable, Sequence

import click

from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port, list_names, make_printable

Check = Callable[[str], str]


def at_terminal() -> bool:
    """Returns whether there is somebody to ask."""
    return sys.stdin.isatty()


def answer(
    value: str | None,
    flag: str,
    question: str,
    check: Check,
    *,
    default: str = "",
    sure: bool = False,
    hint: str = "",
) -> str:
    """Returns the value of the flag or, at a terminal, the user's answer.

    Args:
        value: the flag's value; None if it is missing.
        flag: its name, for the error.
        question: the question at a terminal.
        check: converts an answer. It raises InputError for a wrong one; the question is then asked
            again.
        default: the proposal; '' for none.
        sure: whether to use the proposal without asking if there is no terminal.
        hint: the possible answers, for the error about the missing flag.

    Raises InputError if the flag is wrong, or is missing without a terminal.
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


def among(names: Sequence[str], source: str, flag: str) -> Check:
    """Returns a check that a name is a column of the table."""

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


def party_name(name: str) -> str:
    """Checks a party's name. Raises InputError."""
    from vfl.certs.authority import check_name

    check_name(name)
    return name


def address(text: str) -> str:
    """Checks ``host:port``. Raises InputError."""
    try:
        host_and_port(text)
    except ValueError as error:
        raise InputError(Code.CONFIG_INVALID, str(error)) from None
    return text

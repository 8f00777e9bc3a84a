"""Gets a value from an option of the command or from a question at the terminal. Without both, it
raises an error about the missing option.
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

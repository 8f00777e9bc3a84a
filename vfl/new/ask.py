"""Answers: a flag of the command, or a question at a terminal, or a sentence about the missing
flag.
"""

from __future__ import annotations

import difflib
import shlex
import sys
from collections.abc import Callable, Sequence

import click

from vfl_common.errors import Code, InputError
from vfl_common.text import host_and_port, listed, printable

Check = Callable[[str], str]


def at_terminal() -> bool:
    """Whether there is somebody to ask."""
    return sys.stdin.isatty()


def answer(
    given: str | None,
    flag: str,
    question: str,
    check: Check,
    *,
    default: str = "",
    sure: bool = False,
    hint: str = "",
) -> str:
    """Returns what the flag says or, at a terminal, what the person there says.

    Args:
        given: the flag's value, None if it is missing.
        flag: its name, for the sentence about it.
        question: for the person.
        check: returns an answer as it is used. It raises InputError for a wrong one; the question
            is then asked again.
        default: the proposal, '' for none.
        sure: whether to take the proposal if nobody can be asked.
        hint: what a person chooses from, for the sentence about the missing flag.

    Raises InputError if the flag is wrong, or is missing and nobody can be asked.
    """
    if given is not None:
        return check(given)
    if at_terminal():

        def checked(text: str) -> str:
            try:
                return check(text.strip())
            except InputError as error:
                raise click.UsageError(str(error)) from None

        found: str = click.prompt(question, default=default or None, value_proc=checked, err=True)
        return found
    if default and sure:
        return check(default)
    such = f", such as {flag} {shlex.quote(default)}" if default else ""
    chosen = f" ({hint})" if hint else ""
    text = f"{flag} is missing: give it{such}{chosen}, or call this at a terminal to be asked"
    raise InputError(Code.CONFIG_INVALID, text)


def among(names: Sequence[str], source: str, flag: str) -> Check:
    """Returns the check that a name is a column of the table."""

    def check(name: str) -> str:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
            found = listed([printable(each) for each in near or names])
            hint = f"the nearest: {found}" if near else f"it has {found}"
            raise InputError(
                Code.DATA_INVALID, f"{source}: has no column {name!r}, which {flag} names; {hint}"
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

"""Adds deprecated names of commands and flags, which still work but print a warning."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def _warn(old: str, new: str) -> None:
    click.echo(f"warning: {old} is deprecated. Use {new}.", err=True)


def make_old_name(command: click.Command, old: str, program: str) -> click.Command:
    """Returns a hidden alias ``old`` of a command. The alias prints a warning and runs the
    command.
    """
    alias, run = copy.copy(command), command.callback
    if run is None:
        raise ValueError(f"command {command.name} has no callback")

    @wraps(run)
    def warn_and_run(*args: Any, **kwargs: Any) -> Any:
        _warn(f"`{program} {old}`", f"`{program} {command.name}`")
        return run(*args, **kwargs)

    alias.name, alias.hidden, alias.callback = old, True, warn_and_run
    return alias


def flag_with_old_name(new: str, old: str, text: str) -> Callable[[Decorated], Decorated]:
    """Returns a decorator that adds a flag, such as ``--student``, and a hidden flag with its old
    name, which prints a warning. ``text``: the flag's help.
    """

    def read_old_flag(context: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            _warn(old, new)
            context.meta[f"vfl{old}"] = True

    def read_flag(context: click.Context, _: click.Parameter, value: bool) -> bool:
        return value or bool(context.meta.get(f"vfl{old}"))

    def add_flags(command: Decorated) -> Decorated:
        # The old flag is eager, so that click reads it before the new flag.
        hidden = click.option(
            old,
            is_flag=True,
            hidden=True,
            is_eager=True,
            expose_value=False,
            callback=read_old_flag,
        )
        return click.option(new, is_flag=True, help=text, callback=read_flag)(hidden(command))

    return add_flags

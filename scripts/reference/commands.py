"""The page of a program's commands: usage, help, arguments and options of each, from click."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from textwrap import dedent

import click


def page(program: str, group: click.Command) -> str:
    """Returns a section for a program, and one for each of its commands."""
    return "\n".join(_sections(program, group, click.Context(group, info_name=program), 2))


def _sections(
    path: str, command: click.Command, context: click.Context, level: int
) -> Iterator[str]:
    yield f"{'#' * level} {path}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield _help(command)
    options = [
        each for each in command.params if isinstance(each, click.Option) and not each.hidden
    ]
    if options:
        lines = [_option(each, context) for each in options]
        yield "| option | what |\n| --- | --- |\n" + "".join(f"| {a} | {b} |\n" for a, b in lines)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                inner = click.Context(below, info_name=name, parent=context)
                yield from _sections(f"{path} {name}", below, inner, min(level + 1, 4))


def _help(command: click.Command) -> str:
    """Returns the help text; a block that click would not wrap becomes a block of code."""
    found = []
    # Two such blocks may follow one another without an empty line.
    text = inspect.cleandoc(command.help or "").replace("\n\b\n", "\n\n\b\n")
    for block in dedent(text).replace("\n\n\n", "\n\n").split("\n\n"):
        if block.startswith("\b\n"):
            # An example may stand on the line of its title.
            block = block.replace("\b\nExample: ", "\b\nExample:\n  ")
            title, *lines = block.removeprefix("\b\n").split("\n")
            if title.endswith(":") and all(line.startswith(" ") for line in lines):
                found.append(f"{title}\n")
            else:
                lines = [title, *lines]
            code = dedent("\n".join(lines))
            found.append(f"```text\n{code}\n```\n")
        else:
            found.append(f"{block}\n")
    return "\n".join(found)


def _option(option: click.Option, context: click.Context) -> tuple[str, str]:
    record = option.get_help_record(context)
    names, text = record if record is not None else (", ".join(option.opts), option.help or "")
    said = " ".join(text.split()).replace("[", "\\[").replace("]", "\\]")
    return f"`{names}`".replace("|", "\\|"), said.replace("|", "\\|")

"""The command group of a program, to which other packages add commands with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from vfl_common.errors import Code, InputError


class PluginGroup(click.Group):
    """A group with its own commands and the commands that packages add as entry points.

    Args:
        entry_point_group: The group of the entry points, such as ``vfl.commands``.
        modules: {command: "module:function"} of the program's own commands that are imported when
            they are listed or called.
    """

    def __init__(
        self, *args: Any, entry_point_group: str, modules: Mapping[str, str] = {}, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._group, self._modules = entry_point_group, modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        own_names = {*super().list_commands(ctx), *self._modules}
        return sorted({*own_names, *(entry.name for entry in self._entry_points())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self._modules:
            module, _, name = self._modules[cmd_name].partition(":")
            own_command: click.Command = getattr(import_module(module), name)
            return own_command
        return super().get_command(ctx, cmd_name) or self._load_command(cmd_name)

    def _entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self._group))

    def _load_command(self, name: str) -> click.Command | None:
        entry_point = next((entry for entry in self._entry_points() if entry.name == name), None)
        if entry_point is None:
            return None
        try:
            command = entry_point.load()
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"the command {name!r} of {entry_point.value} cannot be loaded "
                f"({type(error).__name__}: {error}). Reinstall or remove it.",
            ) from error
        if not isinstance(command, click.Command):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{entry_point.value}: must be a click command (got {type(command).__name__}). "
                f"Correct its entry point {self._group}.",
            )
        return command

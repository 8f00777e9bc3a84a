"""Finds methods, encoders, codecs and other plug-ins by name: in our own packages, among the
plug-ins of one run, or as entry points of other projects.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import pkgutil
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from vfl_common.errors import Code, InputError, VflError

T = TypeVar("T")

log = logging.getLogger(__name__)

_OURS = (
    "torch",
    "vfl",
    "vfl_common",
    "vfl_leaks",
    "vfl_papers",
    "vfl_party",
    "vfl_serve",
    "vfl_server",
)
# For the top-level module of each loaded plug-in: the distribution that it comes from.
_loaded: dict[str, str] = {}

# For each group (without ``vfl.``), the plug-in objects by name.
RunPlugins = Mapping[str, Mapping[str, Any]]
# The groups of plug-ins that a run accepts as objects.
GROUPS = (
    "attacks",
    "codecs",
    "combinations",
    "encoders",
    "losses",
    "methods",
    "metrics",
    "policies",
    "sources",
    "tops",
    "transforms",
)


@dataclass(frozen=True)
class _Scope:
    """The plug-ins of one run, and the makers of the loaded ones, as in ``_loaded``."""

    plugins: RunPlugins = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)


# Each run has its own scope: each thread, and each party of a run in one process, may have other
# plug-ins.
_SCOPE: ContextVar[_Scope] = ContextVar("plug-ins of a run", default=_Scope())  # noqa: B039


@contextlib.contextmanager
def use_plugins(plugins: RunPlugins) -> Iterator[None]:
    """Lets the block find ``plugins`` by name, in addition to built-in and installed plug-ins."""
    token = _SCOPE.set(_Scope(plugins))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def get_run_plugins() -> RunPlugins:
    """Returns the plug-ins of the enclosing ``use_plugins`` block; {} outside of such a block."""
    return _SCOPE.get().plugins


@dataclass(frozen=True)
class PlugIns:
    """The plug-ins of one group, which other projects offer as entry points.

    Args:
        group: The name of the group.
        what: The word for a plug-in of the group in error messages.
        ours: The names of the built-in exports, for hints.
    """

    group: str
    what: str
    ours: tuple[str, ...] = field(default=(), kw_only=True)

    def names(self) -> list[str]:
        """Returns all known names, sorted."""
        return sorted(
            {*self.ours, *self._get_plugins(), *(entry.name for entry in self._list_entry_points())}
        )

    def is_ours(self, name: str) -> bool:
        """Returns whether the export of that name is built in."""
        return name in self.ours

    def load(self, name: str, where: str) -> Any:
        """Returns the run's plug-in of that name, or else imports the export of an entry point.

        Raises InputError, which names ``where``, if there is no such plug-in or if the import
        fails.
        """
        if name in self._get_plugins():
            return self._load_run_plugin(name)
        entry = self._find_entry_point(name)
        if entry is None:
            names = self.names()
            close_names = difflib.get_close_matches(name, names, n=1)
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: unknown {self.what} {name!r}. Did you mean {close_names[0]!r}?"
                if close_names
                else f"{where}: unknown {self.what} {name!r}. Choose one of: "
                f"{', '.join(names) or 'none'}.",
            )
        _loaded[_get_root(entry.module)] = (
            entry.dist.name if entry.dist is not None else entry.value
        )
        try:
            return entry.load()
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the plug-in {entry.value} cannot be loaded: it failed "
                f"{describe_failure(error)}. Reinstall or remove it.",
            ) from error

    def version(self, name: str) -> dict[str, str]:
        """Returns {``group:name``: ``distribution version``} of an installed plug-in; {} for other
        names, because built-in exports and the run's plug-ins have no version.
        """
        entry = self._find_entry_point(name)
        if entry is None:
            return {}
        distribution = entry.dist
        return {
            f"{self.group}:{name}": f"{distribution.name} {distribution.version}"
            if distribution is not None
            else "unknown"
        }

    def make(self, name: str, where: str, wanted: type[T], *args: Any) -> T:
        """Loads the export of that name, calls it with ``args``, and checks that it returns a
        ``wanted``.

        Raises InputError, which names ``where`` and the export, if the export cannot be loaded,
        fails, or returns an object of another type.
        """
        export = self.load(name, where)
        try:
            instance = export(*args)
        except VflError:
            raise
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the {self.what} {name!r} cannot be created: it failed "
                f"{describe_failure(error)}. Correct the plug-in.",
            ) from error
        return self.check_type(instance, name, where, wanted)

    def check_type(self, made: object, name: str, where: str, wanted: type[T]) -> T:
        """Returns ``made``. Raises InputError if ``made`` is not of the type ``wanted``."""
        if not isinstance(made, wanted):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the {self.what} {name!r} must return a {wanted.__name__} (got "
                f"{type(made).__name__}). Correct the plug-in.",
            )
        return made

    def _list_entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.group))

    def _get_plugins(self) -> Mapping[str, Any]:
        return get_run_plugins().get(self.group.removeprefix("vfl."), {})

    def _load_run_plugin(self, name: str) -> Any:
        """Returns the run's plug-in of that name. Raises InputError if a built-in export has the
        same name.
        """
        if self.is_ours(name):
            group = self.group.removeprefix("vfl.")
            raise InputError(
                Code.CONFIG_INVALID,
                f"plugins: {group}: the {self.what} {name!r} already exists. Choose another name.",
            )
        export = self._get_plugins()[name]
        for root in _list_root_modules(export):
            _SCOPE.get().makers[root] = "of this notebook or script" if root == "__main__" else root
        return export

    def _find_entry_point(self, name: str) -> EntryPoint | None:
        if name in self.ours or name in self._get_plugins():
            return None
        return next((entry for entry in self._list_entry_points() if entry.name == name), None)


@contextlib.contextmanager
def name_plugin_errors() -> Iterator[None]:
    """Converts an error in a plug-in's code to an InputError that names the plug-in, and logs the
    traceback. Other errors of the block are raised unchanged.
    """
    try:
        yield
    except VflError:
        raise
    except Exception as error:
        makers = _get_makers()
        maker = next(
            (makers[root] for root, _ in reversed(_list_frames(error)) if root in makers), None
        )
        if maker is None:
            raise
        log.exception("the plug-in %s failed", maker, extra={"event": "plug-in"})
        raise InputError(
            Code.CONFIG_INVALID,
            f"the plug-in {maker} failed {describe_failure(error)}. Correct the plug-in.",
        ) from error


def describe_failure(error: Exception) -> str:
    """Returns the place and the message of an error, such as ``in my_model.py, line 12: ValueError:
    …``.

    The place is the last line of a plug-in's code, or else of other code outside torch and this
    project. Without such a line the result is ``with ValueError: …``.
    """
    message = next(iter(f"{type(error).__name__}: {error}".splitlines()), "")
    lines, makers = _list_frames(error), _get_makers()
    plugin_lines = [line for root, line in lines if root in makers] or [
        line for root, line in lines if root not in _OURS
    ]
    return f"{plugin_lines[-1]}: {message}" if plugin_lines else f"with {message}"


def _list_frames(error: Exception) -> list[tuple[str, str]]:
    """Returns the top-level module and the place, as text, of each frame of a traceback, outermost
    first.
    """
    return [
        (
            _get_root(frame.f_globals.get("__name__", "")),
            f"in {Path(frame.f_code.co_filename).name}, line {number}",
        )
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]


def _get_makers() -> dict[str, str]:
    return _loaded | _SCOPE.get().makers


def _list_root_modules(plugin: Any) -> set[str]:
    """Returns the top-level modules of an object's type and of its attributes' types."""
    attributes = (
        vars(plugin).values()
        if not isinstance(plugin, type) and hasattr(plugin, "__dict__")
        else ()
    )
    module_names = [getattr(part, "__module__", None) for part in (plugin, *attributes)]
    return {_get_root(module) for module in module_names if isinstance(module, str)} - {
        *_OURS,
        "builtins",
        "",
    }


def _get_root(module: str) -> str:
    return module.partition(".")[0]


@dataclass(frozen=True)
class Registry(PlugIns):
    """The plug-ins of one group: built-in modules of a package, and entry points of other projects.

    Args:
        package: The name of the package, which is imported when it is first needed.
        attribute: The name of the export in each module. An entry point names the export itself.
        shelves: Whether the folders of the package only group modules, and are not exports
            themselves.
    """

    package: str
    attribute: str
    shelves: bool = False

    def names(self) -> list[str]:
        return sorted({*super().names(), *self._list_own_modules()})

    def load(self, name: str, where: str) -> Any:
        """Imports the export of that name; see ``PlugIns.load``. Built-in exports come first."""
        own_modules = self._list_own_modules()
        if name in own_modules and name not in self._get_plugins():
            return getattr(importlib.import_module(own_modules[name]), self.attribute)
        return super().load(name, where)

    def is_ours(self, name: str) -> bool:
        """Returns whether the export of that name is built in."""
        return name in self._list_own_modules()

    def version(self, name: str) -> dict[str, str]:
        return {} if name in self._list_own_modules() else super().version(name)

    def _list_own_modules(self) -> dict[str, str]:
        return _list_modules(self.package, self.shelves)


@cache
def _list_modules(package: str, shelves: bool) -> dict[str, str]:
    """Returns the full module names of a package by their short names. Cached."""
    modules: dict[str, str] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        path = f"{package}.{module.name}"
        if shelves and module.ispkg:
            modules |= _list_modules(path, False)
        else:
            modules[module.name] = path
    return modules

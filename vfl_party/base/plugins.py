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

_OURS = ("torch", "vfl", "vfl_common", "vfl_party", "vfl_server")
# {first part of a plug-in's module: its maker}.
_loaded: dict[str, str] = {}

# {group, without ``vfl.``: {name: the object that an entry point would name}}.
RunPlugins = Mapping[str, Mapping[str, Any]]
# The groups of which a run may be given some.
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
    """The plug-ins of one run, and, as in ``_loaded``, the makers of those that it has loaded."""

    plugins: RunPlugins = field(default_factory=dict)
    makers: dict[str, str] = field(default_factory=dict)


# A run has a scope, not the process: each thread, and each party of a run in one process, sees
# its own.
_SCOPE: ContextVar[_Scope] = ContextVar("plug-ins of a run", default=_Scope())  # noqa: B039


@contextlib.contextmanager
def use_plugins(plugins: RunPlugins) -> Iterator[None]:
    """Lets the block find ``plugins`` by their names, besides our own and the installed ones."""
    token = _SCOPE.set(_Scope(plugins))
    try:
        yield
    finally:
        _SCOPE.reset(token)


def get_run_plugins() -> RunPlugins:
    """Returns what the block of ``using`` around the caller was given; nothing outside of one."""
    return _SCOPE.get().plugins


@dataclass(frozen=True)
class PlugIns:
    """What other projects add to us: the entry points of one group.

    Args:
        group: the group's name.
        what: the word for one of them in error messages.
        ours: names of our own exports, for hints.
    """

    group: str
    what: str
    ours: tuple[str, ...] = field(default=(), kw_only=True)

    def names(self) -> list[str]:
        """Returns all known names, sorted."""
        return sorted({*self.ours, *self._get_plugins(), *(entry.name for entry in self._others())})

    def is_ours(self, name: str) -> bool:
        """Returns whether the export of that name is one of our own."""
        return name in self.ours

    def load(self, name: str, where: str) -> Any:
        """Returns what the run was given under that name, or else imports the export.

        Raises InputError that names ``where`` and the nearest name if there is none, or if the
        import fails.
        """
        if name in self._get_plugins():
            return self._of_run(name)
        entry = self._other(name)
        if entry is None:
            names = self.names()
            near = difflib.get_close_matches(name, names, n=1)
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: unknown {self.what} {name!r}. Did you mean {near[0]!r}?"
                if near
                else f"{where}: unknown {self.what} {name!r}. Choose one of: "
                f"{', '.join(names) or 'none'}.",
            )
        _loaded[_root(entry.module)] = entry.dist.name if entry.dist is not None else entry.value
        try:
            return entry.load()
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the plug-in {entry.value} cannot be loaded: it failed "
                f"{where_it_failed(error)}. Reinstall or remove it.",
            ) from error

    def version(self, name: str) -> dict[str, str]:
        """Returns {``group:name``: ``distribution version``} of a plug-in; nothing if the name is
        ours or unknown, or of what the run was given, which has no version.
        """
        entry = self._other(name)
        if entry is None:
            return {}
        made_by = entry.dist
        return {
            f"{self.group}:{name}": f"{made_by.name} {made_by.version}"
            if made_by is not None
            else "unknown"
        }

    def make(self, name: str, where: str, wanted: type[T], *args: Any) -> T:
        """Loads the export of that name, calls it with ``args``, and checks that it gives a
        ``wanted``.

        Raises InputError that names ``where`` and the export if it cannot be had, fails, or gives
        anything else.
        """
        export = self.load(name, where)
        try:
            made = export(*args)
        except VflError:
            raise
        except Exception as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the {self.what} {name!r} cannot be created: it failed "
                f"{where_it_failed(error)}. Correct the plug-in.",
            ) from error
        return self.check_type(made, name, where, wanted)

    def check_type(self, made: object, name: str, where: str, wanted: type[T]) -> T:
        """Returns ``made``. Raises InputError if it is not a ``wanted``."""
        if not isinstance(made, wanted):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: the {self.what} {name!r} must return a {wanted.__name__} (got "
                f"{type(made).__name__}). Correct the plug-in.",
            )
        return made

    def _others(self) -> list[EntryPoint]:
        return list(entry_points(group=self.group))

    def _get_plugins(self) -> Mapping[str, Any]:
        return get_run_plugins().get(self.group.removeprefix("vfl."), {})

    def _of_run(self, name: str) -> Any:
        """Returns what the run was given under that name. Raises InputError if it is the name of
        one of ours, which would come first.
        """
        if self.is_ours(name):
            group = self.group.removeprefix("vfl.")
            raise InputError(
                Code.CONFIG_INVALID,
                f"plugins: {group}: the {self.what} {name!r} already exists. Choose another name.",
            )
        export = self._get_plugins()[name]
        for root in _roots(export):
            _SCOPE.get().makers[root] = "of this notebook or script" if root == "__main__" else root
        return export

    def _other(self, name: str) -> EntryPoint | None:
        if name in self.ours or name in self._get_plugins():
            return None
        return next((entry for entry in self._others() if entry.name == name), None)


@contextlib.contextmanager
def name_plugin_errors() -> Iterator[None]:
    """Names the plug-in whose code an error of the block comes from; an error of ours is raised as
    it is.

    Raises InputError. The log gets the traceback.
    """
    try:
        yield
    except VflError:
        raise
    except Exception as error:
        makers = _makers()
        maker = next((makers[root] for root, _ in reversed(_lines(error)) if root in makers), None)
        if maker is None:
            raise
        log.exception("the plug-in %s failed", maker, extra={"event": "plug-in"})
        raise InputError(
            Code.CONFIG_INVALID,
            f"the plug-in {maker} failed {where_it_failed(error)}. Correct the plug-in.",
        ) from error


def where_it_failed(error: Exception) -> str:
    """Returns ``in my_model.py, line 12: ValueError: …``, with the last line of external code.

    That is a plug-in's, or else code that is neither torch's nor ours; ``with ValueError: …`` if
    there is none.
    """
    why = next(iter(f"{type(error).__name__}: {error}".splitlines()), "")
    lines, makers = _lines(error), _makers()
    theirs = [line for root, line in lines if root in makers] or [
        line for root, line in lines if root not in _OURS
    ]
    return f"{theirs[-1]}: {why}" if theirs else f"with {why}"


def _lines(error: Exception) -> list[tuple[str, str]]:
    """Returns the first part of each frame's module, and its line in words; the last one is where
    it was raised.
    """
    return [
        (
            _root(frame.f_globals.get("__name__", "")),
            f"in {Path(frame.f_code.co_filename).name}, line {number}",
        )
        for frame, number in traceback.walk_tb(error.__traceback__)
    ]


def _makers() -> dict[str, str]:
    return _loaded | _SCOPE.get().makers


def _roots(made: Any) -> set[str]:
    """Returns the first parts of the modules from which an object comes, or what it holds."""
    inside = vars(made).values() if not isinstance(made, type) and hasattr(made, "__dict__") else ()
    named = [getattr(part, "__module__", None) for part in (made, *inside)]
    return {_root(module) for module in named if isinstance(module, str)} - {*_OURS, "builtins", ""}


def _root(module: str) -> str:
    return module.partition(".")[0]


@dataclass(frozen=True)
class Registry(PlugIns):
    """A package in which every module, or folder, exports one thing; other projects add to it.

    Args:
        package: the package's name; it is imported when it is first looked at.
        attribute: the name of each module's export; an entry point names the export itself.
        shelves: the folders of the package contain the modules, and are not exports.
    """

    package: str
    attribute: str
    shelves: bool = False

    def names(self) -> list[str]:
        return sorted({*super().names(), *self._own()})

    def load(self, name: str, where: str) -> Any:
        """Imports the export of that name, as ``PlugIns.load``; our own come first."""
        own = self._own()
        if name in own and name not in self._get_plugins():
            return getattr(importlib.import_module(own[name]), self.attribute)
        return super().load(name, where)

    def is_ours(self, name: str) -> bool:
        """Returns whether the export of that name is one of our own."""
        return name in self._own()

    def version(self, name: str) -> dict[str, str]:
        return {} if name in self._own() else super().version(name)

    def _own(self) -> dict[str, str]:
        return _modules_of(self.package, self.shelves)


@cache
def _modules_of(package: str, shelves: bool) -> dict[str, str]:
    """Returns a package's modules by name. Reads its folder only once."""
    modules: dict[str, str] = {}
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        path = f"{package}.{module.name}"
        if shelves and module.ispkg:
            modules |= _modules_of(path, False)
        else:
            modules[module.name] = path
    return modules

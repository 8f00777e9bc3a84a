"""Finds methods, transforms, codecs and policies by name: as modules of our own rooms, or as others' entry points."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

from vfl_common.errors import Code, InputError, VflError

T = TypeVar("T")


@dataclass(frozen=True)
class Room:
    """A package in which every module, or folder, exports one thing.

    Args:
        package: the package; other projects add to it with entry points of ``group``.
        attribute: the name of each module's export; an entry point names the export itself.
        what: the word for it in error messages.
    """

    package: ModuleType
    group: str
    attribute: str
    what: str

    def names(self) -> list[str]:
        """Returns all known names, sorted."""
        own = {module.name for module in pkgutil.iter_modules(self.package.__path__)}
        return sorted(own | {each.name for each in self._others()})

    def load(self, name: str, where: str) -> Any:
        """Imports the export of that name; our own rooms come first.

        Raises InputError that names ``where`` and the nearest name if there is none, or if the import fails.
        """
        if any(module.name == name for module in pkgutil.iter_modules(self.package.__path__)):
            return getattr(importlib.import_module(f"{self.package.__name__}.{name}"), self.attribute)
        found = next((each for each in self._others() if each.name == name), None)
        if found is None:
            names = self.names()
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
            raise InputError(Code.CONFIG_INVALID, f"{where}: there is no {self.what} {name!r}; {hint}")
        try:
            return found.load()
        except Exception as error:
            text = f"{where}: the plug-in {found.value} cannot be loaded ({type(error).__name__}: {error})"
            raise InputError(Code.CONFIG_INVALID, f"{text}; reinstall or remove it") from error

    def make(self, name: str, where: str, wanted: type[T], *args: Any) -> T:
        """Loads the export of that name, calls it with ``args``, and checks that it gives a ``wanted``.

        Raises InputError that names ``where`` and the export if it cannot be had, fails, or gives anything else.
        """
        export = self.load(name, where)
        try:
            made = export(*args)
        except VflError:
            raise
        except Exception as error:
            text = f"{where}: the {self.what} {name!r} cannot be made ({type(error).__name__}: {error})"
            raise InputError(Code.CONFIG_INVALID, f"{text}; correct the plug-in") from error
        return self.checked(made, name, where, wanted)

    def checked(self, made: object, name: str, where: str, wanted: type[T]) -> T:
        """Returns ``made``. Raises InputError if it is no ``wanted``."""
        if not isinstance(made, wanted):
            text = f"{where}: the {self.what} {name!r} gives a {type(made).__name__}, and a {wanted.__name__} is wanted"
            raise InputError(Code.CONFIG_INVALID, f"{text}; correct the plug-in")
        return made

    def _others(self) -> list[EntryPoint]:
        return list(entry_points(group=self.group))

"""Recipes as values: read from a file, made from a dict, changed by key."""

from __future__ import annotations

import copy
import difflib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from vfl.library import cells
from vfl.simulation.federation import to_toml
from vfl.simulation.own_files import of_party_files
from vfl_common.config import recipe as schema
from vfl_common.config.base import parse
from vfl_common.config.kind_of_file import read_tables
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic

# The types that a call accepts as its recipe.
GivenRecipe: TypeAlias = "Recipe | Mapping[str, Any] | str | Path | Sequence[str | Path]"


class Recipe:
    """A recipe: what the parties of a run agree on, and, under ``simulate``, where their data are.

    It never changes; ``replace`` returns another one. ``docs/reference/recipe.md`` has every key.

    Examples:
        >>> recipe = Recipe.from_dict({
        ...     "name": "demo", "task": {"kind": "binary"},
        ...     "parties": [
        ...         {"name": "bank", "role": "active"},
        ...         {"name": "shop", "role": "passive"},
        ...     ],
        ...     "model": {"embedding_size": 8},
        ...     "phases": [{"kind": "splitnn", "epochs": 3}, {"kind": "evaluate"}],
        ... })
        >>> recipe.replace({"phases.splitnn.epochs": 5}, seed=3)
        Recipe('demo', seed 3, parties bank and shop, phases splitnn, evaluate)
    """

    def __init__(self, tables: Mapping[str, Any], base: Path, source: str) -> None:
        """Use ``load`` or ``from_dict``. ``base``: the folder of relative paths; ``source``: for
        messages.
        """
        self._tables, self.base, self._source = (
            cells.name_factories(_plain(dict(tables))),
            base,
            source,
        )
        self.settings = parse(schema.Recipe, self._tables, source)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads a TOML file; relative paths in it start at its folder. Raises VflError."""
        path = Path(path)
        return cls(read_tables(path, "recipe"), path.resolve().parent, str(path))

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], base: str | Path = ".") -> Recipe:
        """Makes a recipe from the tables of a file. ``base``: the folder of relative paths. Raises
        VflError.
        """
        if not isinstance(tables, Mapping):
            raise _not_a_recipe(tables)
        return cls(tables, Path(base).resolve(), "recipe")

    @classmethod
    def of(cls, given: GivenRecipe) -> Recipe:
        """Returns a recipe: as it is, or made from a dict, the path of a file, or the paths of all
        parties' files, whose tables, devices and policies are then those of ``simulate``. Raises
        VflError.
        """
        if isinstance(given, Recipe):
            return given
        if isinstance(given, str | Path):
            return cls.load(given)
        if isinstance(given, Mapping):
            return cls.from_dict(given)
        paths = list(given) if isinstance(given, list | tuple) else []
        if not paths or not all(isinstance(path, str | Path) for path in paths):
            raise _not_a_recipe(given)
        tables, base = of_party_files([Path(path) for path in paths])
        return cls(tables, base, "recipe")

    def to_dict(self) -> dict[str, Any]:
        """Returns a copy of the tables as they were written."""
        return copy.deepcopy(self._tables)

    def save(self, path: str | Path) -> None:
        """Writes a TOML file, which the commands take; relative paths then start at its folder.

        Raises VflError if it cannot be written, or if an encoder is a class that only this process
        has.
        """
        cells.refuse_here(self.settings, "a file")
        write_atomic(Path(path), to_toml(self._tables))

    def replace(self, changes: Mapping[str, Any] | None = None, /, **named: Any) -> Recipe:
        """Returns a recipe with other values.

        Args:
            changes: {key: value}; a dotted key goes into tables, a phase or a party goes by its
                name or number: ``{"phases.splitnn.optimizer.lr": 0.01, "parties.shop.features":
                True}``.
            named: keys of the recipe itself: ``seed=3``.

        Raises VflError if a key does not exist, or if the recipe is invalid with the new value.
        The settings of a phase are checked when the recipe runs.
        """
        tables = self.to_dict()
        for key, value in {**(changes or {}), **named}.items():
            _put(tables, key.split("."), value, key)
        return Recipe(tables, self.base, self._source)

    @property
    def name(self) -> str:
        """The recipe's name, with which its runs begin."""
        return self.settings.name

    @property
    def parties(self) -> tuple[str, ...]:
        """The parties' names, in the recipe's order."""
        return tuple(party.name for party in self.settings.parties)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self.settings == other.settings

    def __hash__(self) -> int:
        return hash(self.settings.digest())

    def __repr__(self) -> str:
        *others, last = self.parties
        names = f"{', '.join(others)} and {last}" if others else last
        phases = ", ".join(phase.name for phase in self.settings.phases)
        word = "parties" if others else "party"
        return f"Recipe({self.name!r}, seed {self.settings.seed}, {word} {names}, phases {phases})"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(to_toml(self._tables))}</pre>"


def _plain(value: Any) -> Any:
    """Copies tables, with the numbers and arrays of NumPy as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value if callable(value) else copy.deepcopy(value)


def _not_a_recipe(recipe: object) -> InputError:
    return InputError(
        Code.CONFIG_INVALID,
        f"recipe: must be a recipe (got {type(recipe).__name__}). Give vfl.Recipe, a dict of "
        "tables, the path of a file, or a list of all parties' files.",
    )


def _put(tables: dict[str, Any], keys: Sequence[str], value: Any, whole: str) -> None:
    """Puts ``value`` where the keys lead; tables on the way are made if they are missing."""
    at: Any = tables
    for place, key in enumerate(keys):
        last = place == len(keys) - 1
        if isinstance(at, list):
            number = _place(at, key, whole)
            if last:
                at[number] = value
                return
            at = at[number]
        elif isinstance(at, dict):
            if last:
                at[key] = value
                return
            at = at.setdefault(key, {})
        else:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: {whole}: {keys[place - 1]} is not a table. Give a key that exists.",
            )


def _place(entries: list[Any], key: str, whole: str) -> int:
    """Returns which entry of an array of tables has that name or number."""
    names = [
        str(entry.get("name", entry.get("kind"))) for entry in entries if isinstance(entry, dict)
    ]
    if key in names:
        return names.index(key)
    if key.isdecimal() and int(key) < len(entries):
        return int(key)
    near = difflib.get_close_matches(key, names, n=1)
    raise InputError(
        Code.CONFIG_INVALID,
        f"recipe: {whole}: unknown name {key!r}. Choose "
        f"{repr(near[0]) if near else 'one of ' + ', '.join(names)}.",
    )

"""The class ``Recipe``: recipes that are read from a file, made from a dict, or changed by key."""

from __future__ import annotations

import copy
import difflib
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from vfl.library import cells
from vfl.simulation.federation import combine_party_files, to_toml
from vfl_common.config import recipe as schema
from vfl_common.config.base import parse, read_tables
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic

# The types that a call accepts as its recipe.
GivenRecipe: TypeAlias = "Recipe | Mapping[str, Any] | str | Path | Sequence[str | Path]"


class Recipe:
    """A recipe: the settings that the parties of a run agree on, and, under ``simulate``, their
    data.

    A recipe is immutable; ``replace`` returns a new recipe. ``docs/reference/recipe.md`` lists all
    keys.

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
        """Use ``load`` or ``from_dict`` instead of this constructor.

        ``base``: the folder to which paths are relative. ``source``: the recipe's name in messages.
        """
        self._tables, self.base, self._source = (
            cells.name_factories(_copy_without_numpy(dict(tables))),
            base,
            source,
        )
        self.settings = parse(schema.Recipe, self._tables, source)

    @classmethod
    def load(cls, path: str | Path) -> Recipe:
        """Reads a TOML file. Paths in the file are relative to its folder. Raises VflError."""
        path = Path(path)
        return cls(read_tables(path, "recipe"), path.resolve().parent, str(path))

    @classmethod
    def from_dict(cls, tables: Mapping[str, Any], base: str | Path = ".") -> Recipe:
        """Makes a recipe from a dict with the same keys as a recipe file.

        ``base``: the folder to which paths are relative. Raises VflError.
        """
        if not isinstance(tables, Mapping):
            raise _make_type_error(tables)
        return cls(tables, Path(base).resolve(), "recipe")

    @classmethod
    def of(cls, given: GivenRecipe) -> Recipe:
        """Converts a recipe, a dict, the path of a recipe file, or the paths of all parties' files
        to a recipe. Party files give the data, devices and policies of ``simulate``. Raises
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
            raise _make_type_error(given)
        tables, base = combine_party_files([Path(path) for path in paths])
        return cls(tables, base, "recipe")

    def to_dict(self) -> dict[str, Any]:
        """Returns a copy of the tables as they were written."""
        return copy.deepcopy(self._tables)

    def save(self, path: str | Path) -> None:
        """Writes a TOML file for the commands. Relative paths are then relative to its folder.

        Raises VflError if the file cannot be written, or if an encoder is a class that cannot be
        imported from a module.
        """
        cells.require_importable(self.settings, "a file")
        write_atomic(Path(path), to_toml(self._tables))

    def replace(self, changes: Mapping[str, Any] | None = None, /, **named: Any) -> Recipe:
        """Returns a recipe with changed values.

        Args:
            changes: {key: value}. A dotted key is a path through tables. Phases and parties are
                named by their name or number: ``{"phases.splitnn.optimizer.lr": 0.01,
                "parties.shop.features": True}``.
            named: top-level keys of the recipe: ``seed=3``.

        Raises VflError if a key does not exist, or if the recipe is invalid with the new value.
        The settings of a phase are checked when the recipe runs.
        """
        tables = self.to_dict()
        for key, value in {**(changes or {}), **named}.items():
            _set_value(tables, key.split("."), value, key)
        return Recipe(tables, self.base, self._source)

    @property
    def name(self) -> str:
        """The recipe's name, which is part of the names of its runs."""
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


def _copy_without_numpy(value: Any) -> Any:
    """Returns a copy of tables in which Python numbers and lists replace the numbers and arrays of
    NumPy.
    """
    if isinstance(value, Mapping):
        return {str(key): _copy_without_numpy(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_copy_without_numpy(entry) for entry in value]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    return value if callable(value) else copy.deepcopy(value)


def _make_type_error(recipe: object) -> InputError:
    return InputError(
        Code.CONFIG_INVALID,
        f"recipe: must be a recipe (got {type(recipe).__name__}). Give vfl.Recipe, a dict of "
        "tables, the path of a file, or a list of all parties' files.",
    )


def _set_value(tables: dict[str, Any], keys: Sequence[str], value: Any, dotted: str) -> None:
    """Sets the value at a path of keys. Missing tables on the path are created.

    ``dotted``: the path as one text, for errors. Raises InputError.
    """
    table: Any = tables
    for depth, key in enumerate(keys):
        is_last = depth == len(keys) - 1
        if isinstance(table, list):
            number = _find_entry(table, key, dotted)
            if is_last:
                table[number] = value
                return
            table = table[number]
        elif isinstance(table, dict):
            if is_last:
                table[key] = value
                return
            table = table.setdefault(key, {})
        else:
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: {dotted}: {keys[depth - 1]} is not a table. Give a key that exists.",
            )


def _find_entry(entries: list[Any], key: str, dotted: str) -> int:
    """Returns the position of the entry with a name or number in an array of tables."""
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
        f"recipe: {dotted}: unknown name {key!r}. Choose "
        f"{repr(near[0]) if near else 'one of ' + ', '.join(names)}.",
    )

"""Prepares the data sets of tables, each once, with ``vfl prepare``."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import vfl
from benchmarks.papers.describe import Scale, Tables, resolved
from benchmarks.papers.plan import Variant
from vfl_common.config.base import read_toml
from vfl_common.config.data import DataSettings
from vfl_common.errors import VflError
from vfl_common.files import lock_folder, write_atomic
from vfl_papers.prepare import find_files, load

# What was prepared, and how it differs from the official data set. Written when it is whole.
_NOTES = "notes.json"


@dataclass(frozen=True)
class Base:
    """A prepared data set. ``tables``: parties, rows and simulate; ``notes``: how it differs from
    the official one.
    """

    tables: Tables
    notes: tuple[str, ...]


class Sources:
    """The data sets as their makers distribute them, in ``given``, and as prepared, in ``own``."""

    def __init__(self, given: Path, own: Path) -> None:
        self._given, self._own = given.absolute(), own.absolute()

    @property
    def folders(self) -> tuple[Path, Path]:
        """Both folders, with absolute paths."""
        return self._given, self._own

    def base(self, variant: Variant, scale: Scale) -> Base:
        """Returns a variant's data set, with absolute paths. Raises VflError if the files are not
        there.
        """
        data = variant.data
        how: dict[str, Any] = {
            "parties": variant.parties,
            "rows": resolved(data.rows, scale),
            "validation": data.shares[0],
            **resolved(variant.options, scale),
        }
        digest = hashlib.sha256(json.dumps([data.prepare, how], sort_keys=True).encode())
        folder = self._own / f"{data.prepare}-{digest.hexdigest()[:12]}"
        notes = folder / _NOTES
        # Several processes may want it.
        self._own.mkdir(parents=True, exist_ok=True)
        with lock_folder(self._own):
            if not notes.exists():
                made = vfl.prepare(data.prepare, self._given, folder, seed=0, replace=True, **how)
                write_atomic(notes, json.dumps(made.notes))
        tables = read_toml(folder / "recipe.toml")
        simulate, reading = dict(tables["simulate"]), resolved(data.reading, scale)
        labels_only = {e["name"] for e in tables["parties"] if e.get("features") is False}
        simulate["parties"] = {
            name: _absolute(each if name in labels_only else {**each, **reading}, folder)
            for name, each in simulate["parties"].items()
        }
        own = {"parties": tables["parties"], "rows": _division(tables), "simulate": simulate}
        return Base(own, tuple(json.loads(notes.read_text())))

    def missing(self, name: str) -> str | None:
        """Returns why a data set cannot be prepared; None if its files are there."""
        return missing(name, self._given)


def _division(tables: Tables) -> Tables:
    """Returns how a prepared recipe finds and divides rows, without what it says of a paper's
    labels.
    """
    return {k: v for k, v in tables.get("rows", {}).items() if k in ("align", "split")}


def _absolute(settings: Tables, folder: Path) -> Tables:
    """Returns a party's data settings with its paths from ``folder``."""
    whole = DataSettings.model_validate(settings).absolute(folder)
    return whole.model_dump(mode="json", exclude_defaults=True, exclude_none=True)


def missing(name: str, folder: Path) -> str | None:
    """Returns why a data set cannot be read from a folder; None if its files lie there."""
    try:
        _, files = find_files(load(name), folder)
    except VflError as error:
        return str(error)
    # A folder that may itself be the data set says nothing yet.
    if any(path.samefile(folder) for path in files.values()):
        return f"{folder}: may be the data set itself, or not"
    return None


def present(name: str, folder: Path) -> bool:
    """Returns whether a data set's files lie in a folder."""
    return missing(name, folder) is None

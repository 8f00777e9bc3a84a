"""Finds the tables and figures by their files: ``PAPER.NAME``, such as ``fedonce.table7``."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module

import click

from benchmarks.papers.describe import Table


@dataclass(frozen=True)
class Paper:
    """A paper. ``name``: as people call it; ``of``: authors and year. ``apart``: {what: the names
    of tables that have a page of their own}.
    """

    name: str
    of: str
    apart: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


PAPERS = {
    "fedhssl": Paper(
        "FedHSSL",
        "He et al. 2024",
        {"privacy": tuple(f"fedhssl.table{number}" for number in (6, 7, 11, 12))},
    ),
    "fedonce": Paper(
        "FedOnce",
        "Wu et al. 2022",
        {"privacy": ("fedonce.figure10", "fedonce.table6", "fedonce.table8")},
    ),
    "ssvfl": Paper("SS-VFL", "Castiglia et al. 2022"),
    "mocosfl": Paper("MocoSFL", "Li et al. 2023"),
}


def names() -> list[str]:
    """Returns the names of all tables and figures, paper by paper."""
    return [
        f"{paper}.{each.name}"
        for paper in PAPERS
        for each in pkgutil.iter_modules(import_module(f"benchmarks.papers.{paper}").__path__)
        if each.name.startswith(("table", "figure", "section"))
    ]


def load(name: str) -> Table:
    """Returns the table of a name."""
    found = import_module(f"benchmarks.papers.{name}").TABLE
    assert isinstance(found, Table), name
    return found


def chosen(wanted: tuple[str, ...]) -> list[str]:
    """Returns the names that are asked for, which may be those of papers; all if none is. Raises
    click.UsageError.
    """
    known = names()
    found: list[str] = []
    for each in wanted:
        fitting = [name for name in known if each in (name, name.partition(".")[0])]
        if not fitting:
            raise click.UsageError(
                f"there is no table {each!r}; `python -m benchmarks.papers --list` shows all names"
            )
        found += fitting
    return list(dict.fromkeys(found)) or known

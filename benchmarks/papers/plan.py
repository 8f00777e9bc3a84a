"""Makes studies of a table: one for each data set and each kind of column, in which only the number
of labels varies.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.papers.describe import (
    EVALUATE,
    Column,
    Data,
    Line,
    Scale,
    Table,
    Tables,
    has,
    labels_of,
    phases_of,
    resolved,
)
from benchmarks.studies import ACTIVE

# Options of ``vfl prepare`` that say how rows or columns are divided.
_DIVIDES = frozenset({"divide", "alpha", "deal"})
# Letters of a study's name, which begins the ids of its runs.
_MOST_NAME = 60


@dataclass(frozen=True)
class Variant:
    """Lines of a data set with columns that differ by their labels alone: one study.

    ``whole``: one party has all columns of the prepared data. ``number``: among the data set's
    variants.
    """

    data: Data
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    whole: bool = False
    number: int = 1

    @property
    def first(self) -> Column:
        return self.columns[0]

    @property
    def parties(self) -> int:
        """How many parties have features."""
        return 1 if self.whole else self.first.parties or self.data.parties

    @property
    def options(self) -> Tables:
        """Options of ``vfl.prepare``."""
        if self.whole:
            # How the columns are divided does not matter to a party that has them all.
            kept = {k: v for k, v in self.first.prepare.items() if k not in _DIVIDES}
            return {**self.data.options, **kept, **self.data.whole}
        found = {**self.data.options, **self.first.prepare}
        return found if self.first.host == 1 else found | {"active": self.first.host}

    def name(self, table: str) -> str:
        return f"{slug(table)}-{slug(self.data.name)}-{self.number}"[-_MOST_NAME:].strip("-._")


def slug(text: str) -> str:
    """Returns a name that a run may have."""
    plain = text.replace("*", "-star").replace("+", "-plus-").replace("%", "pc")
    return re.sub(r"[^A-Za-z0-9._]+", "-", plain).strip("-._") or "x"


def variants(table: Table) -> list[Variant]:
    """Returns the variants of a table, data set by data set."""
    found = []
    for data in table.data:
        number = 0
        for columns in _groups(table, data):
            lines = [line for line in table.lines if any(has(line, data, c) for c in columns)]
            for whole in (False, True):
                own = tuple(line for line in lines if is_whole(line, data) == whole)
                if own:
                    number += 1
                    with_host = replace(data, **data.of_host.get(columns[0].host, {}))
                    found.append(Variant(with_host, tuple(columns), own, whole, number))
    return found


def is_whole(line: Line, data: Data) -> bool:
    """Returns whether a line is of data that are prepared for one party."""
    return line.combined and bool(data.whole)


def _groups(table: Table, data: Data) -> list[list[Column]]:
    groups: list[list[Column]] = []
    for column in table.columns:
        if not any(has(line, data, column) for line in table.lines):
            continue
        like = next((group for group in groups if _alike(group[0], column)), None)
        if like is not None:
            like.append(column)
        else:
            groups.append([column])
    return groups


def _alike(first: Column, other: Column) -> bool:
    """Whether one study has both columns: they differ by labels, or by what is measured, alone."""
    keys = ("changes", "phases", "prepare", "parties", "host")
    same = all(getattr(first, key) == getattr(other, key) for key in keys)
    return same and first.has_labels == other.has_labels


def base_recipe(
    name: str, variant: Variant, scale: Scale, given: Tables, *, folds: bool = False
) -> Tables:
    """Returns the recipe of a study. ``given``: parties, rows and simulate of the prepared data.
    ``folds``: for cross-validation, which the official test rows take part in.
    """
    data = variant.data
    made = {
        "name": name,
        "task": data.task,
        "model": resolved(data.model, scale),
        "phases": [EVALUATE],
        "run": {"checkpoint_every": 1000},
        **copy.deepcopy({key: given[key] for key in ("parties", "rows", "simulate")}),
    }
    made["simulate"] = {"threads": 1} | made["simulate"]
    if folds:
        made["rows"].pop("split", None)
        for own in made["simulate"]["parties"].values():
            if (official := own.pop("split", None)) is not None:
                own["drop"] = [*own.get("drop", ()), official]
    if made["rows"].get("split") != "column":
        validation, test = data.shares
        made["rows"] |= {"validation": validation, "test": test}
    return made


@dataclass(frozen=True)
class Planned:
    """A method of a study. ``rate``: the one of the line's rates that it has."""

    line: Line
    rate: float | None
    name: str
    tables: Tables


def methods(table: Table, variant: Variant, scale: Scale, active: str = ACTIVE) -> list[Planned]:
    """Returns the methods of a variant's study. ``active``: the name of the active party."""
    found: list[Planned] = []
    for line in variant.lines:
        rates: Sequence[float | None] = resolved(line.rates, scale) or [None]
        for number, rate in enumerate(rates):
            name = slug(line.name) + ("" if number == 0 else f".r{number}")
            shares = number > 0 and bool(line.pretrain)
            tables = _method(table, variant, line, scale, line.name if shares else None)
            if line.alone:
                tables["alone"] = active
            if rate is not None:
                _set_rate(tables["finetune"], rate)
            found.append(Planned(line, rate, name, {"name": name, **tables}))
    return found


def _method(table: Table, variant: Variant, line: Line, scale: Scale, shared: str | None) -> Tables:
    """Returns a method's tables. ``shared``: the line whose pretraining it takes, if not its
    own.
    """
    data, column = variant.data, variant.first
    tables: Tables = {}
    of = shared or line.pretrain_of
    if of is not None:
        tables["pretrain_of"] = slug(of)
    elif line.pretrain:
        tables["pretrain"] = _phases(phases_of(line.pretrain, data), column, scale)
    if line.tower is not None:
        tables["tower"] = line.tower
    tables["finetune"] = _phases(phases_of(line.finetune or table.finetune, data), column, scale)
    if line.combined and not variant.whole:
        tables["combined"] = True
    own = line.changes(data) if callable(line.changes) else line.changes
    if changes := resolved({**data.changes, **column.changes, **own}, scale):
        tables["overrides"] = changes
    return tables


def _phases(phases: Sequence[Tables], column: Column, scale: Scale) -> list[Tables]:
    return [
        copy.deepcopy(resolved({**phase, **column.phases.get(phase["kind"], {})}, scale))
        for phase in phases
    ]


def _set_rate(phases: list[Tables], rate: float) -> None:
    phases[0]["optimizer"] = {**phases[0].get("optimizer", {}), "lr": rate}


def study(
    table: Table,
    variant: Variant,
    scale: Scale,
    seeds: Sequence[int],
    planned: Sequence[Planned],
) -> Tables:
    """Returns a variant's study, but for its name and recipe. ``planned``: its methods."""
    labels = [labels_of(each, variant.data, scale) for each in variant.columns]
    folds = resolved(table.folds, scale)
    made: Tables = {
        "seeds": list(seeds),
        "metric": variant.data.metric,
        "methods": [each.tables for each in planned],
    }
    if labels[0] is not None:
        made["labels"] = list(dict.fromkeys(labels))
    return made | ({"folds": folds} if folds is not None else {})


def active_of(given: Tables) -> str:
    """Returns the name of the active party."""
    names = [each["name"] for each in given["parties"] if each["role"] == "active"]
    return str(names[0])


def without_data(variant: Variant) -> Tables:
    """Returns parties, rows and simulate of a data set that is not there, to check a plan."""
    dealt = variant.data.dealt
    names = [f"passive{number}" for number in range(1, variant.parties + dealt)]
    roster: list[Tables] = [
        {"name": ACTIVE, "role": "active"} | ({"features": False} if dealt else {})
    ]
    roster += [{"name": each, "role": "passive"} for each in names]
    # Many data sets have official test rows.
    rows = {"align": "none" if dealt else "digest", "split": "column"}
    each_has = {"source": "absent.csv", "id": "id", "split": "split"}
    own: Tables = {each: {**each_has} for each in names} | {ACTIVE: {**each_has, "label": "y"}}
    return {"parties": roster, "rows": rows, "simulate": {"parties": own}}


def work(table: Table, scale: Scale, rows: int) -> float:
    """Returns how many rows all runs of a table pass through an encoder, in the order of magnitude.

    ``rows``: those of a data set for which the scale says none.
    """
    return sum(_row_passes(table, each, scale, rows) for each in variants(table))


def _row_passes(table: Table, variant: Variant, scale: Scale, rows: int) -> float:
    held: int = resolved(variant.data.rows, scale) or rows
    folds: int = resolved(table.folds, scale) or 1
    times = len(resolved(table.seeds, scale)) * folds
    parties, total = variant.parties, 0.0
    for each in methods(table, variant, scale):
        for stage in ("pretrain", "finetune"):
            for phase in each.tables.get(stage, []):
                total += _passes(phase, held) * parties
    return total * times


def _passes(phase: Tables, rows: float) -> float:
    if "steps" in phase:
        return float(phase["steps"] * phase.get("batch_size", 64))
    times: int = phase.get("epochs") or phase.get("rounds") or 1
    return float(rows * times)

"""Describes a table or a figure of a paper: what is run, the paper's own numbers, and the rule by
which both are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vfl_common.summary import Summary

if TYPE_CHECKING:
    from benchmarks.papers.compute import Work
    from benchmarks.papers.rules import Claim
    from vfl_lab.studies.report import FineTuned

Tables = dict[str, Any]
Scale = Literal["paper", "small"]
SCALES: tuple[Scale, ...] = ("paper", "small")
# (data, line, column), by name.
Place = tuple[str, str, str]
EVALUATE: Tables = {"kind": "evaluate"}
# Metrics of which less is better.
_LOWER = ("rmse", "mae", "loss", "seconds", "bytes", "megabytes")


@dataclass(frozen=True)
class At:
    """A value that differs by scale."""

    paper: Any
    small: Any


def resolved(value: Any, scale: Scale) -> Any:
    """Returns a value with that of the scale in place of each ``At`` in it."""
    if isinstance(value, At):
        return resolved(getattr(value, scale), scale)
    if isinstance(value, Mapping):
        return {key: resolved(each, scale) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [resolved(each, scale) for each in value]
    return value


@dataclass(frozen=True)
class Data:
    """A data set of a table.

    Args:
        name: as the table shows it.
        prepare: the data set's name in ``vfl prepare``.
        task: the recipe's task.
        parties: how many parties share it.
        metric: of the test rows.
        model: the recipe's model.
        rows: how many rows are taken, at random; None for all. May be an ``At``.
        options: further options of ``vfl.prepare``.
        reading: settings of each party's data, beside those that ``vfl.prepare`` writes. May have
            an ``At``.
        changes: {key of the recipe: value}, as in a study.
        shares: of the rows, for validation and for testing; the latter only if the data set has
            no official test rows.
        whole: options of ``vfl.prepare`` with which one party has all columns; without them the
            parties' tables are joined.
        dealt: whether each passive party holds rows of its own, and the active one only labels.
        settings: what phases need to know of the data set; see ``Line``.
        needs: as in ``Line``.
        at: the scales that run it.
        stands_for: the paper's data sets in place of which this one is run; empty if the paper has
            it. It has no number in the paper.
        untrained: the metric that a network without training has at most (at least, where less is
            better), in the table's unit: cells at this level are not compared. May be an ``At``.
        of_host: {host: the fields that differ if that party, from 1, has the labels}.
    """

    name: str
    prepare: str
    task: Tables
    parties: int
    metric: str
    model: Tables
    rows: At | int | None = None
    options: Tables = field(default_factory=dict)
    reading: Tables = field(default_factory=dict)
    changes: Tables = field(default_factory=dict)
    shares: tuple[float, float] = (0.1, 0.2)
    whole: Tables = field(default_factory=dict)
    dealt: bool = False
    settings: Tables = field(default_factory=dict)
    stands_for: str = ""
    needs: str = ""
    at: tuple[Scale, ...] = SCALES
    untrained: At | float | None = None
    of_host: Mapping[int, Tables] = field(default_factory=dict)

    @property
    def lower(self) -> bool:
        """Whether less is better."""
        return self.metric.startswith(_LOWER)


Phases = Sequence[Tables]
# Phases that depend on the data set are a function of it.
OfData = Phases | Callable[[Data], Phases]


def phases_of(given: OfData, data: Data) -> list[Tables]:
    return [*(given(data) if callable(given) else given)]


@dataclass(frozen=True)
class Line:
    """A line of a table: a method. What is not given is the table's.

    Args:
        name: as the table shows it.
        finetune: its phases.
        pretrain: phases that one run makes for all numbers of labels.
        pretrain_of: the line whose pretraining this one shares.
        tower: start from only this of that pretraining's two encoders.
        alone: the active party trains by itself.
        combined: one party has all columns.
        changes: {key of the recipe: value}, or a function of the data set that returns them.
        rates: learning rates of the first phase of ``finetune``; that with the best mean of the
            metric on validation rows counts.
        only: the columns that the line has; empty for all.
        on: the data sets that it has; empty for all.
        needs: what the product lacked for it when the file was written, in words. Such a line is
            left out while its recipe is refused, and said so.
        at: the scales that run it.
    """

    name: str
    finetune: OfData = ()
    pretrain: OfData = ()
    pretrain_of: str | None = None
    tower: Literal["cross", "local"] | None = None
    alone: bool = False
    combined: bool = False
    changes: Tables | Callable[[Data], Tables] = field(default_factory=dict)
    rates: At | tuple[float, ...] = ()
    only: tuple[str, ...] = ()
    on: tuple[str, ...] = ()
    needs: str = ""
    at: tuple[Scale, ...] = SCALES


@dataclass(frozen=True)
class Seen:
    """A finished run, for a measure. ``folder``: of the fine-tuning run; ``settings``: of the data
    set.
    """

    result: FineTuned
    folder: Path
    summary: Summary
    metric: str
    settings: Tables = field(default_factory=dict)


# What a cell shows of a run; None if the run has no such number.
Measure = Callable[[Seen], float | None]


def of_test(seen: Seen) -> float | None:
    """Returns the data set's metric of the test rows."""
    return seen.result.value(seen.metric)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        name: as the table shows it.
        labels: how many rows are labelled.
        share: which share of the training rows is labelled, in place of ``labels``; their number is
            the data set's setting ``train``.
        changes: {key of the recipe: value}.
        phases: {kind of phase: changes of its settings}.
        prepare: options of ``vfl.prepare``, beside the data set's.
        parties: in place of the data set's.
        host: the number of the party that has the labels, from 1.
        measure: what the cells show.
        lower: whether less is better; None: as the data set's metric.
        needs, at: as in ``Line``.
    """

    name: str
    labels: At | int | None = None
    share: float | None = None
    changes: Tables = field(default_factory=dict)
    phases: Mapping[str, Tables] = field(default_factory=dict)
    prepare: Tables = field(default_factory=dict)
    parties: int | None = None
    host: int = 1
    measure: Measure = of_test
    lower: bool | None = None
    needs: str = ""
    at: tuple[Scale, ...] = SCALES

    @property
    def has_labels(self) -> bool:
        """Whether the column sets how many rows are labelled."""
        return self.labels is not None or self.share is not None

    @property
    def measures_other(self) -> bool:
        """Whether the cells show something else than the metric of the test rows."""
        return self.measure is not of_test


def labels_of(column: Column, data: Data, scale: Scale) -> int | None:
    """Returns how many rows are labelled; None for all."""
    if column.share is not None:
        return round(column.share * int(resolved(data.settings["train"], scale)))
    found: int | None = resolved(column.labels, scale)
    return found


# {data: {line: the paper's numbers, by column}}; None where the paper has none.
Figures = Mapping[str, Mapping[str, Sequence[float | None]]]
# The cells that a function computes: where, and a value for each seed.
Computed = Iterable[tuple[Place, Sequence[float]]]


@dataclass(frozen=True)
class Table:
    """A table or a figure.

    Args:
        place: how the paper calls it, such as ``Table 7``.
        title: what it compares, in a few words.
        data, lines, columns: of which the cells are made.
        figures: the paper's numbers, as it writes them.
        source: where they stand.
        claims: what the paper says of them, with the rules; declared before the first run.
        finetune: the phases of lines that have none of their own.
        small: what the scale ``small`` reduces.
        notes: where the runs differ from the paper, and why.
        seeds: of the runs.
        folds: for cross-validation.
        percent: whether the paper writes shares, such as accuracy, in per cent.
        digits: behind the point, as the table shows numbers.
        compute: fills the cells in place of a study.
        needs: what the product lacks for the whole table.
        runs_of: the name of the table whose runs this one has.
        ours: whether the table is the project's own study and not one of the paper.
    """

    place: str
    title: str
    data: tuple[Data, ...]
    lines: tuple[Line, ...]
    columns: tuple[Column, ...]
    figures: Figures
    source: str
    claims: tuple[Claim, ...]
    small: str
    finetune: OfData = ()
    notes: tuple[str, ...] = ()
    seeds: At | tuple[int, ...] = field(default_factory=lambda: At((1, 2, 3, 4, 5), (1, 2, 3)))
    folds: At | int | None = None
    percent: bool = False
    digits: int = 3
    compute: Callable[[Work], Computed] | None = None
    needs: str = ""
    runs_of: str = ""
    ours: bool = False

    def places(self) -> list[Place]:
        """Returns the cells that the table has."""
        return [
            (data.name, line.name, column.name)
            for data in self.data
            for line in self.lines
            for column in self.columns
            if has(line, data, column)
        ]

    def paper(self, place: Place) -> float | None:
        """Returns the paper's number of a cell; None if it has none."""
        data, line, column = place
        values = self.figures.get(data, {}).get(line)
        if values is None:
            return None
        return values[[each.name for each in self.columns].index(column)]


def unit_of(table: Table, data: Data, column: Column) -> float:
    """Returns by what a number of ours is multiplied to stand beside the paper's."""
    return 100.0 if table.percent and column.measure is of_test and not data.lower else 1.0


def digits_of(table: Table, data: Data) -> int:
    """Returns how many digits behind the point a data set's numbers have; errors are small."""
    return 4 if data.lower else table.digits


def run_at(table: Table, scale: Scale) -> Table:
    """Returns the part of a table that a scale runs."""
    return replace(
        table,
        data=tuple(each for each in table.data if scale in each.at),
        lines=tuple(each for each in table.lines if scale in each.at),
        columns=tuple(each for each in table.columns if scale in each.at),
    )


def has(line: Line, data: Data, column: Column) -> bool:
    """Returns whether a line has a cell for a data set in a column."""
    if column.host > (column.parties or data.parties):
        return False
    return (not line.only or column.name in line.only) and (not line.on or data.name in line.on)

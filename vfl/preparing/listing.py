"""Prints the data sets of ``vfl prepare --list``, their files, and the papers that use them."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from vfl.preparing.dataset import DataSet
from vfl.preparing.datasets import REGISTRY, load
from vfl.summary.table import format_size, new_table


def make_listing() -> Table:
    """Returns a table of all data sets."""
    table = new_table("Data sets of `vfl prepare`")
    for heading in ("name", "rows", "size", "needs", "used by"):
        table.add_column(heading, justify="right" if heading in ("rows", "size") else "left")
    for name in REGISTRY.names():
        table.add_row(*_make_row(name, load(name)))
    return table


def describe(name: str) -> Iterable[str]:
    """Yields the description of a data set, line by line. Raises InputError."""
    dataset = load(name)
    yield f"{dataset.title}: {dataset.rows:,} rows, {dataset.holds}."
    yield f"Published by {dataset.publisher}."
    for place, form in enumerate(dataset.forms):
        names = [f"{need.name}{' (optional)' if need.optional else ''}" for need in form.needs]
        unofficial = f", not the official files but {form.unofficial}" if form.unofficial else ""
        yield f"{'or' if place else 'Needs'}: {', '.join(names)}{unofficial}"
    for use in dataset.uses:
        says = dataset.divisions[use.division].says
        yield f"{use.paper} ({use.where}): {use.parties} parties, {says}. {use.silent}".strip()
    for key, division in dataset.divisions.items():
        yield f"--divide {key}: {division.says}"
    for key, (default, says) in dataset.options.items():
        yield f"--set {key}=…: {says}{f' [default: {default}]' if default != '' else ''}"
    yield f"Preparing it needs {dataset.memory} of memory, in addition to the program's own."


def _make_row(name: str, dataset: DataSet) -> tuple[str, str, str, str, str]:
    needs = [need.name for need in dataset.forms[0].needs if not need.optional]
    total = format_size(dataset.bytes) if dataset.bytes is not None else "–"
    uses = [f"{use.paper} {use.where}" for use in dataset.uses]
    return name, f"{dataset.rows:,}", total, "\n".join(needs), "\n".join(uses)

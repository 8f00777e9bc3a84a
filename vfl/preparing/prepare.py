"""Prepares a data set: reads its files, divides the rows, and writes tables and a recipe."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.preparing.asked import resolve
from vfl.preparing.content import Content, ContentPart, Rows, default_ids, require_classes
from vfl.preparing.datasets import load
from vfl.preparing.finding import find_files, list_differences
from vfl.preparing.making import RECIPE, SUMMARY, DataWriter, Progress, refuse_folder
from vfl.preparing.sampling import add_validation, draw_rows
from vfl.preparing.writing import PartyTable, SharedColumns


@dataclass(frozen=True)
class PreparedData:
    """The files that ``vfl.prepare`` has written.

    Args:
        recipe: The path of the recipe, for ``vfl.simulate``.
        parties: {party: path of its table}, the active party first.
        summary: The path of a page about the origin of the tables and the rows left out.
        notes: Sentences about differences from the official data set, which are also in the
            summary.
        official: Whether the tables contain all rows of the official files, unchanged.
        written: The rows, features and bytes of each table, in the order of ``parties``.
    """

    recipe: Path
    parties: dict[str, Path]
    summary: Path
    notes: tuple[str, ...]
    official: bool
    written: tuple[PartyTable, ...] = dataclasses.field(repr=False)


def prepare(
    name: str,
    source: str | Path,
    out: str | Path,
    *,
    parties: int | None = None,
    rows: int | None = None,
    seed: int = 0,
    paper: str | None = None,
    divide: str | None = None,
    deal: str | None = None,
    active: int = 1,
    validation: float | None = None,
    replace: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> PreparedData:
    """Makes the parties' tables and a recipe from the official files of a paper's data set.

    Nothing is downloaded. The same files, numbers and seed always give the same tables.

    Args:
        name: The name of the data set, as ``vfl prepare --list`` prints it.
        source: The folder with the official files.
        out: The folder to write, which must be empty or missing.
        parties: The number of parties with features. Default: as in the paper.
        rows: The number of rows to draw, with the same shares of classes and splits. Default: all.
        seed: The seed of all random draws.
        paper: The paper whose division and recipe are used, such as ``mocosfl``. Default: the first
            paper in the list.
        divide: The name of a division to use instead of the paper's.
        deal: The way to deal rows to clients: ``even``, ``classes:2`` or ``dirichlet:0.5``.
        active: The number of the party with the labels, from 1. It can be set only if all parties
            have the same rows.
        validation: The share of the training rows for validation, from 0 to less than 1. Default:
            as in the paper.
        replace: Whether to remove the files of an earlier call in ``out``.
        progress: A function that is called with the number of rows written so far, and the number
            of all rows.
        options: The data set's own settings.

    Raises VflError if the name is unknown, files are missing or damaged, or values do not fit the
    data set.
    """
    plan = resolve(
        name,
        load(name),
        parties=parties,
        seed=seed,
        paper=paper,
        divide=divide,
        deal=deal,
        active=active,
        validation=validation,
        options=options,
    )
    folder = Path(out)
    refuse_folder(folder, replace=replace)
    form, files = find_files(plan.dataset, Path(source))
    content = form.read(files, plan.request)
    require_classes(content, plan.dataset.task)
    file_differences = list_differences(form, files, content)
    notes = (*file_differences, *content.notes)
    used = draw_rows(content, rows, seed)
    if rows is not None and rows < len(content):
        notes += (f"{rows:,} of {len(content):,} rows were drawn with seed {seed}.",)
    ids = default_ids(len(content)) if content.ids is None else content.ids
    splits = add_validation(content, used, plan.validation, seed)
    reduced = _select(content, used)
    parts = [_renumber(part, used) for part in plan.division.make(reduced, plan.request)]
    beside = SharedColumns(ids, content.labels, splits)
    writer = DataWriter(plan, content, used, parts, beside, files, notes)
    written, notes = writer.write(folder, progress)
    tables = {part.name: folder / part.path.name for part in written}
    official = not file_differences and len(used) == len(content)
    return PreparedData(folder / RECIPE, tables, folder / SUMMARY, notes, official, tuple(written))


def _select(content: Content, used: Rows) -> Content:
    """Returns a data set that consists of the used rows only."""
    return dataclasses.replace(
        content,
        labels=content.labels[used],
        splits=None if content.splits is None else content.splits[used],
        ids=None if content.ids is None else content.ids[used],
        groups=None if content.groups is None else content.groups[used],
        blocks=lambda rows: content.blocks(used[rows]),
    )


def _renumber(part: ContentPart, used: Rows) -> ContentPart:
    """Converts the row numbers of a part, which count used rows, to row numbers of the source."""
    return part if part.rows is None else dataclasses.replace(part, rows=used[part.rows])

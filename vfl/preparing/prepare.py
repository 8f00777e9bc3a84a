"""Prepares a data set: finds, reads and divides its files, and writes what a run needs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vfl.preparing.asked import resolve
from vfl.preparing.content import Content, ContentPart, Rows, default_ids, require_classes
from vfl.preparing.datasets import load
from vfl.preparing.finding import differences, find
from vfl.preparing.making import RECIPE, SUMMARY, Making, Progress, refuse_folder
from vfl.preparing.sampling import draw_rows, with_validation
from vfl.preparing.writing import Beside, Written


@dataclass(frozen=True)
class PreparedData:
    """The files that ``vfl.prepare`` has written.

    Args:
        recipe: the recipe, for ``vfl.simulate``.
        parties: {party: its table}, the active party first.
        summary: a page about the origin of the tables, and what was left out.
        notes: differences from the official data set, and what was left out; also in the summary.
        official: whether these are all rows of the official files, unchanged.
        written: rows, features and bytes of each table, in the parties' order.
    """

    recipe: Path
    parties: dict[str, Path]
    summary: Path
    notes: tuple[str, ...]
    official: bool
    written: tuple[Written, ...] = dataclasses.field(repr=False)


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
        name: the data set, as ``vfl prepare --list`` prints it.
        source: the folder of its files.
        out: the folder to write, which must be empty or missing.
        parties: the number of parties with features. Default: as the paper.
        rows: the number of rows, drawn with the same shares of classes and splits. Default: all.
        seed: the seed of all draws.
        paper: the paper whose division and recipe are used, such as ``mocosfl``. Default: the first
            in the list.
        divide: the name of another division than the paper's.
        deal: how rows are dealt to clients: ``even``, ``classes:2`` or ``dirichlet:0.5``.
        active: the number of the party with the labels, from 1; only if all have the same rows.
        validation: the share of the training rows for validation, from 0 to less than 1. Default:
            as the paper.
        replace: whether to remove the files of an earlier call in ``out``.
        progress: called with the numbers of written and of all rows.
        options: the data set's own settings.

    Raises VflError: an unknown name, missing or damaged files, or values that do not fit the data
    set.
    """
    known = resolve(
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
    form, files = find(known.dataset, Path(source))
    content = form.read(files, known.request)
    require_classes(content, known.dataset.task)
    differ = differences(form, files, content)
    notes = (*differ, *content.notes)
    used = draw_rows(content, rows, seed)
    if rows is not None and rows < len(content):
        notes += (f"{rows:,} of {len(content):,} rows were drawn with seed {seed}.",)
    ids = default_ids(len(content)) if content.ids is None else content.ids
    splits = with_validation(content, used, known.validation, seed)
    reduced = _only(content, used)
    parts = [_in_source(part, used) for part in known.division.make(reduced, known.request)]
    making = Making(known, content, used, parts, Beside(ids, content.labels, splits), files, notes)
    written, notes = making.write(folder, progress)
    tables = {part.name: folder / part.path.name for part in written}
    official = not differ and len(used) == len(content)
    return PreparedData(folder / RECIPE, tables, folder / SUMMARY, notes, official, tuple(written))


def _only(content: Content, used: Rows) -> Content:
    """Returns the used rows as a data set, for dividing them."""
    return dataclasses.replace(
        content,
        labels=content.labels[used],
        splits=None if content.splits is None else content.splits[used],
        ids=None if content.ids is None else content.ids[used],
        groups=None if content.groups is None else content.groups[used],
        blocks=lambda rows: content.blocks(used[rows]),
    )


def _in_source(part: ContentPart, used: Rows) -> ContentPart:
    """Returns a part with the numbers that its rows have in the source."""
    return part if part.rows is None else dataclasses.replace(part, rows=used[part.rows])

"""Prepares a data set: reads its files, divides the rows, and writes tables and a recipe."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_common.text import list_names
from vfl_papers import images, tables
from vfl_papers.dataset import (
    TRAIN,
    VALIDATION,
    Array,
    Content,
    ContentPart,
    DataSet,
    Files,
    Form,
    Need,
    Rows,
    compute_md5,
    default_ids,
    require_classes,
)
from vfl_papers.making import RECIPE, SUMMARY, DataWriter, Progress, refuse_folder, resolve
from vfl_papers.writing import PartyTable, SharedColumns
from vfl_party.base.plugins import PlugIns
from vfl_party.base.seeds import derive_seed, draw_permutation


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


def find_files(dataset: DataSet, folder: Path) -> tuple[Form, Files]:
    """Returns the first form whose files are all in the folder or in its direct subfolders.

    Raises InputError with the names of the missing files and their publisher.
    """
    if not folder.is_dir():
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: no such folder. Give the folder with the files of {dataset.title}.",
        )
    candidates = [(form, _find_present(form, folder)) for form in dataset.forms]
    for form, files in candidates:
        if not _list_missing(form, files):
            return form, files
    # The error is about the most complete form, which the user probably means.
    form, files = max(candidates, key=lambda pair: len(pair[1]) / len(pair[0].needs))
    raise InputError(
        Code.FILE_INVALID,
        f"{folder}: {dataset.title} needs "
        f"{list_names([need.name for need in _list_missing(form, files)])}. Download from "
        f"{dataset.publisher}.",
    )


def list_differences(form: Form, files: Files, content: Content) -> list[str]:
    """Returns a sentence for each difference between the files found and the published files."""
    notes = [f"These are not the official files: {form.unofficial}."] if form.unofficial else []
    for need in form.needs:
        if need.name in files:
            notes += _compare_file(need, files[need.name])
    splits = [""] * len(content) if content.splits is None else content.splits.tolist()
    counts = Counter(splits)
    for split, rows in form.rows.items():
        if counts[split] != rows:
            what = f"{split} rows" if split else "rows"
            notes.append(f"The files have {counts[split]:,} {what} (published: {rows:,}).")
    return [*notes, *content.differs]


def _find_present(form: Form, folder: Path) -> dict[str, Path]:
    paths = {need.name: _find_path(need, folder) for need in form.needs}
    return {name: path for name, path in paths.items() if path is not None}


def _find_path(need: Need, folder: Path) -> Path | None:
    """Finds a file by one of its names, in the folder or otherwise in one of its subfolders."""
    names = (need.name, *need.others)
    direct = [path for path in (folder / name for name in names) if _has_kind(need, path)]
    if direct:
        return direct[0]
    nested = [
        path for name in names for path in sorted(folder.glob(f"*/{name}")) if _has_kind(need, path)
    ]
    if len({path.parent for path in nested}) > 1:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: {need.name} is in {list_names([path.parent.name for path in nested])}. "
            "Give one of these folders.",
        )
    return nested[0] if nested else None


def _has_kind(need: Need, path: Path) -> bool:
    return path.is_dir() if need.folder else path.is_file()


def _list_missing(form: Form, files: Files) -> list[Need]:
    return [need for need in form.needs if not need.optional and need.name not in files]


def _compare_file(need: Need, path: Path) -> list[str]:
    if need.folder or path.name != Path(need.name).name:
        return []
    size = path.stat().st_size
    if need.bytes is not None and size != need.bytes:
        return [f"{path.name} has {size:,} bytes (published: {need.bytes:,})."]
    if need.md5 is not None and compute_md5(path) != need.md5:
        return [f"{path.name} differs from the published file (its MD5 differs)."]
    return []


# The golden ratio's fraction. The fractions of its multiples are evenly spread (Weyl's sequence).
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def draw_rows(content: Content, rows: int | None, seed: int) -> Rows:
    """Draws a number of rows with the same shares of classes and splits as in the data set. Returns
    their row numbers, increasing. With ``rows=None``, returns all row numbers.

    Raises InputError if the data set has fewer rows.
    """
    n = len(content)
    if rows is None:
        return np.arange(n)
    if not 1 <= rows <= n:
        raise InputError(
            Code.CONFIG_INVALID, f"rows: must be from 1 to {n:,} (got {rows:,}). Give fewer rows."
        )
    return _draw(_compute_strata(content), rows, derive_seed(seed, "prepare", "rows"))


def add_validation(content: Content, used: Rows, share: float, seed: int) -> Array | None:
    """Returns the splits, with a share of the training rows changed to validation rows, stratified
    by class. Returns None if the data set has no splits.
    """
    if content.splits is None:
        return None
    splits = np.array(content.splits, object)
    train = used[splits[used] == TRAIN]
    count = round(share * len(train))
    if count:
        strata = _compute_strata(content)[train]
        splits[train[_draw(strata, count, derive_seed(seed, "prepare", "validation"))]] = VALIDATION
    return splits.astype("S10")


def _compute_strata(content: Content) -> npt.NDArray[np.int64]:
    """Returns the number of each row's stratum, a combination of its class and its split."""
    n = len(content)
    keys: list[npt.NDArray[Any]] = [np.zeros(n, np.int64)]
    if content.labels.dtype.kind in "iu":
        keys.append(np.unique(content.labels, return_inverse=True)[1])
    if content.splits is not None:
        keys.append(np.unique(content.splits.astype(str), return_inverse=True)[1])
    strata = np.zeros(n, np.int64)
    for key in keys:
        strata = strata * (int(key.max(initial=0)) + 1) + key
    return strata


def _draw(strata_N: npt.NDArray[np.int64], count: int, seed: int) -> Rows:
    """Draws ``count`` row positions, as evenly from all strata as integers allow. Returns them in
    increasing order.

    The rows of each stratum are shuffled and placed at even distances between 0 and 1. The
    ``count`` rows with the lowest places are drawn. The first row of each stratum has a different
    place, so that from many small strata the right share of rows is drawn.
    """
    order = draw_permutation(seed, len(strata_N))
    shuffled = strata_N[order]
    by_stratum = np.argsort(shuffled, kind="stable")
    _, starts, sizes = np.unique(shuffled[by_stratum], return_index=True, return_counts=True)
    begins = (np.arange(len(starts)) * _GOLDEN + derive_seed(seed, "begin") % 1000 / 1000) % 1.0
    place = np.empty(len(order))
    for start, size, begin in zip(starts, sizes, begins, strict=True):
        place[by_stratum[start : start + size]] = (np.arange(size) + begin) / size
    return np.sort(order[np.argsort(place, kind="stable")[:count]])


_DATASETS = {**images.DATASETS, **tables.DATASETS}


REGISTRY = PlugIns("vfl.datasets", "data set", ours=tuple(_DATASETS))


def load(name: str) -> DataSet:
    """Returns the data set of that name, in which ``-`` stands for ``_``. Raises InputError, with
    the nearest name, for an unknown one.
    """
    key = name.replace("-", "_")
    if key in _DATASETS:
        return _DATASETS[key]
    return REGISTRY.check_type(REGISTRY.load(key, "prepare"), key, "prepare", DataSet)

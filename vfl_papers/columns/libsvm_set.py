"""The data sets that are files of the LIBSVM collection: two classes, columns ``f1``, ``f2``, ….

Chang and Lin, https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import pyarrow as pa

from vfl_papers.columns.official import FLOAT, ColumnFiles, classes_of, damage_error, file
from vfl_papers.dataset import Content, DataSet, Files, Form, Need, PaperUse, Request
from vfl_papers.dividing import ALPHA, COLUMNS, IMPORTANCE

LABEL = "label"
_PUBLISHER = (
    "LIBSVM Data (https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html), "
    "under these names"
)


def libsvm_set(
    title: str,
    files: Mapping[str, Need],
    rows: Mapping[str, int],
    width: int,
    classes: Mapping[float, str],
    use: PaperUse,
    *,
    memory: str,
    others: tuple[Form, ...] = (),
) -> DataSet:
    """Returns a data set of libsvm files.

    Args:
        title: its name.
        files: {split: its file}; the split is ``""`` if there is only one.
        rows: {split: how many rows are published}.
        width: the number of feature columns.
        classes: {label in the files: what it means}, in the order of the classes' numbers.
        use: the paper's.
        memory: the memory that preparing needs, in words.
        others: forms that are not official.
    """
    read = partial(_read, {split: need.name for split, need in files.items()}, width, classes)
    return DataSet(
        title=title,
        publisher=_PUBLISHER,
        holds=f"{width:,} numbers",
        rows=sum(rows.values()),
        task={"kind": "binary"},
        forms=(Form(tuple(files.values()), read, rows), *others),
        divisions={"columns": COLUMNS, "importance": IMPORTANCE},
        uses=(use,),
        memory=memory,
        options=ALPHA,
    )


def need(name: str) -> Need:
    """Returns a file of the collection, packed as it is published, or unpacked."""
    plain = name.removesuffix(".bz2")
    return Need(name, (plain,) if plain != name else (f"{name}.bz2", f"{name}.txt"))


def _read(
    names: Mapping[str, str],
    width: int,
    classes: Mapping[float, str],
    files: Files,
    _: Request,
) -> Content:
    sources = tuple(file(files[name], format="libsvm", names=width) for name in names.values())
    columns = ColumnFiles(sources, dict.fromkeys([f"f{at}" for at in range(1, width + 1)], FLOAT))
    labels_by_file = columns.of({LABEL: pa.float64()}).by_file(LABEL)
    values = np.concatenate(labels_by_file)
    labels, meant = classes_of(values, classes)
    if (labels < 0).any():
        known = " and ".join(f"{value:g}" for value in classes)
        wrong = values[labels < 0][0]
        raise damage_error(
            sources[0].source, f"has the label {wrong:g}, and its labels are {known}"
        )
    splits = (
        np.repeat(np.array([*names], object), [*map(len, labels_by_file)])
        if len(names) > 1
        else None
    )
    return Content(labels, splits, columns.blocks, classes=meant)

"""UJIIndoorLoc (Torres-Sospedra et al. 2014): where somebody is, by the strengths of Wi-Fi."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from vfl_common.errors import Code, InputError
from vfl_papers import recipes
from vfl_papers.columns.official import (
    FLOAT,
    WORD,
    ColumnFiles,
    FileTree,
    damage_error,
    file,
    row_count_note,
)
from vfl_papers.dataset import TEST, TRAIN, Content, DataSet, Files, Form, Need, PaperUse, Request
from vfl_papers.dividing import ALPHA, COLUMNS, IMPORTANCE

_TRAINING, _VALIDATION = "trainingData.csv", "validationData.csv"
_ZIP, _PARQUET = "ujiindoorloc.zip", "ujiindoorloc.parquet"
_POINTS = tuple(f"WAP{number:03}" for number in range(1, 521))
_LABELS = ("LONGITUDE", "LATITUDE")
_ROWS = 21_048
# The values of Tables 2 and 5.
_FEDONCE = recipes.fedonce(
    {"kind": "mlp", "hidden": [50, 50, 50, 30]},
    [30, 10],
    (3e-4, 1e-4, 100, 500),
    (1e-4, 1e-4, 100, 600),
)
_SILENT = (
    "The paper does not say which column is the label, nor which other ones are among its 529 "
    "columns. Here the label is the longitude, and the columns are the 520 access points. It puts "
    "both files together and tunes by five folds; the recipe divides their rows at random. `--set "
    "split=makers` keeps the second file, which was recorded four months later, for testing."
)
_OPTIONS = {
    "label": ("LONGITUDE", "The column to predict, LONGITUDE or LATITUDE, in metres."),
    "split": ("random", "makers: the rows of validationData.csv are the test rows."),
    **ALPHA,
}


def _read_pair(files: Files, request: Request) -> Content:
    return _read((str(files[_TRAINING]), str(files[_VALIDATION])), request)


def _read_zip(files: Files, request: Request) -> Content:
    inside = FileTree(files[_ZIP])
    return _read((inside.source(_TRAINING), inside.source(_VALIDATION)), request)


def _read_parquet(files: Files, request: Request) -> Content:
    source = str(files[_PARQUET])
    parts = ColumnFiles((file(source),), {"part": WORD}).array("part")
    test = parts == "validation"
    if not (test | (parts == "train")).all():
        raise damage_error(
            source, "has values other than train and validation in the column 'part'"
        )
    return _read((source,), request, np.where(test, TEST, TRAIN).astype(object))


def _read(sources: tuple[str, ...], request: Request, splits: object = None) -> Content:
    label, how = request.options["label"], request.options["split"]
    for key, value, known in (("label", label, _LABELS), ("split", how, ("random", "makers"))):
        if value not in known:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{key}: unknown value {value!r}. Choose {' or '.join(known)}.",
            )
    columns = ColumnFiles(tuple(map(file, sources)), dict.fromkeys(_POINTS, FLOAT))
    labels_by_file = columns.of({label: pa.float64()}).by_file(label)
    if len(sources) == 2:
        splits = np.repeat(np.array([TRAIN, TEST], object), [*map(len, labels_by_file)])
    own = splits if how == "makers" and isinstance(splits, np.ndarray) else None
    labels = np.concatenate(labels_by_file)
    return Content(labels, own, columns.blocks, differs=row_count_note(len(labels), _ROWS))


DATASET = DataSet(
    title="UJIIndoorLoc",
    publisher=f"UCI (https://archive.ics.uci.edu/dataset/310), with {_TRAINING} and {_VALIDATION}",
    holds="the strengths of 520 access points, 100 for one that is not heard",
    rows=_ROWS,
    task={"kind": "regression"},
    forms=(
        Form((Need(_ZIP, ("UJIndoorLoc.zip",)),), _read_zip),
        Form((Need(_TRAINING), Need(_VALIDATION)), _read_pair),
        Form((Need(_PARQUET),), _read_parquet, unofficial="a Parquet file of the same rows"),
    ),
    divisions={"columns": COLUMNS, "importance": IMPORTANCE},
    uses=(
        PaperUse(
            "FedOnce",
            "Tables 4, 5, 6, 10; Figs. 5, 6, 9",
            "columns",
            10,
            _FEDONCE,
            silent=_SILENT,
        ),
    ),
    memory="about 200 MB",
    options=_OPTIONS,
)

"""Phishing Websites (Mohammad, Thabtah and McCluskey 2012), in LIBSVM's columns of 0 and 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from vfl_papers import recipes
from vfl_papers.columns.libsvm_set import libsvm_set, need
from vfl_papers.columns.official import FLOAT, ColumnFiles, file
from vfl_papers.dataset import Block, Content, DataSet, Files, Form, Need, PaperUse, Request, Rows

_CSV = "phishing.csv.gz"
_CLASSES = {0.0: "legitimate", 1.0: "phishing"}
# The values of Tables 2 and 5.
_FEDONCE = recipes.fedonce(
    {"kind": "mlp", "hidden": [30, 30]}, [30], (1e-4, 1e-5, 100, 100), (1e-4, 1e-4, 100, 300)
)
_SILENT = (
    "The paper does not say which rows are for validation; it tunes by five folds. The recipe "
    "divides the rows at random."
)


def _read_csv(files: Files, _: Request) -> Content:
    """Reads a CSV file with the columns ``f0`` to ``f67`` and ``y``, named ``f1`` to ``f68`` as
    in the official file.
    """
    columns = ColumnFiles((file(files[_CSV]),), {f"f{at}": FLOAT for at in range(68)})
    labels = columns.of({"y": pa.int64()}).array("y").astype(np.int64)
    names = [f"f{at}" for at in range(1, 69)]

    def blocks(rows: Rows) -> Iterator[Block]:
        for block in columns.blocks(rows):
            yield block.rename_columns(names)

    return Content(labels, None, blocks, classes=tuple(_CLASSES.values()))


DATASET: DataSet = libsvm_set(
    "Phishing Websites",
    {"": need("phishing")},
    {"": 11_055},
    68,
    _CLASSES,
    PaperUse(
        "FedOnce",
        "Tables 4, 5, 6, 7, 10; Figs. 5, 6, 9",
        "columns",
        10,
        _FEDONCE,
        silent=_SILENT,
    ),
    memory="about 100 MB",
    others=(
        Form(
            (Need(_CSV),),
            _read_csv,
            {"": 11_055},
            "a CSV file of the same rows, with the columns f0 to f67 and y",
        ),
    ),
)

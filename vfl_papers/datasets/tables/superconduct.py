"""Superconductivty Data (Hamidieh 2018): the critical temperature of superconductors."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from vfl_papers import recipes
from vfl_papers.columns.official import FLOAT, ColumnFiles, FileTree, damage_error, file
from vfl_papers.dataset import Content, DataSet, Files, Form, Need, PaperUse, Request
from vfl_papers.dividing import COLUMNS

_LABEL = "critical_temp"
_TABLE = "train.csv"
_ZIP = "superconductivty+data.zip"
_WIDTH = 81
_ROWS = {"": 21_263}
# The values of Tables 2 and 5.
_FEDONCE = recipes.fedonce(
    {"kind": "mlp", "hidden": [30, 30]}, [30, 10], (3e-4, 1e-4, 100, 500), (3e-4, 1e-4, 128, 600)
)
_SILENT = (
    "The paper does not say which rows are for validation; it tunes by five folds. The recipe "
    "divides the rows at random, and its `rmse` is in kelvin."
)


def _read(name: str, files: Files, _: Request) -> Content:
    path = files[name]
    source = file(path if name == _TABLE else FileTree(path).source(_TABLE))
    names = _names(source.source)
    types = {name: FLOAT for name in names if name != _LABEL}
    if len(types) != _WIDTH or _LABEL not in names:
        raise damage_error(source.source, f"must have {_WIDTH} columns and {_LABEL!r}")
    columns = ColumnFiles((source,), types)
    labels = columns.of({_LABEL: pa.float64()}).array(_LABEL)
    return Content(labels, None, columns.blocks)


def _names(source: str) -> tuple[str, ...]:
    from vfl_party.data import column_names

    return column_names(file(source))


DATASET = DataSet(
    title="Superconductivty Data",
    publisher="UCI (https://archive.ics.uci.edu/dataset/464), as the zip file of these two tables",
    holds="81 numbers",
    rows=21_263,
    task={"kind": "regression"},
    forms=(
        Form((Need(_ZIP, ("superconduct.zip",)),), partial(_read, _ZIP), _ROWS),
        Form((Need(_TABLE),), partial(_read, _TABLE), _ROWS),
    ),
    divisions={"columns": COLUMNS},
    uses=(
        PaperUse(
            "FedOnce",
            "Tables 4, 5, 6, 10; Figs. 5, 6",
            "columns",
            10,
            _FEDONCE,
            silent=_SILENT,
        ),
    ),
    memory="about 100 MB",
)

"""Words that mean that a cell is empty, in tables of every kind."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, load_table, make_loader

NAMES = ("pid", "age", "town")
ROWS = [
    ("a", "40", "Oslo"),
    ("b", " k.A. ", "k.A."),
    ("c", "unbekannt", "k.a."),
    ("d", "-1", "unbekannt"),
]
NA = ("k.A.", "unbekannt", "-1 ")


def csv(path: Path) -> DataSettings:
    text = "\n".join(",".join(row) for row in (NAMES, *ROWS))
    (path / "t.csv").write_text(f"{text}\n")
    return DataSettings(source=str(path / "t.csv"), id=("pid",))


def excel(path: Path) -> DataSettings:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for row in (NAMES, *ROWS[:-1], ("d", -1, "unbekannt")):
        book.active.append(row)
    book.save(path / "t.xlsx")
    return DataSettings(source=str(path / "t.xlsx"), id=("pid",))


def database(path: Path) -> DataSettings:
    pytest.importorskip("sqlalchemy")
    with sqlite3.connect(path / "t.db") as opened:
        opened.execute("create table t (pid, age, town)")
        opened.executemany("insert into t values (?, ?, ?)", [*ROWS[:-1], ("d", -1, "unbekannt")])
    opened.close()
    return DataSettings(source=f"sqlite:///{path / 't.db'}", query="select * from t", id=("pid",))


def columns(**types: Any) -> pa.Table:
    values = dict(zip(NAMES, zip(*ROWS, strict=True), strict=True))
    return pa.table({name: pa.array(each, types.get(name)) for name, each in values.items()})


def file(path: Path) -> DataSettings:
    parquet.write_table(columns(), path / "t.parquet")
    return DataSettings(source=str(path / "t.parquet"), id=("pid",), numeric=("age",))


@pytest.mark.parametrize("made", [csv, excel, database, file])
def test_a_word_for_missing_makes_a_cell_empty(
    made: Callable[[Path], DataSettings], tmp_path: Path
) -> None:
    settings = made(tmp_path).model_copy(update={"na": NA, "missing": "mean"})
    check(load_table(settings, with_label=False))
    with raises(InputError, Code.DATA_INVALID, names=("age", "data.numeric")):
        load_table(
            settings.model_copy(update={"na": ("x",), "numeric": ("age",)}), with_label=False
        )


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_text_of_every_type(kind: pa.DataType) -> None:
    settings = DataSettings(
        source="frame of p", id=("pid",), numeric=("age",), missing="mean", na=NA
    )
    check(make_loader({"p": columns(age=kind, town=kind)})(settings, False))


def check(table: Table) -> None:
    np.testing.assert_array_equal(present(table.numeric_NF), [[40], [np.nan], [np.nan], [np.nan]])
    # Capitals count.
    assert present(table.categorical).texts().tolist() == [["Oslo"], [None], ["k.a."], [None]]


def test_ids_and_labels_are_empty_too(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("pid,age,y\na,1,yes\n?,2,no\nc,3,?\n")
    settings = DataSettings(source=str(tmp_path / "t.csv"), id=("pid",), label="y", na=("?",))
    assert list(load_table(settings, with_label=False).ids) == ["a", "c"]
    with raises(InputError, Code.DATA_INVALID, names=("t.csv", "data.unlabelled")):
        load_table(settings, with_label=True)


def test_columns_that_hold_no_text_stay(tmp_path: Path) -> None:
    parquet.write_table(
        pa.table({"pid": ["a", "b"], "age": [-1, 2], "town": ["x", None]}), tmp_path / "t.parquet"
    )
    settings = DataSettings(source=str(tmp_path / "t.parquet"), id=("pid",), na=("-1",))
    table = load_table(settings, with_label=False)
    assert present(table.numeric_NF).tolist() == [[-1], [2]]

"""Rows without a label: refused, or left out by ``data.unlabelled``, and told with their number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import load_table, read_rows
from vfl_party.data.notes import find_target_leakage

# "a" comes twice, first without a label; one row has neither id nor label.
TABLE = "id,x,y\na,0,\nb,1,{0}\nc,2,{1}\na,3,{1}\n,4,\nd,5,\n"


def settings(path: Path, **more: Any) -> DataSettings:
    return DataSettings(source=str(path), id=("id",), label="y", **more)


@pytest.mark.parametrize("labels", [("0", "1"), ("no", "yes"), ("2.5", "7")])
def test_rows_without_a_label_are_left_out(tmp_path: Path, labels: tuple[str, str]) -> None:
    path = tmp_path / "x.csv"
    path.write_text(TABLE.format(*labels))
    with raises(InputError, Code.DATA_INVALID, names=("x.csv", "data.unlabelled")):
        load_table(settings(path, duplicates="first"), with_label=True)
    drop = settings(path, unlabelled="drop").keeping_rows()
    table = load_table(drop, with_label=True)
    assert list(table.ids) == ["a", "b", "c"]
    assert present(table.numeric_NF).ravel().tolist() == [3, 1, 2]
    assert [str(each).removesuffix(".0") for each in present(table.labels)] == [
        labels[k] for k in (1, 0, 1)
    ]
    assert_names(present(table.counts).left_out, "without")
    # Why each row of the source is left out: "a" without its label is no repeated id.
    assert present(table.own).left_out.tolist() == [3, 0, 0, 0, 1, 3]


def test_rows_to_predict_need_no_label(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(TABLE.format(0, 1))
    found = load_table(settings(path, unlabelled="drop", duplicates="first"), with_label=False)
    assert list(found.ids) == ["a", "b", "c", "d"]


def test_arrays(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, id=np.arange(4), y=np.array([1.0, np.nan, 0.0, np.nan]), x=np.eye(4))
    table = load_table(settings(path, unlabelled="drop"), with_label=True)
    assert list(table.ids) == ["0", "2"]
    with raises(InputError, Code.DATA_INVALID, names="data.unlabelled"):
        load_table(settings(path), with_label=True)


def test_no_row_with_a_label(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("id,x,y\na,0,\nb,1,\n")
    with raises(InputError, Code.DATA_INVALID, names=("x.csv", "data.label")):
        load_table(settings(path, unlabelled="drop"), with_label=True)


def test_columns_that_tell_the_label_are_found_beside_rows_without_one(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    rows = [f"k{n},{n % 2 * 9 + n % 3},{n % 5},{('no', 'yes')[n % 2]}" for n in range(60)]
    path.write_text("\n".join(["id,told,other,y", *rows, "z1,5,1,", "z2,0,2,", ""]))
    found = find_target_leakage(read_rows(settings(path, unlabelled="drop"), True), "y")
    assert [each.column for each in found] == ["told"]

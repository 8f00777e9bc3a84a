"""The columns that the active party reads beside its label, from every kind of source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet
import pytest

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Labels, load_table, make_loader
from vfl_party.data.table import Table

COLUMNS = {
    "id": ["r3", "r1", "r2"],
    "a": [1.5, 2.5, 3.5],
    "late": [0, 1, 1],
    "paid": ["true", "false", "true"],
    "w": [0.5, 2, 1],
    "g": ["x", "y", "x"],
}
ROLES: dict[str, Any] = {"id": ["id"], "labels": ["late", "paid"], "weight": "w", "group": "g"}


def sources(folder: Path) -> dict[str, DataSettings]:
    frame = pd.DataFrame(COLUMNS)
    frame.to_csv(folder / "t.csv", index=False)
    frame.to_csv(folder / "t.tsv", index=False, sep=";", decimal=",")
    frame.to_excel(folder / "t.xlsx", index=False)
    frame.assign(paid=frame.paid == "true").to_parquet(folder / "t.parquet")
    arrays: dict[str, Any] = {name: np.array(values) for name, values in COLUMNS.items()}
    np.savez(folder / "t.npz", **arrays)
    return {
        ending: DataSettings(source=str(folder / f"t.{ending}"), **ROLES)
        for ending in ("csv", "tsv", "xlsx", "parquet", "npz")
    }


def check(table: Table) -> None:
    assert list(table.ids) == ["r1", "r2", "r3"]
    assert table.numeric_names == ("a",)
    assert table.categorical_names == ()
    assert present(table.labels).tolist() == [1, 1, 0]
    assert table.beside["paid"].astype(str).tolist() == ["false", "true", "true"]
    assert table.beside["w"].tolist() == [2, 1, 0.5]
    assert present(table.groups).tolist() == ["y", "x", "x"]


@pytest.mark.parametrize("ending", ["csv", "tsv", "xlsx", "parquet", "npz"])
def test_every_source_has_them(ending: str, tmp_path: Path) -> None:
    settings = sources(tmp_path)[ending]
    check(load_table(settings, with_label=True))
    # A passive party that has the settings of the active one reads none of them.
    without = load_table(settings, with_label=False)
    assert (without.numeric_names, dict(without.beside)) == (("a",), {})


def test_frames_and_dicts_of_arrays_have_them() -> None:
    settings = DataSettings(source="frame of p0", **ROLES)
    for frame in (
        pd.DataFrame(COLUMNS),
        {name: np.array(values) for name, values in COLUMNS.items()},
    ):
        check(make_loader({"p0": frame})(settings, True))


def test_weights_of_images_are_read_from_their_index(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("x", "y"):
        Image.new("L", (4, 4)).save(tmp_path / f"{name}.png")
    (tmp_path / "index.csv").write_text("file,class,w\ny.png,1,3\nx.png,0,4\n")
    table = load_table(
        DataSettings(source=str(tmp_path), label="class", weight="w"), with_label=True
    )
    assert table.beside["w"].tolist() == [4, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"labels": ["late"]},
        {"labels": ["late", "late"]},
        {"labels": ["late", "paid"], "label": "w"},
        {"label": "w", "weight": "w"},
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(wrong: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        parse(DataSettings, {"source": "t.csv", "id": ["id"]} | wrong, "data")


@pytest.mark.parametrize("wrong", [{"weight": "no"}, {"labels": ["late", "no"], "weight": "w"}])
@pytest.mark.parametrize("ending", ["csv", "npz"])
def test_a_column_that_is_not_there_is_one_sentence(
    ending: str, wrong: dict[str, Any], tmp_path: Path
) -> None:
    sources(tmp_path)
    with raises(InputError, Code.DATA_INVALID, names=("no", "id")):
        load_table(
            DataSettings(
                source=str(tmp_path / f"t.{ending}"),
                **{"id": ["id"], "columns": ["a"], "label": None if "labels" in wrong else "late"}
                | wrong,
            ),
            with_label=True,
        )


def test_a_missing_weight_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,a,late,w\nr1,1,0,2\nr2,1,1,\n")
    with raises(InputError, Code.DATA_INVALID, names="t.csv"):
        load_table(
            DataSettings(source=str(tmp_path / "t.csv"), id=("id",), label="late", weight="w"),
            with_label=True,
        )


@pytest.mark.parametrize("wrong", [{"weight": "w"}, {"labels": ["target", "b"]}])
def test_a_named_set_has_none(wrong: dict[str, Any]) -> None:
    with raises(InputError, Code.DATA_INVALID):
        load_table(DataSettings(source="sklearn:iris", **wrong), with_label=True)


@pytest.mark.parametrize("written", [["0", "1"], ["false", "true"], ["False", "TRUE"]])
def test_yes_and_no_are_written_in_several_ways(written: list[str]) -> None:
    task = TaskSettings(kind="survival")
    raw = np.array([[3.0, written[1]], [5.0, written[0]]], object)
    found = Labels.fit(raw, task, np.arange(2), source="t").encode(raw)
    assert found.tolist() == [[3.0, 1.0], [5.0, 0.0]]


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    sources(tmp_path)
    kinds = pyarrow.parquet.read_schema(tmp_path / "t.parquet")
    assert str(kinds.field("paid").type) == "bool"

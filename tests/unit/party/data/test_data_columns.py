"""CSV and Parquet: ids, types, missing values, order, views, and every way in which a file can be
wrong.
"""

import gzip
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings, ViewSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, describe, load_table

PEOPLE = "pid,age,town,weight,sick\n007,40,Oslo,70.5,yes\n7,30,Bonn,80,no\n02,50,,90.25,no\n"


def write(path: Path, text: str) -> str:
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text, encoding="utf-8")
    return str(path)


def write_parquet(path: Path, **columns: Any) -> str:
    parquet.write_table(pa.table(columns), path)
    return str(path)


def load(source: str, *, with_label: bool = False, **settings: Any) -> Table:
    return load_table(
        DataSettings(source=source, **({"id": "pid"} | settings)), with_label=with_label
    )


def refused(
    source: str, code: Code = Code.DATA_INVALID, *, with_label: bool = False, **more: Any
) -> str:
    with raises(InputError, code) as caught:
        load(source, with_label=with_label, **more)
    assert str(caught.value).startswith(source)
    return str(caught.value)


@pytest.mark.parametrize("name", ["people.csv", "people.csv.gz", "PEOPLE.CSV"])
def test_reads_csv_in_canonical_order(tmp_path: Path, name: str) -> None:
    table = load(write(tmp_path / name, PEOPLE), with_label=True, label="sick")
    assert table.ids == ("007", "02", "7")
    assert table.numeric_names == ("age", "weight")
    assert table.numeric_NF is not None
    assert table.numeric_NF.dtype == np.float32
    assert table.numeric_NF.tolist() == [[40, 70.5], [50, 90.25], [30, 80]]
    assert table.categorical_names == ("town",)
    assert present(table.categorical).texts().tolist() == [["Oslo"], [None], ["Bonn"]]
    assert present(table.labels).tolist() == ["yes", "no", "no"]
    assert len(table) == 3
    assert table.images_NCHW is None


def test_order_is_that_of_utf8_bytes(tmp_path: Path) -> None:
    ids = ["b", "é", "a", "\U0001f600", "z", "\uffee", "B"]
    source = write(tmp_path / "x.csv", "pid,v\n" + "".join(f"{name},1\n" for name in ids))
    assert list(load(source).ids) == sorted(ids, key=str.encode)


def test_byte_order_mark_and_quoted_line_breaks(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", '\ufeffpid,note\nb,"two\nlines"\na,"x, y"\n')
    table = load(source)
    assert present(table.categorical).texts().tolist() == [["x, y"], ["two\nlines"]]


def test_label_is_no_feature_for_a_passive_party(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", PEOPLE)
    table = load(source, label="sick")
    assert "sick" not in table.categorical_names
    assert table.labels is None
    # New rows to predict have no label column.
    assert load(source, label="not_there").labels is None
    assert load(source, label="sick", columns=("age", "sick")).categorical is None


def test_number_labels_are_floats(tmp_path: Path) -> None:
    table = load(write(tmp_path / "x.csv", "pid,v,y\na,1,1\nb,2,0\n"), with_label=True, label="y")
    assert present(table.labels).dtype == np.float64


def test_columns_drop_numeric_categorical(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "pid,a,b,c,d\nx,01,2,3,t\ny,1,NA,4,u\n")
    table = load(source, drop=("d",), categorical=("a",), missing="zero")
    assert present(table.categorical).texts()[:, 0].tolist() == ["01", "1"]
    assert table.numeric_names == ("b", "c")
    assert load(source, columns=("c", "a")).numeric_names == ("c", "a")
    assert load(source, columns=("a",), numeric=("a",)).numeric_names == ("a",)


def test_numbers_are_inferred_from_all_rows(tmp_path: Path) -> None:
    rows = "".join(f"{row},{row}\n" for row in range(100_000))
    table = load(write(tmp_path / "x.csv", "pid,v\n" + rows + "last,0.5\n"))
    assert table.numeric_names == ("v",)
    table = load(write(tmp_path / "x.csv", "pid,v\n" + rows + "last,text\n"))
    assert table.categorical_names == ("v",)


@pytest.mark.parametrize("cell", ["", "NA", "NaN", " null "])
def test_missing_numbers(tmp_path: Path, cell: str) -> None:
    source = write(tmp_path / "x.csv", f"pid,v,w\na,1,2\nb,{cell},3\nc,{cell},4\n")
    refused(source)
    table = load(source, missing="median")
    assert np.isnan(present(table.numeric_NF)[:, 0]).tolist() == [False, True, True]


def test_an_empty_column_is_numbers_that_are_missing(tmp_path: Path) -> None:
    table = load(write(tmp_path / "x.csv", "pid,v\na,\nb,\n"), missing="mean")
    assert table.numeric_names == ("v",)


def test_several_incomplete_columns_are_one_error(tmp_path: Path) -> None:
    refused(write(tmp_path / "x.csv", "pid,v,w\na,,\n"))


@pytest.mark.parametrize("cell", ["inf", "-Infinity", "1e39"])
def test_infinity_is_refused_whatever_the_policy(tmp_path: Path, cell: str) -> None:
    source = write(tmp_path / "x.csv", f"pid,v\nb,1\na,{cell}\n")
    refused(source, missing="mean")


def test_text_in_a_numeric_column_names_row_not_value(tmp_path: Path) -> None:
    rows = "".join(f"{row},{'secret' if row in (776, 900) else row}\n" for row in range(1000))
    text = refused(write(tmp_path / "x.csv", "pid,v\n" + rows), numeric=("v",))
    assert "secret" not in text


def test_repeated_ids(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "pid,v\nsecret,1\nb,2\nsecret,3\nsecret,4\n")
    text = refused(source)
    assert "secret" not in text


def test_missing_labels(tmp_path: Path) -> None:
    source = write(tmp_path / "y.csv", "pid,v,y,t\na,1,,\nb,2,1,no\n")
    refused(source, with_label=True, label="y")
    refused(source, with_label=True, label="t")
    source = write(tmp_path / "z.csv", "pid,y\na,1\nb,inf\n")
    refused(source, with_label=True, label="y")


def test_missing_columns_name_the_nearest(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "patient_id,age,outcome\na,1,0\n")
    refused(source, id="patient_ID")
    settings: dict[str, Any] = {"id": "patient_id"}
    refused(source, with_label=True, label="outcom", **settings)
    for key in ("columns", "drop", "numeric", "categorical"):
        refused(source, **(settings | {key: ("agee",)}))
    refused(source, id=None)
    refused(source, with_label=True, **settings)
    refused(source, numeric=("age",), categorical=("age",), **settings)


def test_no_rows_no_columns(tmp_path: Path) -> None:
    refused(write(tmp_path / "x.csv", "pid,y\na,1\n"), label="y")
    # A party of labels only.
    table = load(write(tmp_path / "x.csv", "pid,y\nb,1\na,2\n"), with_label=True, label="y")
    assert table.ids == ("a", "b")
    assert table.numeric_NF is None
    assert table.categorical is None


def test_bad_files(tmp_path: Path) -> None:
    def file_refused(source: str) -> str:
        return refused(source, Code.FILE_INVALID)

    file_refused(str(tmp_path / "none.csv"))
    file_refused(write(tmp_path / "x.doc", "a"))
    text = file_refused(write(tmp_path / "x.csv", "pid,v\na,1\nb,2,secret\n"))
    assert "secret" not in text
    packed = gzip.compress(
        ("pid,v\n" + "".join(f"{row},{row * 7919 % 1000}\n" for row in range(5000))).encode()
    )
    for content in (
        b"plain text",
        b"",
        packed[: len(packed) // 2],
        packed[:40] + b"xxxx" + packed[44:],
    ):
        (tmp_path / "x.csv.gz").write_bytes(content)
        file_refused(str(tmp_path / "x.csv.gz"))
    for content in (b"", b"PAR1 and nothing more", b"x" * 1000):
        (tmp_path / "x.parquet").write_bytes(content)
        file_refused(str(tmp_path / "x.parquet"))
    good = Path(
        write_parquet(tmp_path / "x.parquet", pid=[str(i) for i in range(999)], v=np.arange(999.0))
    ).read_bytes()
    (tmp_path / "x.parquet").write_bytes(good[:50] + bytes(200) + good[250:])
    file_refused(str(tmp_path / "x.parquet"))
    folder = tmp_path / "folder.csv"
    folder.mkdir()
    file_refused(str(folder))


def test_reads_parquet_types(tmp_path: Path) -> None:
    source = write_parquet(
        tmp_path / "x.parquet",
        pid=pa.array([30, 7, 200]),
        integer=pa.array([1, 2, 3], pa.int64()),
        single=pa.array([0.5, None, float("nan")], pa.float32()),
        money=pa.array([Decimal("1.50"), Decimal("2.50"), None], pa.decimal128(8, 2)),
        text=pa.array(["12", "", None]),
        flag=pa.array([True, None, False]),
        coded=pa.array(["u", None, "v"]).dictionary_encode(),
        forced=pa.array([1.0, None, 2.0]),
        y=pa.array([True, False, True]),
    )
    table = load(source, with_label=True, label="y", categorical=("forced",), missing="mean")
    assert table.ids == ("200", "30", "7")
    assert table.numeric_names == ("integer", "single", "money")
    nan = float("nan")
    np.testing.assert_array_equal(
        table.numeric_NF, np.array([[3, nan, nan], [1, 0.5, 1.5], [2, nan, 2.5]], np.float32)
    )
    assert table.categorical_names == ("text", "flag", "coded", "forced")
    assert present(table.categorical).texts().tolist() == [
        [None, "false", "v", "2"],
        ["12", "true", "u", "1"],
        [None, None, None, None],
    ]
    assert present(table.labels).tolist() == ["true", "true", "false"]
    refused(source, categorical=("forced",), label="y")
    assert load(
        source, columns=("flag", "text"), numeric=("flag",), missing="zero"
    ).numeric_names == ("flag",)


def test_parquet_columns_of_other_types(tmp_path: Path) -> None:
    dates = pa.array([0, 1], pa.date32())
    source = write_parquet(tmp_path / "x.parquet", pid=["b", "a"], day=dates, text=["1", "x"])
    # Since 1970-01-01.
    days = load(source)
    assert (days.numeric_names, days.categorical_names) == (("day",), ("text",))
    assert present(days.numeric_NF).tolist() == [[1.0], [0.0]]
    refused(source, numeric=("text",), drop=("day",))
    refused(source, with_label=True, label="day")
    lists = write_parquet(tmp_path / "y.parquet", pid=["b", "a"], many=[[1], [2]])
    refused(lists)
    refused(lists, categorical=("many",))
    table = load(source, categorical=("day",))
    assert present(table.categorical).texts()[:, 0].tolist() == ["1970-01-02", "1970-01-01"]


@pytest.mark.parametrize(
    "ids", [pa.array([1.0, 2.0]), pa.array([True, False]), pa.array([0, 1], pa.date32())]
)
def test_parquet_ids_of_other_types(tmp_path: Path, ids: pa.Array) -> None:
    refused(write_parquet(tmp_path / "x.parquet", pid=ids, v=[1, 2]))


def test_parquet_ids_as_dictionary_and_missing(tmp_path: Path) -> None:
    assert load(
        write_parquet(
            tmp_path / "x.parquet", pid=pa.array(["b", "a"]).dictionary_encode(), v=[1, 2]
        )
    ).ids == ("a", "b")
    source = write_parquet(tmp_path / "x.parquet", pid=pa.array([1, None]), v=[1, 2])
    assert load(source).ids == ("1",)


def test_limit_takes_the_first_rows_of_the_file(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "pid,v\nz,1\nb,2\na,text\na,4\n")
    table = load(source, limit=2)
    assert table.ids == ("b", "z")
    assert table.numeric_names == ("v",)
    assert load(write_parquet(tmp_path / "x.parquet", pid=["z", "a"], v=[1, 2]), limit=1).ids == (
        "z",
    )


def test_a_column_of_splits_is_no_feature_and_is_read_with_the_label(tmp_path: Path) -> None:
    source = write(tmp_path / "a.csv", "id,x,part,y\n2,1,test,0\n1,2,train,1\n3,4,validation,1\n")
    table = load(source, id="id", label="y", split="part", with_label=True)
    assert table.numeric_names == ("x",)
    # By id.
    assert present(table.splits).tolist() == ["train", "test", "validation"]
    assert table.select(np.array([2, 0])).splits.tolist() == ["validation", "train"]  # type: ignore[union-attr]
    passive = load(source, id="id", label="y", split="part")
    assert (passive.numeric_names, passive.splits) == (("x",), None)
    refused(source, id="id", label="y", split="parts", with_label=True)
    for wrong in ("Test", "", "1"):
        bad = write(tmp_path / "b.csv", f"id,x,part,y\n2,1,test,0\n1,2,{wrong},1\n")
        refused(bad, id="id", label="y", split="part", with_label=True)


def test_view_of_columns_runs_over_all_types(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "a,pid,b,y,c,d,e\n1,x,t,0,3,4,5\n")
    parts = [
        load(source, label="y", view=ViewSettings(scheme="columns", part=part, parts=3))
        for part in range(3)
    ]
    assert [part.numeric_names + part.categorical_names for part in parts] == [
        ("a", "b"),
        ("c", "d"),
        ("e",),
    ]
    refused(source, label="y", view=ViewSettings(scheme="columns", part=0, parts=6))
    refused(source, label="y", view=ViewSettings(scheme="halves", part=0, parts=2))


def test_image_shape_of_columns(tmp_path: Path) -> None:
    source = write(tmp_path / "x.csv", "pid,a,b,c,d,e,f\ny,0,1,2,3,4,5\nx,9,9,9,9,9,9\n")
    table = load(source, image_shape=(1, 2, 3))
    assert table.numeric_NF is None
    assert table.numeric_names == ()
    assert present(table.images_NCHW)[1].tolist() == [[[0, 1, 2], [3, 4, 5]]]
    right = load(source, image_shape=(1, 2, 3), view=ViewSettings(scheme="halves", part=1, parts=2))
    assert present(right.images_NCHW)[1].tolist() == [[[2], [5]]]
    run = load(source, image_shape=(1, 1, 3), view=ViewSettings(scheme="columns", part=1, parts=2))
    assert present(run.images_NCHW)[1].tolist() == [[[3, 4, 5]]]
    refused(source, image_shape=(1, 2, 2))
    refused(source, image_shape=(1, 2, 3), categorical=("a",))


def test_describe_tells_counts_only(tmp_path: Path) -> None:
    lines = describe(load(write(tmp_path / "x.csv", PEOPLE), with_label=True, label="sick"))
    assert lines == [
        "rows: 3",
        "numeric columns: 2 ('age', 'weight')",
        "categorical columns: 1",
        "  'town': 2 categories",
        "  'town': 1 missing",
        "labels: 2 different values",
        "  no: 2",
        "  yes: 1",
    ]
    rows = "".join(f"i{row},{row / 4}\n" for row in range(30))
    lines = describe(load(write(tmp_path / "x.csv", "pid,y\n" + rows), with_label=True, label="y"))
    assert lines[1] == "features: none"
    assert re.match(r"labels: numbers, 30 different values from 0 to 7.25, mean 3.625,", lines[2])


def test_select_keeps_rows_together(tmp_path: Path) -> None:
    table = load(write(tmp_path / "x.csv", PEOPLE), with_label=True, label="sick").select(
        np.array([2, 0])
    )
    assert table.ids == ("7", "007")
    assert present(table.numeric_NF)[:, 0].tolist() == [30, 40]
    assert present(table.categorical).texts().tolist() == [["Bonn"], ["Oslo"]]
    assert present(table.labels).tolist() == ["no", "yes"]


def test_thirty_thousand_rows_are_put_into_the_order_of_their_ids(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(30_000, 23)).round(4)
    header = ",".join(["pid", *(f"c{j}" for j in range(23))])
    lines = [
        header,
        *(f"u{row:05d}," + ",".join(map(str, line)) for row, line in enumerate(values.tolist())),
    ]
    source = write(tmp_path / "x.csv", "\n".join(lines[:1] + lines[:0:-1]))
    table = load(source)
    np.testing.assert_array_equal(table.numeric_NF, values.astype(np.float32))


@pytest.mark.parametrize("roles", [{"split": "y"}, {"split": "id"}, {"label": "id"}])
def test_one_column_cannot_have_two_roles(roles: dict[str, str]) -> None:
    with raises(ValueError):
        DataSettings.model_validate({"source": "a.csv", "id": "id", "label": "y"} | roles)

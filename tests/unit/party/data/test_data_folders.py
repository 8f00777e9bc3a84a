"""Folders of Parquet files as Spark, Trino and BigQuery write them: read as they are, and by a query
of DuckDB.
"""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import column_names, load_table
from vfl_party.data.table import Table

ONE = pa.table({"pid": ["b", "a"], "x": [1.5, 2.0]})
OTHER = pa.table({"pid": ["c"], "x": [3.0]})
PARTS = [f"part-{part:05}-8f1e-c000.snappy.parquet" for part in range(3)]
EVERY = "duckdb:SELECT * FROM 'in/**/*.parquet'"


def written(folder: Path, files: dict[str, pa.Table | bytes], **options: Any) -> Path:
    """Writes the files of the folder ``in``."""
    for name, content in files.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            parquet.write_table(content, path, **options)
    return folder


def loaded(folder: Path, source: str, **more: Any) -> Table:
    if source.startswith("duckdb:"):
        pytest.importorskip("duckdb")
    keys = {"source": source, "id": "pid", "scratch": "spill"} | more
    return load_table(DataSettings.model_validate(keys).absolute(folder), with_label=False)


def refused(folder: Path, source: str) -> str:
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID) as caught:
        loaded(folder, source)
    return str(caught.value)


def rows(table: Table) -> dict[str, list[float]]:
    return dict(zip(table.ids, present(table.numeric_NF).tolist(), strict=True))


ROWS = {"a": [2.0], "b": [1.5], "c": [3.0]}


@pytest.mark.parametrize("source", ["in", EVERY])
def test_what_lies_beside_the_parts_is_no_row(tmp_path: Path, source: str) -> None:
    # An empty part is one that a filter has emptied.
    files = {PARTS[1]: ONE, PARTS[0]: ONE.slice(0, 0), "more/" + PARTS[2]: OTHER}
    beside = {"_SUCCESS": b"", f".{PARTS[0]}.crc": b"crc\0", "_metadata": b"?"}
    assert rows(loaded(written(tmp_path, files | beside), source)) == ROWS


def test_parts_that_are_hidden_or_unfinished_are_no_rows(tmp_path: Path) -> None:
    left = {f"_temporary/0/{PARTS[2]}": ONE, f".{PARTS[2]}": b"half"}
    written(tmp_path, {PARTS[0]: ONE, PARTS[1]: OTHER} | left)
    assert rows(loaded(tmp_path, "in")) == ROWS
    assert rows(loaded(tmp_path, "duckdb:FROM 'in/part*.parquet'")) == ROWS
    # DuckDB would take them.
    for pattern, taken in {
        "in/**/*.parquet": f" .{PARTS[2]}",
        "in/*/0/*.parquet": "_temporary/0/",
        f"{tmp_path}/in/*.parquet": f" .{PARTS[2]}",
    }.items():
        assert taken in refused(tmp_path, f"duckdb:FROM '{pattern}'")
    # Who names them means them; a folder above may have any name.
    written(tmp_path, {"_raw/" + PARTS[0]: OTHER})
    for pattern in ("in/_raw/*.parquet", "in/_r*/*.parquet"):
        assert rows(loaded(tmp_path, f"duckdb:FROM '{pattern}'")) == {"c": [3.0]}


def test_files_without_an_ending_are_read(tmp_path: Path) -> None:
    name = "20240131_101112_00003_kx7cb_9d1c0d1e-"
    parquet.write_table(ONE, tmp_path / "one")
    (tmp_path / "in").mkdir()
    for place, table in enumerate((ONE, OTHER)):
        parquet.write_table(table, tmp_path / "in" / f"{name}{place}")
    (tmp_path / "in" / "README").write_text("by Trino")
    (tmp_path / "in" / "link").symlink_to("nowhere")
    assert rows(loaded(tmp_path, "in")) == ROWS
    assert rows(loaded(tmp_path, f"duckdb:FROM read_parquet('in/{name}*')")) == ROWS


def test_first_rows_are_those_of_the_first_path(tmp_path: Path) -> None:
    written(tmp_path, {"000000000010.PARQUET": ONE, "000000000002.parquet": OTHER})
    assert list(loaded(tmp_path, "in", limit=2).ids) == ["b", "c"]


OTHERS = {
    "missing": pa.table({"pid": ["c"]}),
    "more": OTHER.append_column("z", pa.array([1.0])),
    # DuckDB would round it.
    "type": pa.table({"pid": ["c"], "x": [3]}),
}


@pytest.mark.parametrize("kind", [*OTHERS, "broken", "empty"])
@pytest.mark.parametrize("first", [False, True])
def test_parts_that_differ_are_refused(tmp_path: Path, kind: str, first: bool) -> None:
    other = OTHERS.get(kind, b"PAR1" if kind == "broken" else b"")
    names = PARTS[1], PARTS[0]
    written(tmp_path, dict(zip(names if first else names[::-1], (ONE, other), strict=True)))
    for source in ("in", EVERY):
        assert PARTS[not first] in refused(tmp_path, source)


def test_parts_that_differ_are_read_by_name(tmp_path: Path) -> None:
    written(tmp_path, {PARTS[0]: OTHERS["type"], PARTS[1]: ONE})
    by_name = "duckdb:FROM read_parquet('in/*.parquet', union_by_name = true)"
    assert rows(loaded(tmp_path, by_name)) == ROWS
    same_names = {"a=1/0.parquet": ONE, "a=2/0.parquet": OTHERS["more"]}
    written(tmp_path / "deep", same_names)
    said = refused(tmp_path / "deep", EVERY)
    assert "a=2/0.parquet has 'z', a=1/0.parquet does not" in said
    in_list = f"['in/{PARTS[0]}', 'in/{PARTS[1]}']"
    assert "'x' is BIGINT in" in refused(tmp_path, f"duckdb:FROM read_parquet({in_list})")


def test_partitions_are_refused_or_columns(tmp_path: Path) -> None:
    days = {f"day=2024-01-0{day}/{PARTS[0]}": each for day, each in ((1, ONE), (2, OTHER))}
    written(tmp_path, days)
    assert "day=2024-01-0" in refused(tmp_path, "in")
    first = (datetime.date(2024, 1, 1) - datetime.date(1970, 1, 1)).days
    assert rows(loaded(tmp_path, EVERY)) == {
        pid: [*x, first + (pid == "c")] for pid, x in ROWS.items()
    }


@pytest.mark.parametrize("source", ["in", EVERY])
def test_types_of_spark(tmp_path: Path, source: str) -> None:
    days = [datetime.datetime(1200, 1, 1), datetime.datetime(9999, 12, 31)]
    table = pa.table(
        {
            # A number without a fraction, of Oracle's.
            "pid": pa.array([Decimal("12345678901234567890"), Decimal(7)], pa.decimal128(38, 0)),
            "at": pa.array(days, pa.timestamp("us")),
            "paid": pa.array([Decimal("1.25"), None], pa.decimal128(9, 2)),
        }
    )
    written(tmp_path, {PARTS[0]: table}, use_deprecated_int96_timestamps=True)
    found = loaded(tmp_path, source, missing="zero")
    assert found.numeric_names == ("at", "paid")
    days_of = {"12345678901234567890": -281237.0, "7": 2932896.0}
    assert dict(zip(found.ids, present(found.numeric_NF)[:, 0].tolist(), strict=True)) == days_of


@pytest.mark.parametrize("source", ["in", EVERY])
@pytest.mark.parametrize("values", [[[1], [2]], [{"u": 1}, {"u": 2}], [b"x", b"y"]])
def test_columns_that_no_table_has_are_refused(
    tmp_path: Path, source: str, values: list[Any]
) -> None:
    written(tmp_path, {PARTS[0]: ONE.append_column("l", pa.array(values))})
    assert "'l'" in refused(tmp_path, source)
    assert rows(loaded(tmp_path, source, drop=["l"])) == {"a": [2.0], "b": [1.5]}


@pytest.mark.parametrize("source", ["in/table.parquet", EVERY])
def test_the_index_of_a_pandas_table_is_no_feature_unless_it_is_listed(
    tmp_path: Path, source: str
) -> None:
    frame = pd.DataFrame({"pid": ["b", "a", "c"], "x": [1.5, 2.0, 3.0]}, index=[7, 1, 4])
    (tmp_path / "in").mkdir()
    frame.to_parquet(tmp_path / "in" / "table.parquet")
    table = loaded(tmp_path, source)
    assert rows(table) == ROWS
    assert [note for note in table.notes if "'__index_level_0__'" in note]
    for key in ({"columns": ["__index_level_0__"]}, {"numeric": ["__index_level_0__"]}):
        listed = loaded(tmp_path, source, **key)
        assert "__index_level_0__" in listed.numeric_names
        assert not [note for note in listed.notes if "pandas" in note]
    assert rows(loaded(tmp_path, source, id="__index_level_0__", drop=["pid"])) == {
        "1": [2.0],
        "4": [3.0],
        "7": [1.5],
    }


@pytest.mark.parametrize("source", ["s3://bucket/x.parquet", "https://host/x.parquet"])
def test_the_url_of_a_file_is_no_missing_file(source: str) -> None:
    with raises(InputError, Code.FILE_INVALID, Code.DATA_INVALID, names="x.parquet") as caught:
        column_names(DataSettings(source=source))
    assert "is a URL, but only URLs of databases can be read" in str(caught.value)

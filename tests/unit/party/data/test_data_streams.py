"""A table that is larger than memory is read as a small one is: the same bytes, whatever the blocks
and the place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest
from pydantic import TypeAdapter

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.config.models import EncoderSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, load_table, make_loader, row_arrays
from vfl_party.data import reading as collect
from vfl_party.data import stream as cells_as_text
from vfl_party.data.row_arrays import MappedArray
from vfl_party.data.rows import Prepared, prepare
from vfl_party.data.sources import parquet as parquet_source
from vfl_party.data.sources import text as text_source
from vfl_party.data.sources.parquet import open_parquet

N = 300
TOWNS = np.array(["Bonn", "Oslo", None, "Rom", ""], object)


def frame() -> pa.Table:
    """Rows in no order, with numbers, categories, dates, missing cells, repeated ids, labels and
    splits.
    """
    random = np.random.default_rng(5)
    ids = np.array([f"c{each:05}" for each in random.permutation(N)], object)
    ids[[7, 100]] = ids[3], None
    return pa.table(
        {
            "id": pa.array(ids, pa.string()),
            "a": pa.array(random.standard_normal(N), mask=random.random(N) < 0.1),
            "b": random.integers(0, 9, N),
            "town": pa.array(TOWNS[random.integers(0, 5, N)], pa.string()),
            "d": pa.array(random.integers(0, 20_000, N).astype(np.int32), pa.date32()),
            "one": np.ones(N),
            "y": pa.array(np.array(["no", "yes"])[random.integers(0, 2, N)]),
            "part": pa.array(
                np.array(["train", "validation", "test"])[random.choice(3, N, p=[0.7, 0.1, 0.2])]
            ),
        }
    )


def csv(folder: Path) -> str:
    arrow_csv.write_csv(frame(), folder / "x.csv")
    return str(folder / "x.csv")


def csv_gz(folder: Path) -> str:
    with pa.CompressedOutputStream(str(folder / "x.csv.gz"), "gzip") as file:
        arrow_csv.write_csv(frame(), file)
    return str(folder / "x.csv.gz")


def semicolons(folder: Path) -> str:
    text = Path(csv(folder)).read_text().replace(",", ";").replace(".", ",")
    (folder / "y.txt").write_bytes(text.replace("Rom", "Köln").encode("cp1252"))
    return str(folder / "y.txt")


def one_parquet(folder: Path) -> str:
    parquet.write_table(frame(), folder / "x.parquet", row_group_size=70)
    return str(folder / "x.parquet")


def parquet_folder(folder: Path) -> str:
    (folder / "p" / "later").mkdir(parents=True)
    parquet.write_table(frame().slice(0, 130), folder / "p" / "a.parquet")
    parquet.write_table(frame().slice(130), folder / "p" / "later" / "b.parquet")
    return str(folder / "p")


def excel(folder: Path) -> str:
    book = openpyxl.Workbook(write_only=True)
    sheet = book.create_sheet("rows")
    sheet.append(frame().column_names)
    for row in frame().to_pylist():
        sheet.append(list(row.values()))
    book.save(folder / "x.xlsx")
    return str(folder / "x.xlsx")


def sqlite(folder: Path) -> str:
    with contextlib.closing(sqlite3.connect(folder / "x.db")) as base, base:
        base.execute(
            "CREATE TABLE people (id TEXT, a REAL, b INTEGER, town TEXT, d TEXT, one REAL, y TEXT, part TEXT)"
        )
        rows = [
            [str(cell) if isinstance(cell, date) else cell for cell in row.values()]
            for row in frame().to_pylist()
        ]
        base.executemany("INSERT INTO people VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    return f"sqlite:///{folder / 'x.db'}"


SOURCES: list[Callable[[Path], str]] = [
    csv,
    csv_gz,
    semicolons,
    one_parquet,
    parquet_folder,
    excel,
    sqlite,
]


def small_blocks(patch: pytest.MonkeyPatch) -> None:
    """Cuts every table into blocks of a few rows, and every computation into parts of a few."""
    patch.setattr(collect, "BLOCK", 7)
    patch.setattr(text_source, "BLOCK_BYTES", 1000)
    patch.setattr(parquet_source, "BLOCK_BYTES", 1000)
    patch.setattr(row_arrays, "PART", 11)


def settings_of(source: str, **more: Any) -> DataSettings:
    if source.startswith("sqlite"):
        more["query"] = "SELECT * FROM people ORDER BY rowid"
    given = {"label": "y", "split": "part", "missing": "mean", "duplicates": "first", "id": ("id",)}
    return DataSettings(source=source, **{**given, **more})


def encoder(kind: str) -> Any:
    return TypeAdapter(EncoderSettings).validate_python({"kind": kind})


def prepared(table: Table, settings: DataSettings, kind: str) -> Prepared:
    recipe = Recipe.model_validate(cases.recipe(2, task={"kind": "binary"}))
    return prepare(recipe, recipe.active.name, table, settings, encoder(kind))


def same(one: Any, other: Any) -> None:
    assert (one is None) == (other is None)
    if one is not None:
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def same_tables(one: Table, other: Table) -> None:
    assert list(one.ids) == list(other.ids)
    assert (one.numeric_names, one.categorical_names) == (
        other.numeric_names,
        other.categorical_names,
    )
    same(one.numeric_NF, other.numeric_NF)
    assert one.categorical is not None
    assert other.categorical is not None
    same(one.categorical.codes_NK, other.categorical.codes_NK)
    assert one.categorical.words == other.categorical.words
    assert present(one.labels).tolist() == present(other.labels).tolist()
    assert present(one.splits).tolist() == present(other.splits).tolist()
    assert one.counts == other.counts


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda made: made.__name__)
@pytest.mark.parametrize(("kind", "missing"), [("mlp", "mean"), ("tabular", "median")])
def test_streamed_and_whole_are_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: Callable[[Path], str],
    kind: str,
    missing: str,
) -> None:
    whole = settings_of(source(tmp_path), missing=missing)
    one = load_table(whole, with_label=True)
    first = prepared(one, whole, kind)
    small_blocks(monkeypatch)
    mapped = whole.model_copy(update={"memory_mib": 0, "scratch": str(tmp_path / "scratch")})
    other = load_table(mapped, with_label=True)
    assert isinstance(other.numeric_NF, MappedArray)
    same_tables(one, other)
    second = prepared(other, mapped, kind)
    assert first.preprocessor == second.preprocessor
    assert first.fingerprint == second.fingerprint
    assert {name: rows.tolist() for name, rows in first.splits.items()} == {
        name: rows.tolist() for name, rows in second.splits.items()
    }
    rows = np.random.default_rng(1).permutation(len(one))
    for left, right in zip(
        present(first.features).inputs(rows), present(second.features).inputs(rows), strict=True
    ):
        same(left.numpy(), right.numpy())
    # The files have no name.
    assert list((tmp_path / "scratch").iterdir()) == []


def test_every_source_gives_the_same_table(tmp_path: Path) -> None:
    alike = (one_parquet, csv, csv_gz, parquet_folder, excel, sqlite)
    one, *others = (load_table(settings_of(source(tmp_path)), with_label=True) for source in alike)
    given = make_loader({"p0": frame()})(settings_of("frame of p0"), True)
    for other in (*others, given):
        same_tables(one, other)


def test_rows_that_not_all_parties_hold_follow_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``prepare`` puts them below the common ones: in a mapped file as in memory."""
    found = []
    for memory in (256, 0):
        settings = settings_of(one_parquet(tmp_path), memory_mib=memory, scratch=str(tmp_path))
        table = load_table(settings, with_label=True)
        common, rest = table.select(np.arange(0, 200)), table.select(np.arange(200, len(table)))
        recipe = Recipe.model_validate(cases.recipe(2, task={"kind": "binary"}))
        made = prepare(recipe, recipe.active.name, common, settings, encoder("tabular"), [rest])
        found.append(made)
        small_blocks(monkeypatch)
    assert found[0].fingerprint == found[1].fingerprint
    assert len(present(found[0].features).x) == len(table)


def test_limit_cuts_in_the_middle_of_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(csv(tmp_path), limit=100)
    one = load_table(settings, with_label=True)
    small_blocks(monkeypatch)
    same_tables(one, load_table(settings, with_label=True))
    assert present(one.counts).rows == 100


def refused(settings: DataSettings, code: Code = Code.FILE_INVALID) -> None:
    with raises(InputError, code):
        load_table(settings, with_label=True)


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(csv(tmp_path), memory_mib=0, scratch=str(tmp_path / "scratch"))

    def full(*_args: Any, **_more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    refused(settings)
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    refused(settings)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_scratch_that_is_no_folder_is_not_called_full(tmp_path: Path) -> None:
    (tmp_path / "scratch").touch()
    settings = settings_of(csv(tmp_path), memory_mib=0, scratch=str(tmp_path / "scratch"))
    with raises(InputError, Code.FILE_INVALID, names="data.scratch") as caught:
        load_table(settings, with_label=False)
    assert "room" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reader"), [(csv, "text._iterate_batches"), (one_parquet, "parquet._parquet_blocks")]
)
def test_a_file_that_changes_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Callable[[Path], str], reader: str
) -> None:
    module, name = reader.split(".")
    reads = {"text": text_source, "parquet": parquet_source}[module]
    path, read = Path(source(tmp_path)), getattr(reads, name)

    def changing(*given: Any) -> Iterator[pa.RecordBatch]:
        yield from read(*given)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(reads, name, changing)
    refused(settings_of(str(path)))


def test_parquet_files_with_other_columns_are_named(tmp_path: Path) -> None:
    source = Path(parquet_folder(tmp_path))
    later = source / "later" / "b.parquet"
    table = frame().slice(130)

    def other(made: pa.Table) -> None:
        parquet.write_table(made, later)
        with raises(InputError, Code.FILE_INVALID, names=("a.parquet", "b.parquet")):
            open_parquet(settings_of(str(source)))

    other(table.drop(["b"]))
    other(table.append_column("c", table["b"]))
    other(table.set_column(2, "b", table["a"]))
    other(table.select(table.column_names[::-1]))


def test_a_column_of_text_that_names_every_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells_as_text, "MAX_WORDS", 50)
    parquet.write_table(frame().append_column("name", frame()["id"]), tmp_path / "x.parquet")
    refused(settings_of(str(tmp_path / "x.parquet")), Code.DATA_INVALID)


def test_numbers_of_a_workbook_are_read_as_they_stand(tmp_path: Path) -> None:
    """A column of text with decimal commas beside them says nothing about them."""
    book = openpyxl.Workbook()
    sheet = book.active
    sheet.append(["id", "weight", "price", "code"])
    for row in range(1, 9):
        sheet.append([row, 1 + row / 1000, f"{row}.234,50", 7 if row % 2 else "7a"])
    book.save(tmp_path / "x.xlsx")
    settings = DataSettings(source=str(tmp_path / "x.xlsx"), id=("id",))
    table = load_table(settings, with_label=False)
    assert table.numeric_names == ("weight", "price")
    assert table.numeric_NF is not None
    assert table.numeric_NF[:, 0].tolist() == pytest.approx([1 + row / 1000 for row in range(1, 9)])
    assert table.numeric_NF[:, 1].tolist() == [row * 1000 + 234.5 for row in range(1, 9)]
    assert list(table.ids) == [str(row) for row in range(1, 9)]
    assert present(table.categorical).texts()[:2, 0].tolist() == ["7", "7a"]

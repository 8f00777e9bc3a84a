"""Tables that could be read silently wrong: each is read right, or refused in one sentence."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Preprocessor, Table, load_table
from vfl_party.data.row_arrays import Space

ROOT = Path(__file__).parents[4]


def write(tmp_path: Path, text: str, name: str = "t.csv", encoding: str = "utf-8") -> str:
    (tmp_path / name).write_bytes(text.encode(encoding))
    return str(tmp_path / name)


def read(source: str, **settings: Any) -> Table:
    return load_table(
        DataSettings(**{"source": source, "id": ("id",), "missing": "mean", **settings}),
        with_label=False,
    )


def numbers(source: str, **settings: Any) -> list[float]:
    table = read(source, **settings)
    assert table.numeric_NF is not None, table.categorical_names
    return [round(float(each), 4) for each in table.numeric_NF[:, 0]]


def refused(source: str, **settings: Any) -> None:
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID):
        read(source, **settings)


# -- numbers


def rows(*cells: str) -> str:
    return "id,w\n" + "".join(f'{number},"{cell}"\n' for number, cell in enumerate(cells, 1))


@pytest.mark.parametrize(
    ("cells", "want"),
    [
        # Nobody groups thousands after a 0.
        (("0,513", "0,514", "1,250"), [0.513, 0.514, 1.25]),
        (("-0,513", "-0,514"), [-0.513, -0.514]),
        (("1,513", "2,514"), [1513, 2514]),
        (("010,513", "020,514"), [10.513, 20.514]),
    ],
)
def test_three_places_after_a_comma(
    cells: tuple[str, ...], want: list[float], tmp_path: Path
) -> None:
    assert numbers(write(tmp_path, rows(*cells))) == want


def test_three_places_after_a_comma_and_a_nought_are_no_two_ways(tmp_path: Path) -> None:
    assert numbers(write(tmp_path, "id;w\n1;0,513\n2;0,514\n")) == [0.513, 0.514]


def test_a_percentage_as_text_beside_a_number_of_a_workbook(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = present(book.active)
    for row in (["id", "r"], ["a", 0.05], ["b", "7%"], ["c", 0.06]):
        sheet.append(row)
    book.save(tmp_path / "t.xlsx")
    table = read(str(tmp_path / "t.xlsx"))
    assert table.numeric_NF is None
    assert table.categorical_names == ("r",)


@pytest.mark.parametrize(
    ("cells", "want"),
    [
        (("1'234.5", "1\u2032234.5", "1`234.5"), [1234.5, 1234.5, 1234.5]),
        (("1\u2009234,5", "1\u202f234,5", "1\u00a0234,5"), [1234.5, 1234.5, 1234.5]),
        (("1,23,456.5", "12,345.5", "1,00,00,000"), [123456.5, 12345.5, 10_000_000]),
        (("5 EUR", "-7,5 EUR", "1.000 EUR"), [5, -7.5, 1000]),
        (("CHF 5.50", "CHF -7"), [5.5, -7]),
        (("-€5", "€-7", "€ 9"), [-5, -7, 9]),
        (("₹5", "₹7"), [5, 7]),
    ],
)
def test_numbers_as_countries_write_them(
    cells: tuple[str, ...], want: list[float], tmp_path: Path
) -> None:
    source = write(
        tmp_path, "id;w\n" + "".join(f"{number};{cell}\n" for number, cell in enumerate(cells))
    )
    assert numbers(source) == want


@pytest.mark.parametrize(
    "cells", [("5 EUR", "7 USD"), ("5 EUR", "7"), ("--€5", "€6"), ("1,2,3", "4,5,6")]
)
def test_what_is_no_number_stays_text(cells: tuple[str, ...], tmp_path: Path) -> None:
    source = write(
        tmp_path, "id;w\n" + "".join(f"{number};{cell}\n" for number, cell in enumerate(cells))
    )
    assert read(source).categorical_names == ("w",)


def test_signs_that_the_settings_name_hold_for_text_of_typed_tables(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"id": ["1", "2", "3"], "d": ["1.234", "2.500", ""]}), tmp_path / "t.parquet"
    )
    source = str(tmp_path / "t.parquet")
    found = present(read(source, numeric=("d",), decimal=",", thousands=".").numeric_NF)
    assert found[:2, 0].tolist() == [1234, 2500]
    assert numbers(source, numeric=("d",))[:2] == [1.234, 2.5]


# -- what is too long


# In a program of its own: Arrow's reading threads end after an error is raised, and on CPython 3.11
# `tracemalloc.stop` crashes beside a thread that allocates (gh-128679).
PEAK = """
import os, sys, tracemalloc
from tests.unit.party.data.test_data_traps import read
from vfl_common.errors import Code, InputError
for source in sys.argv[1:]:
    tracemalloc.start()
    try:
        read(source)
    except InputError as error:
        print(error.code is Code.FILE_INVALID, tracemalloc.get_traced_memory()[1], flush=True)
    tracemalloc.reset_peak()
os._exit(0)
"""


@pytest.mark.slow
def test_a_cell_that_no_table_has_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    sources = []
    for n, before in enumerate((b"id,", b"id,a\n1,2\n3,", b"id,a\n" + b"1,2\n" * 300)):
        sources.append(str(tmp_path / f"{n}.csv.gz"))
        with gzip.open(sources[-1], "wb", 1) as file:
            file.write(before)
            for _ in range(64):
                file.write(b"x" * (1 << 20))
    ran = subprocess.run(
        [sys.executable, "-c", PEAK, *sources],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    peaks = [line.split() for line in ran.stdout.splitlines()]
    assert [refused for refused, _ in peaks] == ["True"] * 3
    assert max(int(peak) for _, peak in peaks) < 1 << 28


# -- dates


@pytest.mark.parametrize("cells", [("31.01.2024", "31.01.24"), ("31.01.24", "01.02.24")])
def test_a_year_of_two_digits_is_no_year_of_four(cells: tuple[str, ...], tmp_path: Path) -> None:
    source = write(tmp_path, "id,d\n" + "".join(f"{n},{cell}\n" for n, cell in enumerate(cells)))
    if cells[0] == "31.01.24":
        refused(source, dates="%d.%m.%Y")
        assert numbers(source, dates="%d.%m.%y") == [19753, 19754]
    else:
        # Without the setting: no dates.
        table = read(source)
        assert table.numeric_NF is None
        refused(source, dates="%d.%m.%Y")


def test_columns_may_have_dates_of_several_forms(tmp_path: Path) -> None:
    text = "id;a;b;c;d\n1;01.02.24;2024-02-01;02/01/2024;13.12.2024\n2;31.01.24;2024-01-31;03/01/2024;31.01.2024\n"
    table = read(write(tmp_path, text), dates="%d.%m.%y")
    assert table.numeric_names == ("a", "b", "d")
    assert present(table.numeric_NF)[:, :2].tolist() == [[19754, 19754], [19753, 19753]]
    # Day and month cannot be told apart.
    assert table.categorical_names == ("c",)


def test_dates_that_fit_most_cells(tmp_path: Path) -> None:
    source = write(tmp_path, "id,d\n1,20240131\n2,0\n3,20240201\n")
    refused(source, dates="%Y%m%d")
    assert (
        numbers(write(tmp_path, "id,d\n1,20240131\n2,\n3,20240201\n"), dates="%Y%m%d")[0] == 19753
    )


def test_dates_that_a_workbook_holds_as_numbers(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    sheet = present(book.active)
    for row in (["id", "d"], ["a", 20240131], ["b", 20240201]):
        sheet.append(row)
    book.save(tmp_path / "t.xlsx")
    assert numbers(str(tmp_path / "t.xlsx"), dates="%Y%m%d") == [19753, 19754]


def dated(*cells: str) -> str:
    return "id;d\n" + "".join(f"K{row};{cell}\n" for row, cell in enumerate(cells))


def test_dashes_do_not_say_whether_the_day_comes_first(tmp_path: Path) -> None:
    both = write(tmp_path, dated("01-02-2024", "01-03-2024"))
    refused(both)
    assert numbers(both, dates="%m-%d-%Y") == [19724, 19725]
    assert numbers(write(tmp_path, dated("01-02-2024", "31-01-2024"))) == [19754, 19753]
    assert numbers(write(tmp_path, dated("01-02-2024", "01-31-2024"))) == [19724, 19753]
    timed = write(tmp_path, dated("01-02-2024 10:00", "01-03-2024 10:00"))
    refused(timed)


def test_a_late_cell_that_is_no_date_as_the_settings_say_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path, dated(*["31.01.24"] * 10_000, "2024-01-31"))
    refused(source, dates="%d.%m.%y")


@pytest.mark.parametrize(("first", "last"), [("31.01.2024", "soon"), ("5%", "0.5")])
def test_what_a_late_cell_contradicts_is_not_said(first: str, last: str, tmp_path: Path) -> None:
    table = read(write(tmp_path, dated(*[first] * 10_000, last)))
    assert table.categorical_names == ("d",)
    assert_names("\n".join(table.notes), "data.separator")


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (["12E3", "3"], "numbers of 'd' are written like 12E3, as some codes are"),
        (["1.2E3", "1E+3", "1e-3"], None),
        (["20240131", "20240228", "99991231"], "numbers of 'd' look like days such as 20240131"),
        (["20240131", "20241301", "20240132", "5"], None),
    ],
)
def test_numbers_that_are_perhaps_none_are_noted(
    cells: list[str], said: str | None, tmp_path: Path
) -> None:
    notes = [note for note in read(write(tmp_path, dated(*cells))).notes if "separated" not in note]
    assert len(notes) == (said is not None)
    assert said is None or notes[0].startswith(said)


def test_numbers_of_another_country_beside_decimal_commas_are_noted(tmp_path: Path) -> None:
    source = write(tmp_path, "id;price;weight;n\nA;12,5;1.234;5\nB;13,5;2.345;6\n")
    table = read(source)
    assert present(table.numeric_NF)[0].tolist() == [12.5, 1234, 5]
    assert_names(table.notes[2], "weight", "data.decimal")


def test_dates_are_set_for_text_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["1"], "d": [20240131]}), tmp_path / "t.parquet")
    refused(str(tmp_path / "t.parquet"), dates="%Y%m%d")


# -- rows to predict are written as those of training


def fitted(table: Table) -> Preprocessor:
    settings = DataSettings(source="t", id=("id",), missing="mean")
    every = np.arange(len(table))
    return Preprocessor.fit(table, every, one_hot=True, flatten=True, settings=settings)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (("2024-01-31", "2024-02-01"), ("45322", "45323")),
        (("45322", "45323"), ("2024-01-31", "2024-02-01")),
        (("7%", "8%"), ("0.07", "0.08")),
    ],
)
def test_a_column_that_was_something_else_in_training(
    before: tuple[str, ...], now: tuple[str, ...], tmp_path: Path
) -> None:
    known = Preprocessor.from_state(fitted(read(write(tmp_path, rows(*before)))).state())
    known.transform(read(write(tmp_path, rows(*before), "same.csv")))
    with raises(InputError, Code.DATA_INVALID, names="new.csv"):
        known.transform(read(write(tmp_path, rows(*now), "new.csv")))


def test_numbers_that_can_be_read_in_two_ways_are_read_as_in_training(tmp_path: Path) -> None:
    known = Preprocessor.from_state(fitted(read(write(tmp_path, rows("1,51", "2,5")))).state())
    new = DataSettings(source=write(tmp_path, rows("1,510", "2,500"), "new.csv"), id=("id",))
    alone, like = (
        load_table(each, with_label=False).numeric_NF
        for each in (new, new.copy_layout_of(known.style))
    )
    assert (present(alone)[0, 0], round(float(present(like)[0, 0]), 4)) == (1510, 1.51)


# -- rows that disappear


def swallowing(rows_: int, end: str) -> str:
    within = "".join(f"{n},t{n},{n}\n" for n in range(3, rows_))
    return f'id,t,x\n1,a,3\n2,"Foo,3\n{within}{rows_},b"{end},4\n' + "".join(
        f"{n},t{n},{n}\n" for n in range(rows_ + 1, rows_ + 20)
    )


def test_a_limit_does_not_hide_rows_that_a_quotation_mark_swallows(tmp_path: Path) -> None:
    source = write(tmp_path, swallowing(50, " c"))
    for limit in (None, 10):
        refused(source, limit=limit)
    assert len(read(write(tmp_path, 'id,t\n1,5" pipe\n2,b\n3,c\n'), limit=2)) == 2


def test_a_cell_with_thousands_of_lines(tmp_path: Path) -> None:
    refused(write(tmp_path, swallowing(20_000, "")))
    some = read(write(tmp_path, swallowing(150, "") + "".join(f"x{n},a,1\n" for n in range(200))))
    assert_names("\n".join(some.notes), "quotation")
    assert read(write(tmp_path, 'id,t\n1,"two\nlines"\n2,b\n')).notes == ()


def test_an_encoding_whose_quotation_marks_are_other_bytes(tmp_path: Path) -> None:
    source = write(tmp_path, 'id,t,x\n1,"Foo,3\n2,b,3\n3,c" d,4\n', encoding="cp500")
    refused(source, encoding="cp500")


def test_hidden_and_temporary_files_of_a_folder(tmp_path: Path) -> None:
    for name in ("a", ".c", "_temporary/0/b", ".ipynb_checkpoints/a-checkpoint"):
        path = tmp_path / "t" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [name], "x": [1.0]}), path)
    assert list(read(str(tmp_path / "t")).ids) == ["a"]
    (tmp_path / "t" / "town=Bonn").mkdir()
    pq.write_table(pa.table({"id": ["z"], "x": [1.0]}), tmp_path / "t" / "town=Bonn" / "p.parquet")
    refused(str(tmp_path / "t"))


def test_a_folder_whose_files_say_otherwise_what_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    for name, nullable in (("a", True), ("b", False)):
        schema = pa.schema([("id", pa.string()), pa.field("x", pa.float64(), nullable=nullable)])
        pq.write_table(
            pa.table({"id": [name], "x": [1.0]}, schema), tmp_path / "t" / f"{name}.parquet"
        )
    assert len(read(str(tmp_path / "t"))) == 2


# -- what is no file


@pytest.mark.parametrize("name", ["p.csv", "p.parquet", "p.xlsx", "p.npz"])
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    refused(str(tmp_path / name))


@pytest.mark.parametrize("kind", [">f8", "<f8", "longdouble"])
def test_numbers_of_another_machine(kind: str, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "t.npz", id=np.arange(3).astype(">i8"), x=np.array([1.0, 2.0, 3.5]).astype(kind)
    )
    assert numbers(str(tmp_path / "t.npz")) == [1.0, 2.0, 3.5]


def test_a_disk_that_is_full_is_said_in_a_sentence_wherever_it_happens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file with a buffer would be written once more when it is closed, and that error take the
    sentence's place.
    """
    room = [0]

    def limited(space: Space, size: int) -> Any:
        file = made(space, size)
        os.truncate(file.fileno(), 0)
        return Full(file, room)

    made = Space._open_file
    monkeypatch.setattr(Space, "_open_file", limited)
    growing = Space(str(tmp_path), 0).growing(4, np.float32)
    with raises(InputError, Code.FILE_INVALID, names="data.scratch"):
        growing.append(np.ones((1000, 4), np.float32))


class Full:
    """A file on a disk that takes so many bytes, and then none."""

    def __init__(self, file: Any, room: list[int]) -> None:
        assert not hasattr(file, "raw"), "the file has a buffer"
        self._file, self._room = file, room

    def write(self, data: memoryview) -> int:
        if len(data) > self._room[0]:
            raise OSError(28, "No space left on device")
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

"""Ids that are not what they were, and rows that are none: read right, refused in one sentence, or
noted.
"""

from __future__ import annotations

import gzip
import re
import sqlite3
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from tests.harness.errors import assert_names, raises
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import load_table, read_rows
from vfl_party.data.notes import find_smells


def settings(source: Path | str, **keys: Any) -> DataSettings:
    return DataSettings(**{"source": str(source), "id": ("id",), **keys})


def csv(tmp_path: Path, *ids: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(
        "id;a\n" + "".join(f"{each};{row % 5}\n" for row, each in enumerate(ids)), encoding="utf-8"
    )
    return path


def noted(source: Path | str, **keys: Any) -> list[str]:
    known = settings(source, **keys)
    return [smell.text for smell in find_smells(read_rows(known, False), known)]


def refused(source: Path | str, **keys: Any) -> None:
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID):
        load_table(settings(source, **keys), with_label=False)


@pytest.mark.parametrize("rules", [(), ("digits",), ("trim", "casefold")])
@pytest.mark.parametrize("duplicates", ["error", "first", "drop"])
def test_ids_that_a_spreadsheet_has_made_equal_are_never_one_person(
    rules: tuple[str, ...], duplicates: str, tmp_path: Path
) -> None:
    source = csv(tmp_path, "K1", "1.23457E+11", "1.23457E+11", "1,2e+11")
    refused(source, id_rules=rules, duplicates=duplicates)


def test_rounded_ids_that_differ_are_noted_whatever_the_rules(tmp_path: Path) -> None:
    source = csv(tmp_path, "1.23457E+11", "1.23458E+11")
    for rules in ((), ("digits",)):
        assert_names(noted(source, id_rules=rules)[0], "05")
    # Three digits before the point: the engineering format.
    source = csv(tmp_path, "120.0E+05", "121.0E+05")
    assert noted(source) == [
        "2 ids look like 1.2E+05: a spreadsheet has rounded them. Write ids as text."
    ]
    # People call things so.
    assert noted(csv(tmp_path, "1e5", "2e5")) == []


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        (["1001.0", "1002.0", "K3"], "2 ids end in .0"),
        (["1001,0", "K2"], "1 id ends in .0"),
        (["K1\u200b", "K2", "\ufeffK3"], "2 ids have invisible characters"),
        (["'0417", "0418"], "1 id begins with a spreadsheet's mark for text"),
        (['"=""0417"""', '"=""0418"""'], "2 ids begin with a spreadsheet's mark for text"),
        (["nan", "K2", "NULL"], "2 ids are words for a missing value, such as NULL or nan"),
        (
            [*(f"K-{each:04d}" for each in range(100)), "Sum"],
            "the id in the last row does not look like the others",
        ),
        (
            [*(f"{each}" for each in range(100)), "exported by X"],
            "the id in the last row does not look",
        ),
    ],
)
def test_odd_ids_are_noted(ids: list[str], said: str, tmp_path: Path) -> None:
    (note,) = noted(csv(tmp_path, *ids), id_rules=("trim", "casefold"))
    assert note.startswith(said)


def test_ids_of_several_kinds_are_nothing_odd(tmp_path: Path) -> None:
    assert (
        noted(
            csv(tmp_path, *(f"K{each}" for each in range(50)), *(f"{each}" for each in range(50)))
        )
        == []
    )
    # Too few to know.
    assert noted(csv(tmp_path, *(f"K{each}" for each in range(10)), "Sum")) == []


def test_an_id_that_excel_has_cut_is_refused(tmp_path: Path) -> None:
    book = openpyxl.Workbook()
    assert book.active is not None
    for row in (["id", "a"], [123456789012345, 1], [4111111111111110, 2]):
        book.active.append(row)
    book.save(tmp_path / "t.xlsx")
    refused(tmp_path / "t.xlsx")
    book.active["A3"] = "4111111111111111"
    book.save(tmp_path / "t.xlsx")
    table = load_table(settings(tmp_path / "t.xlsx"), with_label=False)
    assert list(table.ids) == ["123456789012345", "4111111111111111"]
    found = load_table(settings(tmp_path / "t.xlsx", id=("a",)), with_label=False).numeric_names
    # Any number may be a feature.
    assert found == ("id",)


def test_an_id_that_a_database_keeps_as_a_decimal_number_is_seen_to_be_rounded(
    tmp_path: Path,
) -> None:
    with sqlite3.connect(tmp_path / "t.db") as base:
        base.execute("CREATE TABLE t (id REAL, a REAL)")
        base.executemany(
            "INSERT INTO t VALUES (?, ?)",
            [(1234567890123456700, 1), (1234567890123456701, 2), (7, 3)],
        )
    base.close()
    source = f"sqlite:///{tmp_path}/t.db"
    refused(source, query="SELECT * FROM t", duplicates="first")
    table = load_table(settings(source, query="SELECT * FROM t WHERE a > 2"), with_label=False)
    assert list(table.ids) == ["7"]


# --- rows that are none


@pytest.mark.parametrize("again", ["id;a;w", " id; a ;w "])
@pytest.mark.parametrize("rows", [3, 70_000])
def test_a_line_of_names_in_the_middle_is_refused(again: str, rows: int, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    one = "".join(f"K{row};{row};x\n" for row in range(rows))
    path.write_text(f"id;a;w\n{one}{again}\n{one.replace('K', 'L')}", encoding="utf-8")
    refused(path)


def test_a_word_may_be_called_as_its_column_is(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id;male;w\n1;male;x\nid;female;w\n;;\n", encoding="utf-8")
    assert len(load_table(settings(path), with_label=False)) == 2
    only = load_table(settings(path, id=("male",), columns=()), with_label=False)
    assert list(only.ids) == ["female", "male"]


@pytest.mark.parametrize("row", [1, 300, 90_000])
def test_a_zero_byte_is_refused_wherever_it_is(row: int, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    lines = [f"K{each};{each % 7}" for each in range(row + 10)]
    lines[row] += "\0"
    path.write_text("\n".join(["id;a", *lines]) + "\n", encoding="utf-8")
    refused(path)


# --- numbers


def numbers(tmp_path: Path, *cells: object) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(
        "id;a\n" + "".join(f"K{row};{cell}\n" for row, cell in enumerate(cells)), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            [1, 2, 300, -999, -999],
            "2 cells of 'a' are -999, far from all others. List the number in data.na",
        ),
        ([1, 2, "", 999, 999], "2 cells of 'a' are 999, far from all others"),
        # The only one below 0.
        ([0, 2_000, -99, -99, -99], "3 cells of 'a' are -99, far from all others"),
        ([-20, 30, -999, -999], "2 cells of 'a' are -999"),
        # Once is no habit.
        ([1, 2, -999], None),
        ([-999, -998, -999, -990], None),
        ([1, 999, 999, 800], None),
        ([999, 999], None),
        ([-5, 500, -9, -9], None),
        (["", "NA", ""], "column 'a' is empty in all rows. List it in data.drop."),
    ],
)
def test_numbers_that_stand_for_nothing_are_noted(
    cells: list[object], said: str | None, tmp_path: Path
) -> None:
    found = noted(numbers(tmp_path, *cells))
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(said)
    if said is not None and "far" in said:
        value = re.findall(r"are (-?\d+)", said)[0]
        assert noted(numbers(tmp_path, *cells), na=(value,)) == []


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (
            ["70 kg", "7.5 kg"],
            "column 'a' is read as categories: its cells are numbers with a unit, such as '70 kg'",
        ),
        (
            ["1cm", "-2cm", ""],
            "column 'a' is read as categories: its cells are numbers with a unit",
        ),
        (["70 kg", "150 lb"], None),
        (["A1", "A2"], None),
        (
            ["yes", "no", "Y", "N"],
            "categories of 'a' say yes or no in several spellings, such as 'yes' and 'Y'",
        ),
        (
            ["true", "0", "false", "1"],
            "categories of 'a' say yes or no in several spellings, such as 'true' and '1'",
        ),
        (["ja", "nein"], None),
        (["y", "no", "unknown"], None),
    ],
)
def test_numbers_with_units_and_several_spellings_of_yes_are_noted(
    cells: list[object], said: str | None, tmp_path: Path
) -> None:
    found = noted(numbers(tmp_path, *cells))
    assert len(found) == (said is not None)
    assert said is None or found[0].startswith(said)


def test_labels_in_several_spellings_are_noted(tmp_path: Path) -> None:
    source = tmp_path / "t.csv"
    source.write_text("id;a;y\n1;5;yes\n2;6;Y\n3;7;no\n", encoding="utf-8")
    known = settings(source, label="y")
    (found,) = find_smells(read_rows(known, True), known)
    assert_names(found.text, "yes")


def test_a_compressed_file_without_its_ending_is_told(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(gzip.compress(b"id;a\n1;2\n"))
    refused(tmp_path / "t.csv")


# --- titles


@pytest.mark.parametrize("title", ["", "Report of May\n", "Report\n\nby X\nof May\n"])
def test_new_rows_may_have_other_lines_above_the_names_than_those_of_training(
    title: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{title}id;a\nK1;5\nK2;6\n", encoding="utf-8")
    new = load_table(
        settings(path, skip_lines=2, as_trained=True, numeric=("a",)), with_label=False
    )
    assert list(new.ids) == ["K1", "K2"]
    book = openpyxl.Workbook()
    assert book.active is not None
    for line in path.read_text(encoding="utf-8").splitlines():
        book.active.append(line.split(";"))
    book.save(tmp_path / "t.xlsx")
    new = load_table(settings(tmp_path / "t.xlsx", skip_lines=2, as_trained=True), with_label=False)
    assert list(new.ids) == ["K1", "K2"]

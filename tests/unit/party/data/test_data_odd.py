"""Tables as people have them: each is read right, or refused with a sentence that says where and
what to do.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.errors import assert_names, raises
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import load_table, read_rows
from vfl_party.data import reading as collecting
from vfl_party.data.notes import Smell, find_smells
from vfl_party.data.reading import collect
from vfl_party.data.sources.text import QuotedBytes, open_text

NAN = "missing"


def columns(path: Path, **settings: Any) -> dict[str, list[Any]]:
    """Reads a table: {column: its values in the order of the ids}."""
    table = load_table(
        DataSettings(source=str(path), id=("id",), missing="zero", **settings), with_label=False
    )
    found: dict[str, list[Any]] = {}
    if table.numeric_NF is not None:
        values = table.numeric_NF.astype(float).T.tolist()
        found |= {
            name: [NAN if value != value else value for value in column]
            for name, column in zip(table.numeric_names, values, strict=True)
        }
    if table.categorical is not None:
        found |= dict(
            zip(table.categorical_names, table.categorical.texts().T.tolist(), strict=True)
        )
    return found


def written(folder: Path, content: bytes | str, name: str = "x.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def smells(folder: Path, content: str, **more: Any) -> list[Smell]:
    settings = DataSettings(source=str(written(folder, content)), id=("id",), **more)
    return list(find_smells(read_rows(settings, "label" in more), settings))


READ: dict[str, tuple[bytes | str, dict[str, Any], dict[str, list[Any]]]] = {
    "semicolons": ("id;a\n1;2\n2;3\n", {}, {"a": [2, 3]}),
    "tabs": ("id\ta\n1\t2\n", {}, {"a": [2]}),
    "bars": ("id|a\n1|2\n", {}, {"a": [2]}),
    "Excel's own first line": ("sep=;\nid;a\n1;2\n", {}, {"a": [2]}),
    "commas within the only text": ('id,a\n1,"x, y"\n', {}, {"a": ["x, y"]}),
    "a byte order mark": ("\ufeffid,a\n1,2\n", {}, {"a": [2]}),
    "Windows-1252": (
        "id;town\n1;Köln\n2;Münster\n".encode("cp1252"),
        {},
        {"town": ["Köln", "Münster"]},
    ),
    "UTF-16": ("id\ttown\n1\tKöln\n".encode("utf-16"), {}, {"town": ["Köln"]}),
    "UTF-32": ("id\ttown\n1\tKöln\n".encode("utf-32"), {}, {"town": ["Köln"]}),
    "UTF-32 of another machine": (
        "\ufeffid;town\n1;Köln\n".encode("utf-32-be"),
        {},
        {"town": ["Köln"]},
    ),
    "UTF-16 without its mark": (
        "id,town\n1,Köln\n".encode("utf-16-le"),
        {"encoding": "utf-16-le"},
        {"town": ["Köln"]},
    ),
    "lines of Windows": ("id,a\r\n1,2\r\n", {}, {"a": [2]}),
    "lines of old Macs": ("id,a\r1,2\r2,3\r", {}, {"a": [2, 3]}),
    "empty lines": ("\n\nid,a\n\n1,2\n\n", {}, {"a": [2]}),
    "lines before the names": ("Export\n\nid,a\n1,2\n", {"skip_lines": 2}, {"a": [2]}),
    "a cell of a megabyte": (
        f"id;a;w\n1;2;{'x' * (1 << 20)}\n2;3;y\n",
        {"drop": ("w",)},
        {"a": [2, 3]},
    ),
    "spaces around names": (" id , a \n1,2\n", {}, {"a": [2]}),
    "spaces around numbers": ("id,a\n1, 2\n", {}, {"a": [2]}),
    "a line break in a name": ('id,"a\nb"\n1,2\n', {}, {"a\nb": [2]}),
    "the index of pandas": (",id,a\n0,1,2\n", {}, {"a": [2]}),
    "a separator at the end of each line": ("id;a;\n1;2;\n", {}, {"a": [2]}),
    "decimal commas": ("id;a;b\n1;2,5;x\n2;3,25;y\n", {}, {"a": [2.5, 3.25], "b": ["x", "y"]}),
    "decimal commas between quotes": ('id,a\n1,"77,5"\n2,"1,25"\n', {}, {"a": [77.5, 1.25]}),
    "points between thousands": (
        "id;a;b\n1;1.234,5;1.234\n2;3,0;12.345\n",
        {},
        {"a": [1234.5, 3], "b": [1234, 12345]},
    ),
    "commas between thousands": ('id,a\n1,"77,516"\n2,5\n', {}, {"a": [77516, 5]}),
    "spaces between thousands": ("id;a\n1;1\u00a0234,5\n2;1\u202f000\n", {}, {"a": [1234.5, 1000]}),
    "French whole numbers": ("id;a\n1;20 000\n2;3\n", {}, {"a": [20000, 3]}),
    "Swiss whole numbers": ("id;a\n1;20'000\n2;3\u2019000\n", {}, {"a": [20000, 3000]}),
    "spaces that are said": ("id;a\n1;20 000\n", {"thousands": " "}, {"a": [20000]}),
    "points beside commas": (
        "id;a;b\n1;0,25;10.000\n2;0,5;9.000\n",
        {},
        {"a": [0.25, 0.5], "b": [10000, 9000]},
    ),
    "points with a comma that is said": ("id;a\n1;85.705\n", {"decimal": ","}, {"a": [85705]}),
    "Swiss thousands": ("id;a\n1;1'234.5\n2;3\n", {}, {"a": [1234.5, 3]}),
    "millions": ("id;a\n1;1.234.567\n2;12\n", {}, {"a": [1234567, 12]}),
    "a comma that is said": ("id;a\n1;1,234\n", {"decimal": ","}, {"a": [pytest.approx(1.234)]}),
    "thousands that are said": ("id;a\n1;1,234\n", {"thousands": ","}, {"a": [1234]}),
    "a point that is said": ("id;a\n1;1.234\n", {"decimal": "."}, {"a": [pytest.approx(1.234)]}),
    "percent": ("id,a\n1,39%\n2,4 %\n", {}, {"a": [39, 4]}),
    "euros": ("id;a\n1;1.234,50 €\n2;3,00 €\n", {}, {"a": [1234.5, 3]}),
    "dollars": ('id,a\n1,"$1,234.50"\n2,$3\n', {}, {"a": [1234.5, 3]}),
    "powers of ten": ("id,a\n1,2e3\n2,25E-2\n", {}, {"a": [2000, 0.25]}),
    "words for nothing": ("id,a\n1,#N/A\n2,?\n3,-\n4,null\n5,1\n", {}, {"a": [NAN] * 4 + [1]}),
    "ISO dates": ("id,d\n1,2024-01-31\n2,\n", {}, {"d": [19753, NAN]}),
    "ISO times": (
        "id,d\n1,2024-01-31T12:00:00\n2,2024-02-01 00:00:00\n",
        {},
        {"d": [19753.5, 19754]},
    ),
    "times of a zone": (
        "id,d\n1,2024-01-31T12:00:00+02:00\n",
        {},
        {"d": [pytest.approx(19753 + 10 / 24, abs=1e-3)]},
    ),
    "German dates": ("id;d\n1;31.01.2024\n2;1.2.2024\n", {}, {"d": [19753, 19754]}),
    "American dates": ("id,d\n1,01/31/2024\n2,02/01/2024\n", {}, {"d": [19753, 19754]}),
    "British dates": ("id,d\n1,31/01/2024\n2,01/02/2024\n", {}, {"d": [19753, 19754]}),
    "dates that are said": ("id,d\n1,01/02/2024\n", {"dates": "%d/%m/%Y"}, {"d": [19754]}),
    "dates of two forms": (
        "id,d,e,f\n1,01/02/2024,01/02/2024,31.01.2024\n",
        {"dates": {"d": "%d/%m/%Y", "e": "%m/%d/%Y"}},
        {"d": [19754], "e": [19724], "f": [19753]},
    ),
    "dates without signs": (
        "id,d\n1,20240131\n2,20240201\n",
        {"dates": "%Y%m%d"},
        {"d": [19753, 19754]},
    ),
    "years of two digits, as it is said": (
        "id;d\n1;31.01.24\n",
        {"dates": "%d.%m.%y"},
        {"d": [19753]},
    ),
    "names of months": ("id,d\n1,31-Jan-2024\n", {"dates": "%d-%b-%Y"}, {"d": [19753]}),
    "many lines that are skipped": ("x\n" * 250 + "id,a\n1,2\n", {"skip_lines": 250}, {"a": [2]}),
    "line breaks in a cell, of Windows": ('id,a\r\n1,"x\r\ny"\r\n', {}, {"a": ["x\ny"]}),
    "quotation marks within quotation marks": (
        'id,a\n1,"5"" pipe"\n2,""\n',
        {},
        {"a": ['5" pipe', None]},
    ),
    "dates as categories": ("id,d\n1,2024-01-31\n", {"categorical": ["d"]}, {"d": ["2024-01-31"]}),
    "a day that is none": (
        "id;d\n1;31.02.2024\n2;1.2.2024\n",
        {},
        {"d": ["31.02.2024", "1.2.2024"]},
    ),
    "quotation marks for inches": ('id,a\n1,5" pipe\n2,6\n', {}, {"a": ['5" pipe', "6"]}),
    "ids with zeros before them": ("id,a\n007,1\n7,2\n", {}, {"a": [1, 2]}),
    "a line of totals": ("id;a\n1;2\n2;3\n;5\n", {}, {"a": [2, 3]}),
    "no ending that says CSV": ("id\ta\n1\t2\n", {}, {"a": [2]}),
}


@pytest.mark.parametrize("case", READ)
def test_read_right(tmp_path: Path, case: str) -> None:
    content, settings, wanted = READ[case]
    assert (
        columns(written(tmp_path, content, "x.txt" if "ending" in case else "x.csv"), **settings)
        == wanted
    )


LATE = "id;a\n" + "".join(f"{row};{row % 900}\n" for row in range(11_000)) + "x;1.234\n"
REFUSED: dict[str, tuple[bytes | str, dict[str, Any], str]] = {
    "a point of two meanings": ("id;a\n1;1.234\n", {}, "data.decimal"),
    "a comma of two meanings": ("id;a\n1;1,234\n", {}, "data.thousands"),
    "a late point of two meanings": (LATE, {}, "data.decimal"),
    "day or month": ("id,d\n1,01/02/2024\n", {}, "data.dates"),
    "lines before the names": ("Export\n\nid;a\n1;2\n", {}, "data.skip_lines = 2"),
    "one separator more than names": ("id;a;b\n" + "1;2;3;\n" * 9, {}, "row 1"),
    "two encodings": ("id,a\n1,ö\n".encode() + "2,ü\n".encode("cp1252"), {}, "data.encoding"),
    "no encoding at all": (b"id,a\n1,\x81\n", {}, "data.encoding"),
    "another encoding than said": (b"id,a\n1,\xff\n", {"encoding": "utf-8"}, "data.encoding"),
    "an unknown encoding": ("id,a\n1,2\n", {"encoding": "klingon"}, "'klingon'"),
    "UTF-16 without its mark": ("id,a\n1,2\n".encode("utf-16-le"), {}, "utf-16-le"),
    "an open quotation mark": ('id,a\n1,x\n2,"y\n3,z\n', {}, "line 3"),
    "a cell too few": ("id,a\n1,2\n2\n", {}, "row 2"),
    "a cell too many": ("id,a\n1,2\n2,3,4\n", {}, "row 2"),
    "a long open cell": ('id,a\n1,"x\n' + "2,y\n" * 50_000, {}, "line 2"),
    "text after a cell that is closed": ('id,a,b\n1,1,"B"ob\n2,2,Al\n', {}, "line 2"),
    "two open quotation marks": ('id,a,b\n1,1,"Bob\n2,2,Al\n3,3,"Carl\n4,4,D\n', {}, "line 2"),
    "a long row after skipped lines": ("x\ny\nid,a\n1,2\n2,3,4\n", {"skip_lines": 2}, "row 2"),
    "a form that fits no dates": ("id;d\n1;31.01.2024\n", {"dates": "nonsense"}, "'nonsense'"),
    "a form that does not fit its column": (
        "id,d,e\n1,31/01/2024,01/31/2024\n",
        {"dates": {"d": "%m/%d/%Y", "e": "%m/%d/%Y"}},
        "'d'",
    ),
    "a form for a column that is not there": (
        "id,d\n1,31/01/2024\n",
        {"dates": {"e": "%d/%m/%Y"}},
        "'e'",
    ),
    "a form of dates, and numbers alone": (
        "id,a\n1,20240131\n",
        {"dates": "%d.%m.%Y"},
        "'%d.%m.%Y'",
    ),
    "a day that is none, as it is said": (
        "id,d\n1,31/02/24\n",
        {"dates": "%d/%m/%y"},
        "'%d/%m/%y'",
    ),
    "an encoding that makes no text": ("id,a\n1,2\n", {"encoding": "rot13"}, "'rot13'"),
    "a separator of another script": ("id,a\n1,2\n", {"separator": "€"}, "'€'"),
    "two columns of one name": ("id,a,a\n1,2,3\n", {}, "'a'"),
    "names in capitals": ("ID,a\n1,2\n", {}, "'ID'"),
    "a spreadsheet called CSV": (b"PK\x03\x04\x00", {}, "Excel"),
    "a web page called CSV": ("<html><td>id</td></html>", {}, "HTML"),
    "JSON called CSV": ('{"id": 1}', {}, "JSON"),
    "no rows": ("id,a\n", {}, "rows"),
    "nothing": ("", {}, "empty"),
    "empty lines": ("\n\n\n", {}, "empty"),
    "a word among numbers": ("id,a\n1,2\n2,x\n", {"numeric": ["a"]}, "'a'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(tmp_path: Path, case: str) -> None:
    content, settings, name = REFUSED[case]
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID, names=name) as told:
        columns(written(tmp_path, content), **settings)
    assert str(told.value).startswith(str(tmp_path / "x.csv: "))
    assert told.value.exit_code == 2


NUMBERS = "".join(f"{row},{row}\n" for row in range(400))
NOTED: dict[str, tuple[str, str]] = {
    "a stray word": (f"id,a\n{NUMBERS}400,unknown\n", "'unknown'"),
    "a stray date": ("id,a\n" + "1,2024-01-31\n2,2024-02-01\n3,soon\n", "'soon'"),
    "two ways of numbers": ("id,a\n1,39%\n2,4\n", "data.decimal"),
    "a minus behind": ("id,a\n1,3-\n2,4\n", "data.decimal"),
    "a minus of a typesetter": ("id,a\n1,\u22123\n2,4\n", "data.decimal"),
    "what accountants owe": ("id,a\n1,(3)\n2,4\n", "data.decimal"),
    "years of two digits": ("id;a\n1;31.01.24\n2;1.2.24\n", "data.dates"),
    "a category a row": ("id,a\n" + "".join(f"{row},name{row}x\n" for row in range(40)), "40"),
    "words of one meaning": ("id,a\n1,Ja\n2,ja\n3,nein\n", "'Ja'"),
    "ids of one person": ("id,a\nA1,1\na1 ,2\nb,3\n", "1 id"),
    "rounded ids": ("id,a\n1.2E+05,1\n2,2\n", "1.2E+05"),
}


@pytest.mark.parametrize("case", NOTED)
def test_what_smells_is_noted(tmp_path: Path, case: str) -> None:
    content, name = NOTED[case]
    (smell,) = smells(tmp_path, content)
    assert_names(smell.text, name)


def test_a_table_in_order_smells_of_nothing(tmp_path: Path) -> None:
    content = "id,a,town,d\n" + "".join(
        f"{row},{row / 7},{'Bonn' if row % 3 else 'Oslo'},2024-01-31\n" for row in range(99)
    )
    assert smells(tmp_path, content) == []


KEYS = "To change this, set data.decimal and data.thousands."
DAYS = "days since 1970-01-01. To change this, set data.dates or data.categorical."
NAMES = "the names of most columns are numbers. If no line of the file names the columns, set data.names."
CODES = "If they are codes, list the column in data.categorical."
GUESSED: dict[str, tuple[bytes | str, list[str]]] = {
    "nothing": ("id,a\n1,2\n", []),
    "a separator": (
        "id;a\n1;2\n",
        ["cells are separated by ';'. To change this, set data.separator."],
    ),
    "an encoding": (
        "id,a\n1,ö\n".encode("cp1252"),
        ["is not UTF-8 and is read as Windows-1252. To change this, set data.encoding."],
    ),
    "a decimal comma": (
        'id,a\n1,"2,5"\n',
        [f"numbers are read with a decimal comma, as in 'a'. {KEYS}"],
    ),
    "dates": ("id,a\n1,2024-01-31\n", [f"column 'a' holds dates, read as {DAYS}"]),
    "a code": (
        "id,a\n1,01234\n2,5\n",
        [f"numbers of 'a' begin with 0, as postcodes and codes do. {CODES}"],
    ),
    "a sign": ("id,a\n1,5%\n", ["% is dropped from the numbers of 'a'"]),
    "no names": ("id,1,2,3\n1,2,3,4\n", [NAMES]),
    "no name": (
        "id,a,\n1,2,\n",
        ["columns without a name are left out (number 3). Name them to use them."],
    ),
}


@pytest.mark.parametrize("case", GUESSED)
def test_one_sentence_says_what_was_guessed(tmp_path: Path, case: str) -> None:
    content, notes = GUESSED[case]
    settings = DataSettings(source=str(written(tmp_path, content)), id=("id",))
    assert list(read_rows(settings, False).notes) == notes


def test_what_is_found_does_not_depend_on_the_first_rows_alone(tmp_path: Path) -> None:
    many = "".join(f"{row:05};{row}\n" for row in range(20_000))
    # A decimal comma after the sample.
    assert columns(written(tmp_path, f"id;a\n{many}x;1,5\n"))["a"][-1] == 1.5
    found = columns(written(tmp_path, f"id;a\n{many}x;word\n"))["a"]
    assert found[-1] == "word"
    # As it stands in the file, not as a number.
    assert found[7] == "7"
    dates = "".join(f"{row:05};31.01.2024\n" for row in range(20_000))
    assert columns(written(tmp_path, f"id;d\n{dates}x;word\n"))["d"][-1] == "word"


def test_a_decimal_point_anywhere_decides(tmp_path: Path) -> None:
    assert columns(written(tmp_path, LATE + "y;0.5\n"))["a"][-2:] == [pytest.approx(1.234), 0.5]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with raises(ValueError):
        DataSettings(source="x.csv", decimal=".", thousands=".")
    with raises(ValueError, names="x.xlsx"):
        DataSettings(source="x.xlsx", encoding="utf-8")


def test_labels_of_one_meaning_are_noted(tmp_path: Path) -> None:
    (smell,) = smells(tmp_path, "id,a,y\n1,2,Ja\n2,3,ja \n3,4,nein\n", label="y")
    assert_names(smell.text, "Ja")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1 << 20])
@given(cells=st.lists(st.text(st.sampled_from('a,"\r\n'), max_size=6), min_size=1, max_size=8))
def test_bytes_are_the_same_in_pieces_of_any_size(size: int, cells: list[str]) -> None:
    """What a writer has quoted is sound; line ends have one byte; nothing is lost."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows([[cell, "x"] for cell in cells])
    given_bytes = text.getvalue().encode()
    data = QuotedBytes(io.BytesIO(given_bytes), ",", lines=True)
    found = b""
    while piece := data.read(size):
        found += piece
    assert found == given_bytes.replace(b"\r\n", b"\n")
    assert data.sound


def test_a_file_that_is_replaced_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "id,age,income\n1,20,1000\n")
    settings = DataSettings(source=str(path), id=("id",))
    stream = open_text(settings)
    written(tmp_path, "id,income,age\n1,1000,20\n", "y.csv").replace(path)
    with raises(InputError, Code.FILE_INVALID, names="x.csv"):
        collect(stream, settings, False)


def test_times_of_one_column_have_a_zone_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "id,d\n1,2024-01-31T12:00:00\n2,2024-01-31T12:00:00+02:00\n"
    whole = columns(written(tmp_path, content))
    monkeypatch.setattr(collecting, "BLOCK", 1)
    assert columns(written(tmp_path, content)) == whole
    assert whole["d"] == ["2024-01-31T12:00:00", "2024-01-31T12:00:00+02:00"]


def test_a_smell_says_which_column_it_is_about(tmp_path: Path) -> None:
    rows = "".join(f"{row},{row},3{row % 2}.01.24,{'Ja' if row else 'ja'}\n" for row in range(9))
    found = smells(tmp_path, f"id,a,d,w\nx,x,soon,Ja\n{rows}")
    assert [(smell.column, smell.mostly) for smell in found] == [
        ("a", "numbers"), ("d", "dates"), ("w", ""),
    ]  # fmt: skip

"""Sheets of Excel workbooks: cells as text, sheets, headers, streaming, and every way in which one
is refused.
"""

import datetime
import io
import os
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from openpyxl import Workbook

from tests.harness.errors import assert_names, raises
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data.sources.excel import open_excel
from vfl_party.data.sources.excel_sheet import cell_name, column_number, count_hidden_rows
from vfl_party.data.stream import NUMBER, RowStream

MAIN = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
STRINGS = "application/vnd.openxmlformats-officedocument.spreadsheetml.sharedStrings+xml"


def save(
    path: Path, *rows: Sequence[Any], change: Callable[[Any], object] = lambda sheet: None
) -> str:
    """Writes rows into the only sheet of a workbook, and changes the sheet before it is saved."""
    book = Workbook()
    for row in rows:
        book.active.append(row)
    change(book.active)
    book.save(path)
    return str(path)


def raw(path: Path, rows: str, after: str = "", before: str = "") -> str:
    """Writes a workbook whose sheet has these rows in XML: what openpyxl does not write."""
    save(path.with_name("blank.xlsx"), ["id"])
    sheet = f'<?xml version="1.0"?>{before}<worksheet xmlns="{MAIN}"><sheetData>{rows}</sheetData>{after}</worksheet>'
    with (
        zipfile.ZipFile(path.with_name("blank.xlsx")) as blank,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for part in blank.namelist():
            new.writestr(part, sheet if part == "xl/worksheets/sheet1.xml" else blank.read(part))
    return str(path)


def header(*names: str) -> str:
    cells = (f'<c t="str"><v>{name}</v></c>' for name in names)
    return f"<row>{''.join(cells)}</row>"


def opened(source: str, **settings: Any) -> RowStream:
    return open_excel(DataSettings(source=source, **settings))


def texts(
    source: str, wanted: tuple[str, ...] | None = None, **settings: Any
) -> dict[str, list[str | None]]:
    stream = opened(source, **settings)
    names = stream.names if wanted is None else wanted
    blocks = list(stream.blocks(names))
    assert all(block.schema.types == [pa.string()] * len(names) for block in blocks)
    return pa.Table.from_batches(blocks).to_pydict() if blocks else {name: [] for name in names}


def n(number: object) -> str:
    """Returns a number as a source writes its number cells."""
    return f"{NUMBER}{number}"


def refused(source: str, code: Code = Code.DATA_INVALID, **settings: Any) -> str:
    """Opens and reads a workbook; returns the one sentence with which it is refused."""
    with raises(InputError, code) as caught:
        texts(source, **settings)
    assert str(caught.value).startswith(source)
    return str(caught.value)


# --- cells


def test_cells_are_written_as_in_a_csv_file(tmp_path: Path) -> None:
    moment, day = datetime.datetime(2024, 1, 31, 10, 0), datetime.date(2024, 1, 31)
    rows = [
        ["007", 7, 3.0, 0.1, True, day, moment],
        ["x y", -5, 1e300, 1 / 3, False, day, moment.replace(second=7, microsecond=500_000)],
        [" ", 10**15, -2.5, 12345678.0, None, None, None],
    ]
    source = save(
        tmp_path / "t.xlsx", ["text", "whole", "real", "more", "truth", "day", "moment"], *rows
    )
    stream = opened(source)
    assert stream.source == source
    assert stream.as_written
    assert stream.notes == ()
    assert texts(source) == {
        "text": ["007", "x y", " "],
        "whole": [n(7), n(-5), n(10**15)],
        "real": [n(3), n("1e+300"), n(-2.5)],
        "more": [n(0.1), n(1 / 3), n(12345678)],
        "truth": ["true", "false", None],
        "day": ["2024-01-31", "2024-01-31", None],
        "moment": ["2024-01-31T10:00:00", "2024-01-31T10:00:07.500000", None],
    }


@pytest.mark.parametrize(
    ("value", "shown_as", "text"),
    [
        (datetime.datetime(2024, 1, 31), "yyyy-mm-dd", "2024-01-31"),
        # Midnight is a time here.
        (datetime.datetime(2024, 1, 31), "DD.MM.YYYY HH:MM", "2024-01-31T00:00:00"),
        (datetime.datetime(2024, 1, 31), '[$-409]d "hours" mmmm', "2024-01-31"),
        (datetime.datetime(2024, 1, 31, 6), "yyyy-mm-dd", "2024-01-31T06:00:00"),
        (datetime.time(10, 30), "h:mm", "10:30:00"),
        (datetime.timedelta(hours=30, minutes=15), "[h]:mm:ss", "30:15:00"),
        # A postcode is shown so, and Excel writes it so into a CSV file.
        (123, "00000", "00123"),
        (123, "000.0", f"{NUMBER}123"),
        (0.05, "0%", f"{NUMBER}0.05"),
        ("=1/3", "0", None),
    ],
)
def test_the_format_of_a_cell_decides_only_what_a_number_means(
    tmp_path: Path, value: Any, shown_as: str, text: str | None
) -> None:
    def shape(sheet: Any) -> None:
        sheet["B2"].number_format = shown_as

    source = save(tmp_path / "t.xlsx", ["id", "x"], ["a", value], change=shape)
    if text is None:
        refused(source)
        # Nobody asks for the formula.
        assert texts(source, ("id",)) == {"id": ["a"]}
    else:
        assert texts(source)["x"] == [text]


def test_values_of_formulas_and_texts_of_every_kind(tmp_path: Path) -> None:
    row = (
        '<row><c t="str"><f>"a"&amp;1</f><v>a1</v></c><c><f>1+1</f><v>2</v></c><c '
        't="str"><f>""</f><v></v></c>'
        '<c t="b"><f>TRUE()</f><v>1</v></c><c t="d"><v>2024-01-31T00:00:00</v></c>'
        '<c t="inlineStr"><is><r><t>ab</t></r><r><t xml:space="preserve"> c</t></r>'
        '<rPh sb="0" eb="1"><t>no</t></rPh></is></c>'
        "</row>"
    )
    source = raw(tmp_path / "t.xlsx", header("id", "two", "nothing", "truth", "day", "rich") + row)
    found = texts(source)
    assert {name: column[0] for name, column in found.items()} == {
        "id": "a1",
        "two": n(2),
        "nothing": None,
        "truth": "true",
        "day": "2024-01-31T00:00:00",
        "rich": "ab c",
    }


def test_shared_texts_and_dates_since_1904(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", ["id", "day"], ["a", datetime.date(2024, 1, 31)])
    assert texts(source)["day"] == ["2024-01-31"]
    row = '<row><c t="s"><v>0</v></c><c t="s"><v>2</v></c></row>'
    parts = {
        "xl/workbook.xml": ("<workbookPr ", '<workbookPr date1904="1" '),
        "xl/worksheets/sheet1.xml": ("</sheetData>", f"{row}</sheetData>"),
        "[Content_Types].xml": (
            "</Types>",
            f'<Override PartName="/xl/sharedStrings.xml" ContentType="{STRINGS}"/></Types>',
        ),
    }
    with zipfile.ZipFile(source) as before, zipfile.ZipFile(tmp_path / "u.xlsx", "w") as after:
        for part in before.namelist():
            after.writestr(part, before.read(part).decode().replace(*parts.get(part, ("", ""))))
        strings = "<si><t>b</t></si><si><r><t>no</t></r></si><si><t></t></si>"
        after.writestr("xl/sharedStrings.xml", f'<sst xmlns="{MAIN}">{strings}</sst>')
    assert texts(str(tmp_path / "u.xlsx")) == {"id": ["a", "b"], "day": ["2028-02-01", None]}


def test_errors_name_the_cell_and_only_wanted_columns_are_looked_at(tmp_path: Path) -> None:
    rows = '<row><c t="str"><v>a</v></c><c t="e"><v>#DIV/0!</v></c></row>'
    source = raw(tmp_path / "t.xlsx", header("id", "x") + rows)
    refused(source)
    assert texts(source, ("id",)) == {"id": ["a"]}
    other = raw(tmp_path / "u.xlsx", header("id", "x") + rows.replace("#DIV/0!", "private"))
    assert "private" not in refused(other)
    top = raw(
        tmp_path / "v.xlsx", '<row><c t="str"><v>id</v></c><c t="e"><v>#N/A</v></c></row>' + rows
    )
    refused(top)
    refused(raw(tmp_path / "w.xlsx", "<row><c><f>A2</f></c></row>" + rows))


@pytest.mark.parametrize(
    "cell",
    [
        '<c t="s"><v>999</v></c>',
        '<c t="b"><v>yes</v></c>',
        "<c><v>seven</v></c>",
        '<c t="d"><v>soon</v></c>',
    ],
)
def test_a_damaged_cell_is_named(tmp_path: Path, cell: str) -> None:
    source = raw(
        tmp_path / "t.xlsx", header("id", "x") + f'<row><c t="str"><v>a</v></c>{cell}</row>'
    )
    with raises(InputError, Code.DATA_INVALID, names="t.xlsx") as caught:
        texts(source)
    assert "seven" not in str(caught.value)


def test_a_number_that_is_no_date(tmp_path: Path) -> None:
    def shape(sheet: Any) -> None:
        sheet["B2"].number_format = "yyyy-mm-dd"

    source = save(tmp_path / "t.xlsx", ["id", "day"], ["a", 99_999_999], change=shape)
    refused(source)


# --- sheets and headers


def book_of(path: Path, **sheets: tuple[list[list[Any]], str]) -> str:
    """Writes a workbook with these sheets: {title: (rows, state)}."""
    book = Workbook()
    book.remove(book.active)
    for title, (rows, state) in sheets.items():
        sheet = book.create_sheet(title)
        sheet.sheet_state = state
        for row in rows:
            sheet.append(row)
    book.save(path)
    return str(path)


def test_the_sheet_is_named_or_the_only_visible_one_that_is_not_empty(tmp_path: Path) -> None:
    people, lists = [["id"], ["a"]], [["town"], ["Bonn"]]
    source = book_of(
        tmp_path / "t.xlsx",
        empty=([], "visible"),
        people=(people, "visible"),
        lists=(lists, "hidden"),
    )
    stream = opened(source)
    assert stream.names == ("id",)
    assert_names("\n".join(stream.notes), "data.sheet")
    named = opened(source, sheet="lists")
    assert (named.names, named.notes) == (("town",), ())
    refused(source, sheet="peopel")
    refused(source, Code.FILE_INVALID, sheet="empty")


def test_it_does_not_choose_between_two_sheets(tmp_path: Path) -> None:
    rows = [["id"], ["a"]]
    both = book_of(tmp_path / "t.xlsx", y2023=(rows, "visible"), y2024=(rows, "visible"))
    refused(both)
    hidden = book_of(tmp_path / "u.xlsx", first=([], "visible"), old=(rows, "hidden"))
    refused(hidden)
    none = book_of(tmp_path / "v.xlsx", first=([], "visible"), second=([], "visible"))
    refused(none, Code.FILE_INVALID)
    refused(save(tmp_path / "w.xlsx"), Code.FILE_INVALID)


def test_new_rows_for_a_trained_model_may_be_in_a_sheet_of_another_name(tmp_path: Path) -> None:
    rows: list[list[Any]] = [["id", "x"], ["a", 1]]
    source = book_of(tmp_path / "t.xlsx", **{"May 2024": (rows, "visible")})
    refused(source, sheet="April")
    assert texts(source, sheet="April", as_trained=True)["id"] == ["a"]
    both = book_of(tmp_path / "u.xlsx", May=(rows, "visible"), June=(rows, "visible"))
    refused(both, sheet="April", as_trained=True)
    assert texts(both, sheet="June", as_trained=True)["id"] == ["a"]


TITLED: list[list[Any]] = [["Report of May"], ["by", "X", 5], [], ["id", "x"], ["a", 1], ["b", 2]]


def test_rows_above_the_names_are_skipped_if_the_settings_say_so(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", *TITLED, change=lambda sheet: sheet.merge_cells("A1:F1"))
    assert texts(source, skip_lines=3) == {"id": ["a", "b"], "x": [n(1), n(2)]}
    assert texts(source, skip_lines=2)["id"] == ["a", "b"]
    refused(source, id=("id",))
    refused(source, skip_lines=1, id=("id",), label="x")
    text = refused(source)
    assert "Report" not in text


def test_header_cells_become_text_and_the_table_may_start_anywhere(tmp_path: Path) -> None:
    rows: list[list[Any]] = [
        [],
        [],
        [None, "id", 2024, datetime.date(2024, 1, 31), 0.5, True],
        [None, "a", 1, 2, 3, 4],
    ]
    source = save(tmp_path / "T.XLSX", *rows)
    assert opened(source).names == ("id", "2024", "2024-01-31", "0.5", "true")
    assert texts(source)["0.5"] == [n(3)]
    assert texts(source, ("true", "id")) == {"true": [n(4)], "id": ["a"]}
    refused(source, wanted=("x",))


def test_spaces_around_a_name_are_no_part_of_it(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", [" id", "x y ", "\u00a0"], ["a", " b "])
    assert texts(source) == {"id": ["a"], "x y": [" b "]}


def test_a_text_that_begins_as_a_number_cell_does_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", ["id", "x"], ["a", f"{NUMBER}12"])
    text = refused(source)
    assert "12" not in text.removeprefix(source)
    assert texts(source, ("id",)) == {"id": ["a"]}


def test_a_column_with_values_needs_a_name(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", ["id", None, "x", " "], ["a", None, 1], ["b", "note", 2])
    assert opened(source).names == ("id", "x")
    text = refused(source)
    assert "note" not in text
    beside = save(tmp_path / "u.xlsx", ["id"], ["a"], ["b", None, None, "sum"])
    refused(beside, id=("id",))


def test_equal_names_are_left_to_those_who_check_all_tables(tmp_path: Path) -> None:
    assert opened(save(tmp_path / "t.xlsx", ["id", "x", "x"], ["a", 1, 2])).names == (
        "id",
        "x",
        "x",
    )


# --- rows


def test_empty_rows_and_columns_that_excel_keeps_are_ignored(tmp_path: Path) -> None:
    def shape(sheet: Any) -> None:
        for place in ("B2", "A4", "C1", "H9", "D3"):
            # Formatted, and empty.
            sheet[place].number_format = "0.00"
        sheet["A5"] = ""

    source = save(tmp_path / "t.xlsx", ["id", "x"], ["a", None], ["b", 2], change=shape)
    assert texts(source) == {"id": ["a", "b"], "x": [None, n(2)]}
    filled_down = '<row><c t="str"><f>""</f><v></v></c><c t="str"><f>""</f><v></v></c></row>' * 50
    row = '<row><c t="str"><v>a</v></c><c><v>1</v></c></row>'
    prepared = raw(tmp_path / "u.xlsx", header("id", "x") + row + filled_down)
    assert texts(prepared) == {"id": ["a"], "x": [n(1)]}
    assert texts(save(tmp_path / "v.xlsx", ["id", "x"])) == {"id": [], "x": []}


def test_an_empty_row_in_the_middle_is_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", ["id", "x"], ["a", 1], [], [], ["sum", 1])
    refused(source)
    refused(save(tmp_path / "u.xlsx", ["id"], [], ["a"]))


def test_hidden_rows_are_read_and_counted(tmp_path: Path) -> None:
    def hide(sheet: Any) -> None:
        for row in (2, 4):
            sheet.row_dimensions[row].hidden = True
        sheet.column_dimensions["B"].hidden = True

    rows: list[list[Any]] = [["id", "x"], ["a", 1], ["b", 2], ["c", 3]]
    source = save(tmp_path / "t.xlsx", *rows, change=hide)
    assert_names("\n".join(opened(source).notes), "filter")
    assert texts(source)["id"] == ["a", "b", "c"]
    assert opened(save(tmp_path / "u.xlsx", *rows)).notes == ()


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_hidden_rows_are_counted_across_pieces(size: int) -> None:
    tag = b'<x:row r="%d" spans="1:2" hidden="1" ht="3"><c/></x:row>'
    text = (
        b"".join(tag % row for row in range(1, 40)) + b'<row r="50" hidden="0"/><col hidden="1"/>'
    )

    class Pieces(io.BytesIO):
        def read(self, _size: int | None = -1) -> bytes:
            return super().read(size)

    assert count_hidden_rows(Pieces(text)) == 39


def test_rows_come_in_blocks_as_often_as_asked(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", ["id", "x"], *([f"p{row}", row] for row in range(5_000)))
    stream = opened(source)
    for wanted in (("id", "x"), ("x",), ("x", "id")):
        blocks = list(stream.blocks(wanted))
        assert [block.num_rows for block in blocks] == [4096, 904]
        assert blocks[0].schema.names == list(wanted)
        assert pa.Table.from_batches(blocks)["x"].to_pylist() == [n(row) for row in range(5_000)]
    # A pass may end early.
    first = next(iter(stream.blocks(("id",))))
    assert first.num_rows == 4096


@pytest.mark.slow
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    cells = "".join(f"<c><v>{column}.5</v></c>" for column in range(6))
    # Openpyxl keeps such attributes of every row.
    row = f'<row ht="15" customHeight="1">{cells}</row>'

    def peak(rows: int) -> int:
        stream = opened(raw(tmp_path / f"{rows}.xlsx", header(*"abcdef") + row * rows))
        tracemalloc.start()
        try:
            assert sum(block.num_rows for block in stream.blocks(("a", "b"))) == rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(15_000) < 1.2 * peak(9_000)


def test_a_workbook_that_changes_is_told(tmp_path: Path) -> None:
    source = save(tmp_path / "t.xlsx", ["id"], ["a"])
    stream = opened(source)
    save(tmp_path / "t.xlsx", ["id"], ["a"], ["b"])
    with raises(InputError, Code.FILE_INVALID, names="t.xlsx"):
        list(stream.blocks(("id",)))
    stream = opened(source)
    Path(source).unlink()
    with raises(InputError, Code.FILE_INVALID, names="t.xlsx"):
        list(stream.blocks(("id",)))


# --- merged cells


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("B2:B3", "B2:B3"),
        ("A1:B1", "A1:B1"),
        # From the table's last row to beyond it.
        ("B3:D4", "B3:D4"),
        # Beside it.
        ("D1:E2", None),
        # Below it.
        ("A8:B9", None),
    ],
)
def test_merged_cells_of_the_table_are_refused(
    tmp_path: Path, where: str, said: str | None
) -> None:
    rows: list[list[Any]] = [["id", "x"], ["a", 1], ["b", 2]]
    source = save(tmp_path / "t.xlsx", *rows, change=lambda sheet: sheet.merge_cells(where))
    if said is None:
        assert texts(source)["id"] == ["a", "b"]
    else:
        assert said in refused(source, id=("id",))


def test_merged_cells_are_found_across_pieces_and_with_a_prefix(tmp_path: Path) -> None:
    row = '<row><c t="str"><v>a</v></c></row>'
    for pad in (0, (1 << 20) - 250, (1 << 20) - 190):
        after = f'<!--{" " * pad}--><mergeCells count="1"><mergeCell ref="A2:A3"/></mergeCells>'
        refused(raw(tmp_path / "t.xlsx", header("id") + row * 2, after))
    source = raw(tmp_path / "u.xlsx", header("id") + row, '<mergeCell junk="" ref="A1:B2"/>')
    refused(source)


# --- files that are no workbook


def test_old_and_protected_files_say_what_to_do(tmp_path: Path) -> None:
    ole = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)
    old = tmp_path / "t.xls"
    old.write_bytes(ole)
    refused(str(old), Code.FILE_INVALID)
    renamed = tmp_path / "t.xlsx"
    renamed.write_bytes(ole)
    refused(str(renamed), Code.FILE_INVALID)
    renamed.write_bytes(ole + "EncryptedPackage".encode("utf-16-le") + bytes(600))
    refused(str(renamed), Code.FILE_INVALID)
    binary = save(tmp_path / "t.xlsb", ["id"], ["a"])
    refused(binary, Code.FILE_INVALID)
    refused(str(tmp_path / "none.xlsx"), Code.FILE_INVALID)


def test_damaged_files_are_one_sentence(tmp_path: Path) -> None:
    whole = Path(
        save(tmp_path / "t.xlsx", ["id", "x"], *([f"{row}", row / 7] for row in range(3000)))
    ).read_bytes()
    path = tmp_path / "u.xlsx"
    for damaged in (b"", b"id,x\na,1\n", whole[: len(whole) // 2], whole[:-30]):
        path.write_bytes(damaged)
        refused(str(path), Code.FILE_INVALID)
    with zipfile.ZipFile(path, "w") as parts:
        parts.writestr("hello.txt", "no workbook")
    refused(str(path), Code.FILE_INVALID)
    with zipfile.ZipFile(tmp_path / "t.xlsx") as parts:
        part = parts.getinfo("xl/worksheets/sheet1.xml")
    middle = part.header_offset + part.compress_size // 2
    path.write_bytes(whole[:middle] + bytes(64) + whole[middle + 64 :])
    refused(str(path), Code.FILE_INVALID)


@pytest.mark.parametrize(
    "rows",
    [
        '<row r="3"/><row r="2"/>',
        '<row r="2"/><row r="2"/>',
        '<row r="1048577"/>',
        '<row r="2"><c r="B2"/><c r="A2"/></row>',
        '<row r="2"><c r="XFE2"/></row>',
        '<row r="2"><c r="22"/></row>',
        '<row r="2"><c s="x"/></row>',
        f'<row r="2"><c t="str"><v>{"a" * (1 << 20)}\nb</v></c></row>',
        "<row><c></row>",
    ],
)
def test_a_sheet_that_no_program_writes_is_damaged(tmp_path: Path, rows: str) -> None:
    source = raw(tmp_path / "t.xlsx", header("id") + rows)
    refused(source, Code.FILE_INVALID)


def test_files_that_would_fill_the_memory_are_refused(tmp_path: Path) -> None:
    laughs = '<!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>'
    refused(
        raw(tmp_path / "t.xlsx", header("id") + "<row><c><v>&b;</v></c></row>", before=laughs),
        Code.FILE_INVALID,
    )
    long_tag = f'<row><c r="A2" note="{" " * (5 << 18)}"/></row>'
    refused(raw(tmp_path / "u.xlsx", header("id") + long_tag), Code.FILE_INVALID)
    bomb = raw(tmp_path / "v.xlsx", header("id"))
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED, compresslevel=1) as parts:
        parts.writestr("xl/sharedStrings.xml", b" " * (65 << 20))
    text = refused(bomb, Code.FILE_INVALID)
    assert "sharedStrings" in text


# --- settings


def test_without_openpyxl_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save(tmp_path / "t.xlsx", ["id"], ["a"])
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    refused(source, Code.CONFIG_INVALID)


def test_sheet_is_for_workbooks() -> None:
    for source in ("people.xlsx", "People.XLSM", "old.xls"):
        assert DataSettings(source=source, sheet="x").is_table
    with raises(InputError, Code.CONFIG_INVALID, names="bank.toml"):
        parse(DataSettings, {"source": "people.csv", "sheet": "x"}, "bank.toml: data")
    assert DataSettings(source="people.xlsx").absolute(Path("/base")).source == os.path.normpath(
        "/base/people.xlsx"
    )


def test_names_of_cells() -> None:
    for letters, number in (
        ("A", 1),
        ("Z", 26),
        ("AA", 27),
        ("AZ", 52),
        ("BA", 53),
        ("ZZ", 702),
        ("XFD", 16_384),
    ):
        assert column_number(letters) == number
        assert cell_name(number, 9) == f"{letters}9"

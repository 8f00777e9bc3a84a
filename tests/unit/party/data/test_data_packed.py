"""Text files without a header, with separators of several signs, packed, and rows whose number is
their id.
"""

from __future__ import annotations

import bz2
import gzip
import io
import os
import sqlite3
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from tests.harness.errors import raises
from tests.harness.present import present
from tests.unit.party.data.test_data_sources import load, numbers, refused
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import make_loader
from vfl_party.data.sources.files import open_bytes
from vfl_party.data.sources.text_layout import SeparatorReplacer

ROWS = "id,a,town\nc,3,Rom\na,1,Oslo\nb,2.5,\n"


def written(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def zipped(path: Path, **members: str | bytes) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), data)
    return str(path)


def in_zip(folder: Path) -> str:
    return zipped(folder / "x.zip", rows_csv=ROWS, other_csv="a,b\n1,2\n") + "/rows.csv"


def deep_in_zip(folder: Path) -> str:
    return zipped(folder / "x.ZIP", a__rows_csv_gz=gzip.compress(ROWS.encode())) + "/a/rows.csv.gz"


def in_tar(folder: Path) -> str:
    with tarfile.open(folder / "dac.tar.gz", "w:gz") as archive:
        for name, text in {"./readme.txt": "a\n", "./rows.csv": ROWS, "./x.csv": "1\n"}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return str(folder / "dac.tar.gz" / "rows.csv")


PACKED: list[Callable[[Path], str]] = [
    lambda folder: written(folder / "x.csv.gz", gzip.compress(ROWS.encode())),
    lambda folder: written(folder / "x.csv.bz2", bz2.compress(ROWS.encode())),
    # As tools write them that pack in parallel.
    lambda folder: written(
        folder / "x.csv.bz2", bz2.compress(ROWS[:9].encode()) + bz2.compress(ROWS[9:].encode())
    ),
    in_zip,
    deep_in_zip,
    in_tar,
]


@pytest.mark.parametrize("made", PACKED)
def test_packed_files_are_read_as_they_are_unpacked(
    tmp_path: Path, made: Callable[[Path], str]
) -> None:
    plain = load(written(tmp_path / "plain.csv", ROWS), id="id", missing="mean")
    table = load(made(tmp_path), id="id", missing="mean")
    assert table.ids == plain.ids == ("a", "b", "c")
    np.testing.assert_array_equal(table.numeric_NF, plain.numeric_NF)
    assert (
        present(table.categorical).words == present(plain.categorical).words == (("Rom", "Oslo"),)
    )


def test_a_relative_member_starts_at_the_party_file(tmp_path: Path) -> None:
    settings = DataSettings(source="x.zip/rows.csv", id=("id",)).absolute(tmp_path)
    assert settings.source == str(tmp_path / "x.zip" / "rows.csv")
    assert settings.kind == "text"


def test_damaged_packed_files(tmp_path: Path) -> None:
    data = bz2.compress(os.urandom(300_000).hex().encode())
    refused(written(tmp_path / "x.csv.bz2", data[: len(data) // 2]), Code.FILE_INVALID, id="id")
    refused(written(tmp_path / "y.csv.bz2", ROWS), Code.FILE_INVALID, id="id")
    refused(written(tmp_path / "z.csv", bz2.compress(ROWS.encode())), Code.FILE_INVALID, id="id")


def test_zip_files_that_cannot_be_read(tmp_path: Path) -> None:
    source = in_zip(tmp_path)
    refused(str(tmp_path / "x.zip"), Code.FILE_INVALID, id="id")
    refused(source.replace("rows", "row"), Code.FILE_INVALID, id="id")
    refused(str(tmp_path / "gone.zip" / "rows.csv"), Code.FILE_INVALID, id="id")
    refused(written(tmp_path / "no.zip", "no zip") + "/rows.csv", Code.FILE_INVALID, id="id")
    refused(in_tar(tmp_path).replace("rows", "row"), Code.FILE_INVALID, id="id")
    refused(str(tmp_path / "dac.tar.gz"), Code.FILE_INVALID, id="id")
    refused(written(tmp_path / "no.tar", "no tar") + "/rows.csv", Code.FILE_INVALID, id="id")
    whole = (tmp_path / "x.zip").read_bytes()
    refused(
        written(tmp_path / "cut.zip", whole[: len(whole) // 2]) + "/rows.csv",
        Code.FILE_INVALID,
        id="id",
    )
    # A byte of the member's data.
    at = whole.index(b"rows.csv") + 20
    wrong = whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :]
    refused(written(tmp_path / "wrong.zip", wrong) + "/rows.csv", Code.FILE_INVALID, id="id")
    member = zipped(tmp_path / "y.zip", rows_parquet=b"PAR1") + "/rows.parquet"
    refused(member, Code.FILE_INVALID, id="id")
    # Flagged as locked, in both places that say so.
    locked = bytearray(whole)
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        locked[whole.index(mark) + place] |= 1
    refused(
        written(tmp_path / "locked.zip", bytes(locked)) + "/rows.csv", Code.FILE_INVALID, id="id"
    )


def test_a_member_that_is_damaged_in_any_way_of_packing(tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    for kind in (zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(path, "w", kind) as archive:
            archive.writestr("rows.csv", ROWS)
        assert len(load(str(path / "rows.csv"), id="id")) == len(ROWS.splitlines()) - 1
        whole = bytearray(path.read_bytes())
        # In the middle of what is packed.
        whole[whole.index(b"PK\x01\x02") // 2 + 20] ^= 0xFF
        path.write_bytes(whole)
        refused(str(path / "rows.csv"), Code.FILE_INVALID, id="id")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_of_one_name_and_members_that_are_links(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("rows.csv", ROWS)
        archive.writestr("rows.csv", ROWS)
    refused(str(tmp_path / "x.zip" / "rows.csv"), Code.FILE_INVALID, id="id")
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("rows.csv")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    refused(str(tmp_path / "x.tar" / "rows.csv"), Code.FILE_INVALID, id="id")


def test_a_bomb_is_refused_before_it_is_in_memory(tmp_path: Path) -> None:
    """A line of 64 MiB, in a member of 64 KiB."""
    source = zipped(tmp_path / "x.zip", rows_csv=b"a" * (1 << 26)) + "/rows.csv"
    assert (tmp_path / "x.zip").stat().st_size < 1 << 17
    refused(source, Code.FILE_INVALID, id="id")
    refused(source, Code.FILE_INVALID, id="id", separator="::", names=2)


# --- Without a header


def test_names_are_given(tmp_path: Path) -> None:
    source = written(tmp_path / "x.csv", ROWS.partition("\n")[2])
    table = load(source, id="who", names=["who", "n", "where"])
    assert (table.ids, table.numeric_names) == (("a", "b", "c"), ("n",))
    assert table.categorical_names == ("where",)
    table = load(source, id="f1", names=3)
    assert (table.numeric_names, table.categorical_names) == (("f2",), ("f3",))
    np.testing.assert_array_equal(table.numeric_NF, [[1], [2.5], [3]])


def test_tabs_empty_cells_and_skipped_lines_without_a_header(tmp_path: Path) -> None:
    """As Criteo's files are: tabs, empty cells, no names."""
    source = written(tmp_path / "train.txt", "a remark\n0\t\t05db\n1\t7\t\n")
    settings: dict[str, Any] = {"names": 3, "skip_lines": 1, "missing": "zero", "id": "row"}
    table = load(source, **settings, label="f1", with_label=True)
    assert table.ids == ("0", "1")
    np.testing.assert_array_equal(table.numeric_NF, [[np.nan], [7]])
    assert present(table.labels).tolist() == [0, 1]


def test_wrong_names(tmp_path: Path) -> None:
    source = written(tmp_path / "x.csv", "1,2\n3,4,5\n")
    refused(source, id="f1", names=3)
    refused(source, Code.FILE_INVALID, id="f1", names=2)
    refused(written(tmp_path / "x2.csv", "1,2\n1,3\n"), id="f1", names=2)
    refused(written(tmp_path / "x3.csv", "1,2\n3,\n"), id="f1", names=2)
    refused(written(tmp_path / "empty.csv", "\n"), Code.FILE_INVALID, id="f1", names=2)
    # The line that was said not to be there.
    refused(written(tmp_path / "y.csv", ROWS), id="id", names=["id", "a", "town"])
    refused(written(tmp_path / "z.csv", "1,2\n"), id="a", names=["a", "a"])


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "x.parquet", "names": 3},
        {"source": "x.xlsx", "names": ("a",)},
        {"source": "sklearn:iris", "format": "text"},
        {"source": "x.csv", "names": 1 << 20},
        {"source": "x.csv", "limit_by": "random"},
    ],
)
def test_keys_that_do_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"names|format|limit_by"):
        DataSettings(**settings)


# --- Separators of several signs


def test_separator_of_two_signs(tmp_path: Path) -> None:
    """As MovieLens' files are: no header, no quotes, ``.dat``."""
    text = '1::Toy "Story::5\r\n2::Heat: a film::3\n3::, The::4'
    settings: dict[str, Any] = {"format": "text", "separator": "::"}
    table = load(
        written(tmp_path / "movies.dat", text),
        **settings,
        id="movie",
        names=["movie", "title", "n"],
    )
    assert table.ids == ("1", "2", "3")
    assert present(table.categorical).words == (('Toy "Story', "Heat: a film", ", The"),)
    np.testing.assert_array_equal(table.numeric_NF, [[5], [3], [4]])
    header = written(tmp_path / "x.txt.gz", gzip.compress(b"id::n\na::1.5\nb::2,5\n"))
    assert load(header, separator="::", id="id").categorical_names == ("n",)


def test_runs_of_spaces(tmp_path: Path) -> None:
    """As NUS-WIDE's files are: spaces at the ends of lines, too."""
    source = written(tmp_path / "x.dat", "0.5  1 \t2 \n 1e-3 4 5\r\n\n")
    table = load(source, format="text", separator="whitespace", names=3, id="row")
    np.testing.assert_allclose(numbers(table), [[0.5, 1, 2], [0.001, 4, 5]])


def test_wrong_separators(tmp_path: Path) -> None:
    source = written(tmp_path / "x.csv", "a::b\n1::2::3\n")
    refused(source, Code.FILE_INVALID, id="a", separator="::")
    refused(source, id="a", separator="→→")
    refused(
        written(tmp_path / "y.csv", "a::b\n1::\x1f\n"), Code.FILE_INVALID, id="a", separator="::"
    )
    wide = written(tmp_path / "z.csv", "a::b\n1::2\n".encode("utf-16"))
    refused(wide, id="a", separator="::")


@pytest.mark.parametrize("size", [1, 2, 3, 7, -1])
def test_any_way_of_reading_gives_the_same_bytes(tmp_path: Path, size: int) -> None:
    text = b"".join(b"%d::%d:::x\r\n" % (row, row * row) for row in range(500))
    source = written(tmp_path / "x", text + b"last::line")
    with SeparatorReplacer(source, open_bytes(source), "::", 1 << 20) as file:
        found = b"".join(iter(lambda: file.read(size), b""))
    assert found == text.replace(b"::", b"\x1f") + b"last\x1fline"


# --- The row's number as id

NUMBERS = pa.table({"a": np.arange(12.0), "b": np.arange(12) % 3, "y": ["no", "yes"] * 6})


def as_csv(folder: Path) -> str:
    NUMBERS.to_pandas().to_csv(folder / "x.csv", index=False)
    return str(folder / "x.csv")


def as_parquet(folder: Path) -> str:
    parquet.write_table(NUMBERS, folder / "x.parquet", row_group_size=5)
    return str(folder / "x.parquet")


def as_npz(folder: Path) -> str:
    np.savez(folder / "x.npz", a=NUMBERS["a"], y=NUMBERS["y"].to_numpy().astype(str))
    return str(folder / "x.npz")


def as_excel(folder: Path) -> str:
    NUMBERS.to_pandas().to_excel(folder / "x.xlsx", index=False)
    return str(folder / "x.xlsx")


@pytest.mark.parametrize("made", [as_csv, as_parquet, as_npz, as_excel])
def test_the_number_of_the_row_is_the_id_of_every_source(
    tmp_path: Path, made: Callable[[Path], str]
) -> None:
    table = load(made(tmp_path), id="row", label="y", columns=["a"], with_label=True)
    assert table.ids == tuple(f"{row:02}" for row in range(12))
    np.testing.assert_array_equal(table.numeric_NF, np.arange(12.0)[:, None])
    assert present(table.labels).tolist() == ["no", "yes"] * 6
    assert load("sklearn:iris", id="row").ids[:2] == ("000", "001")


def test_ids_alone_and_frames_are_numbered(tmp_path: Path) -> None:
    only = load(as_csv(tmp_path), id="row", columns=())
    assert only.ids == tuple(f"{row:02}" for row in range(12))
    data = DataSettings(source="frame of a", id=("row",), columns=("a",))
    table = make_loader({"a": pd.DataFrame({"a": [1.0, 2.0]})})(data, False)
    assert table.ids == ("0", "1")


def test_a_column_called_row_is_a_column(tmp_path: Path) -> None:
    source = written(tmp_path / "x.csv", "row,a\nz,1\ny,2\n")
    assert load(source, id="row").ids == ("y", "z")


def test_a_database_has_no_order(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "x.db") as base:
        base.execute("CREATE TABLE t (a REAL)")
        base.execute("INSERT INTO t VALUES (1)")
    base.close()
    with raises(InputError, Code.DATA_INVALID, names=("x.db", "data.id")):
        load(f"sqlite:///{tmp_path / 'x.db'}", query="SELECT * FROM t", id="row")

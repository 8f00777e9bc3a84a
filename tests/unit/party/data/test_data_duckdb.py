"""Tables that DuckDB makes of files: types, order, refusals, what stays when a process is killed."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as parquet
import pytest

from tests.harness.errors import raises
from tests.harness.present import present
from vfl_common.config.data import DataSettings
from vfl_common.config.sources import get_reader, resolve_source
from vfl_common.errors import Code, InputError
from vfl_common.process.signals import Stopped
from vfl_common.text import hide_passwords
from vfl_party.data import load_table
from vfl_party.data.load import open_table
from vfl_party.data.sources import duck
from vfl_party.data.sources.databases import SORTED, wait_for
from vfl_party.data.sources.duck import RowSpill
from vfl_party.data.stream import RowStream

pytest.importorskip("duckdb")

ROWS = {"pid": ["b", "c", "a"], "x": [2.0, 3.0, 1.0], "town": ["Bonn", "Oslo", "Bonn"]}

QUERY = "SELECT * FROM 'in/*.parquet'"


def settings(folder: Path, query: str, **more: Any) -> DataSettings:
    named = {"source": f"duckdb:{query}", "id": "pid", "scratch": str(folder / "scratch")} | more
    return DataSettings.model_validate(named).absolute(folder)


def opened(folder: Path, query: str, **more: Any) -> RowStream:
    return present(open_table(settings(folder, query, **more)))


def read(stream: RowStream, *wanted: str) -> pa.Table:
    return pa.Table.from_batches(list(stream.blocks(wanted or stream.names)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    parquet.write_table(pa.table(ROWS).slice(0, 2), tmp_path / "in" / "part-0.parquet")
    parquet.write_table(pa.table(ROWS).slice(2), tmp_path / "in" / "part-1.parquet")
    return tmp_path


def refused(folder: Path, query: str, **more: Any) -> str:
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID) as caught:
        read(opened(folder, query, **more))
    return str(caught.value)


def test_a_query_is_no_path_no_url_and_no_plug_in() -> None:
    query = "duckdb:SELECT 1"
    assert DataSettings(source=query).is_table
    # A URL of SQLAlchemy's, as before.
    url = "duckdb:///x.db"
    assert DataSettings(source=url, query="SELECT 1").is_database
    assert resolve_source(url, Path("/b")) == url
    once = resolve_source(query, Path("/it's"))
    assert resolve_source(once, Path("/elsewhere")) == once
    assert hide_passwords(once) == query
    assert get_reader(once) == "duckdb"
    assert len(hide_passwords(f"duckdb:SELECT\n{'x, ' * 99}")) == 101


def test_the_table_is_that_of_the_files_in_any_order(folder: Path) -> None:
    plain = {"source": str(folder / "in"), "id": "pid"}
    files = load_table(DataSettings.model_validate(plain), with_label=False)
    for order in ("", " ORDER BY x", " ORDER BY x DESC;"):
        table = load_table(settings(folder, QUERY + order), with_label=False)
        assert np.array_equal(present(table.numeric_NF), present(files.numeric_NF))
        assert list(table.ids) == list(files.ids)
    rows = read(opened(folder, "SELECT * FROM 'in/*.parquet' ORDER BY pid DESC"), "pid", "x")
    assert rows.to_pydict() == {"pid": ["c", "b", "a"], "x": [3.0, 2.0, 1.0]}


def test_types_that_a_table_has_are_cast(folder: Path) -> None:
    stream = opened(
        folder,
        "SELECT 12345678901234567890123::HUGEINT AS pid, 1.25::DECIMAL(9, 2) AS d, "
        "7::HUGEINT AS h, 'a'::ENUM('a', 'b') AS e, NULL AS n, NULL::DOUBLE AS m, "
        "'00000000-0000-0000-0000-000000000001'::UUID AS u, true AS t, DATE '2020-01-02' AS day, "
        "TIMESTAMP_NS '2020-01-02 03:04:05' AS at",
    )
    row = read(stream).to_pylist()[0]
    # An id keeps its digits.
    assert row["pid"] == "12345678901234567890123"
    assert (row["d"], row["h"], row["e"], row["n"], row["m"]) == (1.25, 7.0, "a", None, None)
    assert row["u"].endswith("-000000000001")
    assert row["t"] is True
    assert row["at"].isoformat() == "2020-01-02T03:04:05"


def test_types_that_no_table_has_are_refused_if_they_are_used(folder: Path) -> None:
    for value in ("[1]", "{'a': 1}", "INTERVAL 1 DAY", "'x'::BLOB", "DATE 'infinity'"):
        assert "column 'l'" in refused(folder, f"SELECT 'a' AS pid, {value} AS l")
    stream = opened(folder, "SELECT 'a' AS pid, [1] AS l")
    assert read(stream, "pid").to_pydict() == {"pid": ["a"]}


def test_what_takes_the_first_rows_has_an_order(folder: Path) -> None:
    # An order within does not count.
    for query in (QUERY, f"FROM ({QUERY} ORDER BY pid DESC)"):
        stream = opened(folder, query, limit=2)
        assert read(stream, "x", "pid").to_pydict() == {"x": [1.0, 2.0], "pid": ["a", "b"]}
        assert stream.unsorted == SORTED
    table = load_table(settings(folder, QUERY, limit=2), with_label=False)
    assert table.notes == (SORTED,)
    # No row is left out.
    for more in ({"limit": 4}, {"duplicates": "first"}):
        assert load_table(settings(folder, QUERY, **more), with_label=False).notes == ()
    twice = opened(folder, "SELECT 'a' AS pid, x FROM 'in/*.parquet'", duplicates="first")
    assert read(twice, "x").to_pydict() == {"x": [1.0, 2.0, 3.0]}
    assert opened(folder, f"{QUERY} ORDER BY pid", duplicates="first").unsorted == ""
    rows = read(opened(folder, f"{QUERY} ORDER BY pid", limit=2), "pid")
    assert rows.to_pydict() == {"pid": ["a", "b"]}
    row_numbers = settings(folder, QUERY, id="row")
    with raises(InputError, Code.DATA_INVALID, names=("in/*.parquet", "data.id")) as caught:
        load_table(row_numbers, with_label=False)
    assert "have no order" in str(caught.value)


def test_a_query_that_does_more_than_read_is_refused(folder: Path) -> None:
    out = folder / "x.csv"
    # Whole in a sentence, whatever the folder's name is.
    for query in ("COPY (SELECT 1) TO 'x.csv'", "SELECT 1; SELECT 2", "INSTALL httpfs", ""):
        assert "Write one SELECT" in refused(folder, query)
    assert "syntax error" in refused(folder, "SELEC 1")
    assert '"nope"' in refused(folder, "SELECT nope FROM 'in/*.parquet'")
    assert "no.parquet" in refused(folder, "SELECT * FROM 'no.parquet'")
    assert "httpfs" in refused(folder, "SELECT * FROM 'https://127.0.0.1:9/x.parquet'")
    assert "two columns 'a'" in refused(folder, "SELECT 1 AS a, 2 AS a")
    # DuckDB would read the first one twice.
    assert "'a' and 'A'" in refused(folder, 'SELECT 1 AS a, 2 AS "A"')
    assert not out.exists()


@pytest.mark.parametrize("query", [QUERY, "SELECT * FROM read_parquet(['in/part-0.parquet'])"])
def test_a_file_that_is_replaced_while_it_is_read_is_named(query: str, folder: Path) -> None:
    stream = opened(folder, query)
    assert read(stream, "pid").num_rows > 0
    # The same ids with other values.
    other = pa.table(ROWS | {"x": [9.0, 9.0, 9.0]}).slice(0, 2)
    parquet.write_table(other, folder / "in" / "part-0.parquet")
    with raises(InputError, Code.FILE_INVALID):
        read(stream, "x")


def test_a_value_that_fails_is_not_shown(folder: Path) -> None:
    said = refused(folder, "SELECT pid, town::INTEGER AS t FROM 'in/*.parquet'")
    assert "Bonn" not in said
    assert "after 0 rows" in said
    said = refused(folder, "SELECT pid, (x + 9000)::TINYINT AS t FROM 'in/*.parquet'")
    assert "900" not in said.partition("failed")[2]
    assert "INT8" in said
    # Nor one with quotes, or with ends of lines.
    for value in ("'secret' || chr(10)", "chr(34) || chr(39) || 'secret'"):
        said = refused(folder, f"FROM (SELECT 'a' AS pid, ({value})::INTEGER AS n)").partition(
            "failed"
        )[2]
        assert "Could not convert string …" in said
        assert "secret" not in said
    (folder / "x.csv").write_text("pid,x\n" + "a,1\n" * 30_000 + "b,secret\n")
    said = refused(folder, "FROM 'x.csv'")
    assert "Line: 30002" in said
    assert "secret" not in said


def test_a_file_of_the_working_folder_is_not_taken(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    parquet.write_table(pa.table(ROWS), elsewhere / "rows.parquet")
    monkeypatch.chdir(elsewhere)
    assert "rows.parquet is in the folder" in refused(folder, "SELECT * FROM 'rows.parquet'")
    odd = folder / "a,b"
    odd.mkdir()
    assert "','" in refused(odd, "SELECT * FROM 'rows.parquet'")


def test_a_pass_may_end_early(folder: Path) -> None:
    stream = opened(folder, "SELECT range AS pid FROM range(200000)")
    first = stream.blocks(("pid",))
    assert next(first).num_rows < 200_000
    del first
    assert read(stream).num_rows == 200_000


BIG = "SELECT range AS pid, hash(range)::DOUBLE AS x, md5(range::VARCHAR) AS t FROM range(400000)"
LISTS = "SELECT 'a' AS pid, len(list(md5(range::VARCHAR))) AS x FROM range(400000)"


@pytest.mark.parametrize(
    ("query", "more", "says"),
    [
        (LISTS, (), "16 MiB"),
        (f"{BIG} ORDER BY t", ("max_temp_directory_size = '1MiB'",), "data.scratch"),
    ],
    ids=["memory", "disk"],
)
def test_a_query_for_which_there_is_no_room_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, query: str, more: tuple[str, ...], says: str
) -> None:
    monkeypatch.setattr(duck, "_MIN_MIB", 16)
    monkeypatch.setattr(duck, "_SET", (*more, *duck._SET))
    assert says in refused(folder, query, memory_mib=0)
    assert list((folder / "scratch").iterdir()) == []


def test_a_query_that_needs_the_disk_uses_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duck, "_MIN_MIB", 16)
    rows = read(opened(folder, f"{BIG} ORDER BY t", memory_mib=0), "t")["t"]
    assert len(rows) == 400_000
    assert pc.all(pc.less(rows.combine_chunks()[:-1], rows.combine_chunks()[1:])).as_py()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_query_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    def stop(_number: int, _frame: Any) -> None:
        raise Stopped

    stream = opened(
        folder, "SELECT 'a' AS pid, count(*) AS x FROM range(10000000) a, range(10000000)"
    )
    asked = threading.Event()

    def asking(*given: Any) -> Any:
        asked.set()
        return wait_for(*given)

    def send() -> None:
        asked.wait()
        os.kill(os.getpid(), number)

    monkeypatch.setattr(duck, "wait_for", asking)
    before, sender = signal.signal(signal.SIGTERM, stop), threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Stopped):
            read(stream)
    finally:
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert list((folder / "scratch").iterdir()) == []


def test_without_duckdb_a_sentence_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with raises(InputError, Code.CONFIG_INVALID, names="in/*.parquet") as caught:
        opened(folder, QUERY)
    assert "pip install duckdb" in str(caught.value)


def test_files_that_come_between_two_passes_are_refused(folder: Path) -> None:
    stream = opened(folder, "SELECT * FROM 'in/*.parquet' ORDER BY pid")
    read(stream)
    parquet.write_table(pa.table(ROWS).slice(0, 1), folder / "in" / "part-2.parquet")
    with raises(InputError, Code.FILE_INVALID, names="in/*.parquet") as caught:
        read(stream)
    assert "the query gave" in str(caught.value)


def test_partitions_of_hive_are_columns(folder: Path) -> None:
    for town in ("Bonn", "Oslo"):
        (folder / "out" / f"town={town}").mkdir(parents=True)
        parquet.write_table(
            pa.table({"pid": [town]}), folder / "out" / f"town={town}" / "0.parquet"
        )
    (folder / "out" / "_SUCCESS").touch()
    rows = read(opened(folder, "SELECT * FROM 'out/**/*.parquet' ORDER BY pid"))
    assert rows.to_pydict() == {"pid": ["Bonn", "Oslo"], "town": ["Bonn", "Oslo"]}


def test_a_query_larger_than_memory_uses_the_disk_and_leaves_nothing(folder: Path) -> None:
    stream = opened(folder, QUERY)
    assert len(list((folder / "scratch").iterdir())) == 1
    del stream
    assert list((folder / "scratch").iterdir()) == []


@pytest.mark.slow
def test_what_a_killed_process_leaves_the_next_one_deletes(tmp_path: Path) -> None:
    code = (
        # Its file alone: packages above it take seconds to import.
        "import runpy, sys\n"
        f"spill = runpy.run_path({duck.__file__!r})['RowSpill']({str(tmp_path)!r})\n"
        "(spill.folder / 'x').touch()\n"
        "print(spill.folder, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        left = Path(present(process.stdout).readline().strip())
        # It is in use.
        RowSpill(str(tmp_path)).close()
        assert (left / "x").exists()
        os.kill(process.pid, signal.SIGKILL)
    assert (left / "x").exists()
    RowSpill(str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == []

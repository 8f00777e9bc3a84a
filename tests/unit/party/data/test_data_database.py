"""Tables from SQLite, from a real PostgreSQL, and from what SQLAlchemy knows: types, passes,
passwords, refusals.
"""

import datetime
import gc
import os
import signal
import sqlite3
import sys
import threading
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.harness.errors import raises
from tests.harness.postgres import Postgres, postgres, programs
from tests.harness.waiting import wait_until
from vfl_common.config.base import Section, parse
from vfl_common.config.data import DataSettings, get_unaligned_settings
from vfl_common.config.sources import get_reader, is_database, resolve_source
from vfl_common.errors import Code, InputError, InternalError
from vfl_common.text import find_passwords, hide_passwords, hide_passwords_of
from vfl_party.data import load_table
from vfl_party.data.load import open_database
from vfl_party.data.sources.databases import SORTED, UNSORTED, has_order
from vfl_party.data.stream import NUMBER, MarkedError, RowStream, write_cell

PEOPLE = "CREATE TABLE people (pid, age, weight, town)"
ROWS = [("007", 40, 70.5, "Oslo"), ("7", None, 80.0, "Bonn"), ("02", 50, 1e20, "")]


def opened(source: str, query: str | None = "SELECT * FROM people", **settings: Any) -> RowStream:
    return open_database(DataSettings(source=source, query=query, **({"id": "pid"} | settings)))


def read(stream: RowStream, *wanted: str) -> pa.Table:
    return pa.Table.from_batches(list(stream.blocks(wanted or stream.names)))


def n(number: object) -> str:
    """Returns a number as a source writes its number cells."""
    return f"{NUMBER}{number}"


def refused(source: str, code: Code = Code.DATA_INVALID, **settings: Any) -> str:
    """Opens a table and reads it; returns the one sentence with which it is refused."""
    with raises(InputError, code) as caught:
        read(opened(source, **settings))
    assert str(caught.value).startswith(hide_passwords(source))
    return str(caught.value)


# --- what is a database


def test_sources_are_told_apart_by_their_spelling() -> None:
    for url in (
        "postgresql://ada@host/bank",
        "postgres://host/x",
        "sqlite:///x.db",
        "mysql+pymysql://host/x",
    ):
        assert is_database(url)
        assert get_reader(url) is None
        assert DataSettings(source=url, query="SELECT 1").is_table
        assert resolve_source(url, Path("/base")) == url or url.startswith("sqlite")
    assert not is_database("shop://north")
    # A plug-in's.
    assert get_reader("shop://north") == "shop"
    # Of any name, with a query.
    assert DataSettings(source="duckdb:///x", query="SELECT 1").is_database
    assert not DataSettings(source="./sqlite:x.csv").is_database
    with raises(InputError, Code.CONFIG_INVALID, names="bank.toml"):
        parse(DataSettings, {"source": "people.csv", "query": "SELECT 1"}, "bank.toml: data")


def test_relative_files_of_sqlite_start_at_the_party_files_folder() -> None:
    data = DataSettings(source="sqlite:///in/../x.db", query="SELECT 1", unaligned="sqlite:///y.db")
    assert data.absolute(Path("/base")).source == "sqlite:////base/x.db"
    more = get_unaligned_settings(data.absolute(Path("/base")))
    assert more is not None
    assert (more.source, more.query) == ("sqlite:////base/y.db", "SELECT 1")
    assert (
        resolve_source("sqlite+pysqlite:////x.db?mode=ro", Path("/base"))
        == "sqlite+pysqlite:////x.db?mode=ro"
    )
    assert resolve_source("sqlite:///:memory:", Path("/base")) == "sqlite:///:memory:"


@pytest.mark.parametrize(
    ("source", "text", "found"),
    [
        ("postgresql://ada:geheim@host/bank", "postgresql://ada:***@host/bank", ["geheim"]),
        ("postgresql://ada:ge@h/e:im@host/bank", "postgresql://ada:***@host/bank", ["ge@h/e:im"]),
        ("postgresql://ada@host:5432/bank", "postgresql://ada@host:5432/bank", []),
        (
            "postgresql://host/b?user=a&password=geheim",
            "postgresql://host/b?user=a&password=***",
            ["geheim"],
        ),
        (
            "mysql+pymysql://:geheim@host/b?ssl_key=k",
            "mysql+pymysql://:***@host/b?ssl_key=***",
            ["geheim", "k"],
        ),
        ("/home/a:b@c/people.csv", "/home/a:b@c/people.csv", []),
        ("/data?key=3/people.csv", "/data?key=3/people.csv", []),
        ("C:/data/people.csv", "C:/data/people.csv", []),
        ("sqlite:///x.db?key=geheim", "sqlite:///x.db?key=***", ["geheim"]),
        ("sqlite://ada:geheim@h/x.db", "sqlite://ada:***@h/x.db", ["geheim"]),
        ("Postgresql://ada:geheim@h/x", "Postgresql://ada:***@h/x", ["geheim"]),
        ("/base/POSTGRESQL:/ada:geheim@h/x", "/base/POSTGRESQL:/ada:***@h/x", ["geheim"]),
        ("postgresql://ada@corp:geheim@h/x", "postgresql://ada@corp:***@h/x", ["geheim"]),
        ("postgresql://ada%3Ageheim@h/x", "postgresql://ada%3A***@h/x", ["geheim"]),
        ("postgresql://ada:ge%40heim@h/x", "postgresql://ada:***@h/x", ["ge%40heim", "ge@heim"]),
        (
            "postgresql://h/x?pass%77ord=geheim&a=b",
            "postgresql://h/x?pass%77ord=***&a=b",
            ["geheim"],
        ),
        ("jdbc:postgresql://ada:geheim@h/x", "jdbc:postgresql://ada:***@h/x", ["geheim"]),
        (
            "jdbc:sqlserver://h;password={ge;he}}im};a=b",
            "jdbc:sqlserver://h;password=***;a=b",
            ["{ge;he}}im}"],
        ),
        ("https://ada:geheim@h/x.csv", "https://ada:***@h/x.csv", ["geheim"]),
        (
            "mssql+pyodbc:///?a=b&odbc_connect=UID%3Dada%3BPWD%3Dgeheim%3BServer%3Dh",
            "mssql+pyodbc:///?a=b&odbc_connect=***",
            ["UID%3Dada%3BPWD%3Dgeheim%3BServer%3Dh", "UID=ada;PWD=geheim;Server=h", "geheim"],
        ),
        (
            "mssql+pyodbc:///?ODBC_Connect=PWD={a;b};x=y&c=d",
            "mssql+pyodbc:///?ODBC_Connect=***&c=d",
            None,
        ),
    ],
)
def test_passwords_are_not_shown(source: str, text: str, found: list[str] | None) -> None:
    assert hide_passwords(source) == text
    assert hide_passwords(text) == text
    assert found is None or find_passwords(source) == found
    said = hide_passwords_of(f"no way to {source} with {'; '.join(found or ())}", source)
    assert not any(secret in said for secret in find_passwords(source) if len(secret) > 1)


@pytest.mark.parametrize(
    "source",
    [
        "sqlite:///x.db?key=wrongsecret",
        "sqlite://bob:wrongsecret@h/x.db",
        "Postgresql+nosuch://bob:wrongsecret@h/db",
        "jdbc:postgresql://bob:wrongsecret@h/db",
        "https://bob:wrongsecret@h/x.csv",
        "Https://bob:wrongsecret@h/x.csv",
        "JDBC:postgresql://bob:wrongsecret@h/db",
        "mssql+nosuch:///?odbc_connect=UID%3Dbob%3BPWD%3Dwrongsecret",
    ],
)
def test_no_refusal_of_a_source_shows_its_password(source: str, tmp_path: Path) -> None:
    settings = parse(DataSettings, {"source": source, "id": "pid"}, "bank.toml: data").absolute(
        tmp_path
    )
    if settings.is_database:
        settings = settings.model_copy(update={"query": "SELECT 1 AS pid"})
    with pytest.raises(InputError) as caught:
        load_table(settings, with_label=False)
    assert "wrongsecret" not in str(caught.value)
    assert "***" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "hinted"),
    [
        ("postgresql://ada:ge/heim@127.0.0.1:1/x?connect_timeout=2", True),
        ("postgresql://ada:ge@heim@127.0.0.1:1/x?connect_timeout=2", True),
        ("postgresql://ada:geheim@127.0.0.1:1/x?connect_timeout=2", False),
        # What comes before the last @ is no port.
        ("postgresql+psycopg://ada:ge@h:eim@127.0.0.1:1/x", True),
    ],
)
def test_signs_in_a_password_that_break_a_url_are_hinted_at(source: str, hinted: bool) -> None:
    text = refused(source, Code.FILE_INVALID)
    assert (
        text.endswith(
            " If its password has @, # or /, write %40, %23 or %2F for it in data.source."
        )
        == hinted
    )
    assert "eim" not in text


def test_a_source_in_the_place_of_a_table_shows_no_password() -> None:
    class Outer(Section):
        data: DataSettings

    with raises(
        InputError, Code.CONFIG_INVALID, names=("postgresql://ada:***@h/x", "bank.toml")
    ) as caught:
        parse(Outer, {"data": "postgresql://ada:geheim@h/x"}, "bank.toml")
    assert "geheim" not in str(caught.value)


def test_a_scheme_may_be_in_capital_letters() -> None:
    settings = DataSettings(
        source="Postgresql://Ada@Host/X", query="SELECT 1", unaligned="SQLite:///Y.db"
    )
    assert (settings.source, settings.unaligned) == ("postgresql://Ada@Host/X", "sqlite:///Y.db")
    assert is_database("POSTGRES://host/x")


def test_names_that_are_too_long_are_one_sentence() -> None:
    settings = DataSettings(source="x" * 300 + ".csv", id=("pid",))
    assert settings.is_table
    with raises(
        InputError,
        Code.FILE_INVALID,
        names=(
            "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx.csv",
            "data.source",
        ),
    ):
        load_table(settings, with_label=False)


def test_cells_of_all_types_are_written_as_text() -> None:
    moment = datetime.datetime(2024, 1, 31, 10, 0, 0, 5)
    key = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    # Fmt: skip.
    cells: list[tuple[Any, str | None]] = [
        (None, None),
        ("", None),
        (" ", " "),
        ("007", "007"),
        (True, "true"),
        (False, "false"),
        (2**70, n(2**70)),
        (3.0, n(3)),
        (-0.0, n(0)),
        (0.1, n(0.1)),
        (1e20, n("1e+20")),
        (float("nan"), None),
        (float("inf"), n("inf")),
        (Decimal("3.00"), n(3)),
        (Decimal("0.10"), n("0.10")),
        (Decimal("NaN"), None),
        (Decimal("1E-7"), n("0.0000001")),
        (-1.5, n(-1.5)),
        ("1.5", "1.5"),
        (f"x{NUMBER}", f"x{NUMBER}"),
        (moment, "2024-01-31T10:00:00.000005"),
        (moment.date(), "2024-01-31"),
        (moment.time(), "10:00:00.000005"),
        (datetime.timedelta(days=1, minutes=5), "24:05:00"),
        (datetime.timedelta(seconds=-1.5), "-0:00:01.500000"),
        (uuid.UUID(key), key),
    ]
    for value, text in cells:
        assert write_cell(value) == text, repr(value)
    for other in (b"x", [1], {"a": 1}, object()):
        with raises(TypeError):
            write_cell(other)
    for text in (NUMBER, f"{NUMBER}1.5"):
        with raises(MarkedError):
            write_cell(text)


# --- SQLite


@pytest.fixture
def people(tmp_path: Path) -> str:
    path = tmp_path / "people.db"
    with sqlite3.connect(path) as file:
        file.execute(PEOPLE)
        file.executemany("INSERT INTO people VALUES (?, ?, ?, ?)", ROWS)
    file.close()
    return f"sqlite:///{path}"


def test_reads_a_query_of_sqlite_as_text(people: str) -> None:
    stream = opened(people, "SELECT pid, age, weight AS kg, town FROM people ORDER BY pid DESC;\n")
    assert (stream.source, stream.names, stream.as_written) == (
        people,
        ("pid", "age", "kg", "town"),
        True,
    )
    assert read(stream).to_pydict() == {
        "pid": ["7", "02", "007"],
        "age": [None, n(50), n(40)],
        "kg": [n(80), n("1e+20"), n(70.5)],
        "town": ["Bonn", None, "Oslo"],
    }
    assert read(stream, "town", "pid").to_pydict() == {
        "town": ["Bonn", None, "Oslo"],
        "pid": ["7", "02", "007"],
    }
    # Refused for all streams.
    assert opened(people, "SELECT pid, age AS pid FROM people").names == ("pid", "pid")
    assert list(opened(people, "SELECT pid FROM people WHERE 0").blocks(("pid",))) == []
    signs = opened(people, "SELECT '100%' AS pid, ':a %s ?' AS x -- %(y)s")
    assert read(signs).to_pylist() == [{"pid": "100%", "x": ":a %s ?"}]


def test_rows_come_in_blocks_as_often_as_asked(people: str) -> None:
    series = "WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < 10000) SELECT i AS pid FROM s"
    stream = opened(people, series)
    # A pass may end early.
    assert next(stream.blocks(("pid",))).num_rows == 4096
    for _ in range(2):
        assert [block.num_rows for block in stream.blocks(("pid",))] == [4096, 4096, 1808]


def test_all_passes_see_one_state_of_sqlite(people: str) -> None:
    writer = sqlite3.connect(people.removeprefix("sqlite:///"), isolation_level=None)
    writer.execute("PRAGMA journal_mode = WAL")
    stream = opened(people)
    before = read(stream)
    writer.execute("DELETE FROM people WHERE pid = '7'")
    assert read(stream) == before
    assert read(opened(people)).num_rows == 2
    writer.close()


def test_passes_that_differ_are_told(people: str) -> None:
    series = "WITH RECURSIVE s(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < 500) SELECT i AS pid FROM s"
    mixed = opened(people, f"{series} ORDER BY random()")
    read(mixed)
    with raises(InputError, Code.FILE_INVALID, names="people.db"):
        read(mixed)
    fewer = opened(people, f"SELECT pid FROM ({series}) WHERE random() % 2")  # noqa: S608
    read(fewer)
    with raises(InputError, Code.FILE_INVALID, names="people.db"):
        read(fewer)
    # Nobody reads more of them.
    first = opened(people, f"{series} ORDER BY random()", limit=100)
    assert next(first.blocks(("pid",))).num_rows == 100
    with raises(InputError, Code.FILE_INVALID, names="people.db"):
        next(first.blocks(("pid",)))


@pytest.mark.parametrize(
    ("query", "ordered"),
    [
        ("SELECT 1", False),
        ("SELECT pid FROM people ORDER  BY\npid, age DESC LIMIT 5", True),
        ("SELECT row_number() OVER (PARTITION BY a ORDER BY (b)) FROM people", False),
        ("SELECT * FROM (SELECT * FROM people ORDER BY pid) x", False),
        ("SELECT 'order by' AS \"order by\", `order by`, $a$order by$a$ FROM people", False),
        ("SELECT * FROM people -- order by pid", False),
        ("SELECT * FROM people /* ( */ ORDER BY pid /* ) */", True),
        ("SELECT '(' FROM a UNION SELECT ')' FROM b ORDER BY 1", True),
        ("SELECT border, byte FROM people", False),
    ],
)
def test_an_order_of_a_query_is_found(query: str, ordered: bool) -> None:
    assert has_order(query) is ordered


def notes_of(source: str, query: str, **more: Any) -> tuple[str, ...]:
    found = DataSettings(source=source, query=query, **({"id": "pid", "missing": "zero"} | more))
    return load_table(found, with_label=False).notes


def test_first_rows_without_an_order_are_told(people: str) -> None:
    query = "SELECT pid, age FROM people"
    by_place: list[dict[str, Any]] = [{"limit": 2}, {"duplicates": "first", "id_rules": ("zeros",)}]
    for more in by_place:
        assert notes_of(people, query, **more) == (UNSORTED,)
        assert notes_of(people, f"{query} ORDER BY age", **more) == ()
    # These take all rows, whatever the order is.
    at_random = {"limit": 2, "limit_by": "random"}
    for every in ({}, {"limit": 4}, {"duplicates": "first"}, at_random):
        assert notes_of(people, query, **every) == ()


def test_sqlite_is_never_written(people: str, tmp_path: Path) -> None:
    for query in (
        "DELETE FROM people",
        "-- SELECT\nDROP TABLE people",
        "/* x */ UPDATE people SET age = 1",
        "PRAGMA x",
    ):
        refused(people, query=query)
    refused(people, query="WITH x AS (SELECT 1) DELETE FROM people")
    refused(people, query="SELECT 1 AS pid; DROP TABLE people")
    assert read(opened(people, "-- a remark\nSELECT pid FROM people"))["pid"].to_pylist() == [
        "007",
        "7",
        "02",
    ]
    missing = f"sqlite:///{tmp_path / 'none.db'}"
    refused(missing, Code.FILE_INVALID)
    assert not (tmp_path / "none.db").exists()


def test_mistakes_with_sqlite_are_one_sentence(people: str, tmp_path: Path) -> None:
    refused(people, query=None)
    refused(people, query=" ; ")
    refused(people, query="SELECT * FROM persons")
    refused(people, query="SELECT hight FROM people")
    refused(people, query="SELECT pid FORM people")
    with raises(InputError, Code.DATA_INVALID):
        read(opened(people), "pid", "wight")
    refused(people, query='SELECT pid, age AS "" FROM people')
    marked = refused(
        people,
        # Fmt: skip.
        query="SELECT pid, iif(age, 'a', char(57344) || '12') AS x FROM people",
    )
    assert "12" not in marked.removeprefix(people)
    refused(people, query="SELECT pid, iif(age, age, x'00ff') AS x FROM people")
    # Nobody asks for it.
    assert read(opened(people, "SELECT pid, x'00ff' AS x FROM people"), "pid").num_rows == 3
    latin = refused(people, query="SELECT CAST(x'416461ff' AS TEXT) AS pid")
    assert "Ada" not in latin
    for text in ("hello\n" * 1000, ""):
        other = tmp_path / "other.db"
        other.write_text(text)
        refused(f"sqlite:///{other}", Code.FILE_INVALID if text else Code.DATA_INVALID)
    for source in ("sqlite://", "sqlite:///:memory:", f"{people}?mode=rw"):
        refused(source, Code.FILE_INVALID)
    refused(f"sqlite:///{tmp_path}", Code.FILE_INVALID)


def test_other_databases_need_their_dialect_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "nosuch+db://ada:geheim@host/bank"
    text = refused(source, Code.FILE_INVALID)
    assert text.startswith("nosuch+db://ada:***@host/bank: ")
    monkeypatch.setitem(sys.modules, "pymysql", None)
    text = refused("mysql+pymysql://ada:geheim@host/bank", Code.CONFIG_INVALID)
    assert "geheim" not in text
    text = refused("mysql://ada:geheim@host:port/bank", Code.FILE_INVALID)
    assert "geheim" not in text
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    refused("sqlite:///x.db", Code.CONFIG_INVALID)
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", None)
    refused("postgresql://host/x", Code.CONFIG_INVALID)


# --- PostgreSQL

needs_server = pytest.mark.skipif(programs() is None, reason="no PostgreSQL server is installed")


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as found:
        found.run(
            "CREATE TYPE mood AS ENUM ('well', 'ill')",
            "CREATE TABLE people (pid text, age int, weight numeric(6, 2), town varchar, sick bool, born date, seen timestamptz)",
            "INSERT INTO people VALUES ('007', 40, 70.5, 'Oslo', true, '1984-01-31', "
            "'2024-01-31 10:00+02'),"
            " ('7', null, 80, 'Bonn', false, null, null), ('02', 50, 90.25, null, true, "
            "'1974-05-01', null)",
            "CREATE ROLE ada LOGIN PASSWORD 'geheim'",
        )
        yield found


def loopback(server: Postgres, user: str, more: str = "") -> str:
    return f"postgresql://{user}@127.0.0.1:{server.port}/postgres{more}"


@needs_server
def test_columns_of_postgresql_have_their_types(server: Postgres) -> None:
    stream = opened(server.url(), 'SELECT * FROM people ORDER BY pid COLLATE "C";')
    assert (stream.source, stream.as_written) == (server.url(), False)
    table = read(stream)
    assert stream.names == tuple(table.column_names)
    wanted = [
        pa.string(),
        pa.int32(),
        pa.float64(),
        pa.string(),
        pa.bool_(),
        pa.date32(),
        pa.timestamp("us", "UTC"),
    ]
    assert table.schema.types == wanted
    assert table["pid"].to_pylist() == ["007", "02", "7"]
    assert table["weight"].to_pylist() == [70.5, 90.25, 80]
    assert table["born"].to_pylist() == [
        datetime.date(1984, 1, 31),
        datetime.date(1974, 5, 1),
        None,
    ]
    assert table["seen"][0].as_py() == datetime.datetime(2024, 1, 31, 8, tzinfo=datetime.UTC)
    assert read(stream, "age", "pid").to_pydict() == {
        "age": [40, 50, None],
        "pid": ["007", "02", "7"],
    }
    assert read(opened(server.url(), limit=2)).num_rows == 2
    # Sorted, by the id and then by the others.
    unsorted = "SELECT 6 - i AS pid, i AS x FROM generate_series(1, 5) i"
    first = opened(server.url(), unsorted, limit=2)
    assert read(first, "x", "pid").to_pydict() == {"x": [5, 4], "pid": [1, 2]}
    assert notes_of(server.url(), unsorted, limit=2) == (SORTED,)
    ordered = opened(server.url(), f"{unsorted} ORDER BY x", limit=2)
    assert read(ordered, "x").to_pydict() == {"x": [1, 2]}
    assert notes_of(server.url(), f"{unsorted} ORDER BY x", limit=2) == ()
    assert list(opened(server.url(), "SELECT pid FROM people WHERE false").blocks(("pid",))) == []


@needs_server
def test_types_that_arrow_does_not_have_become_those_of_a_table(server: Postgres) -> None:
    key = "6ba7b810-9dad-11d1-80b4-00c04fd430c8"
    query = f"""SELECT 12345678901234567890::numeric AS pid, 0.1::numeric AS n, '1.50'::money AS m, '{key}'::uuid AS u,
        'ill'::mood AS e, 'ab'::char(5) AS c, 4294967295::oid AS o, 1.5::real AS r, time '10:00' AS t, null AS "a ""b"
        """
    row = read(opened(server.url(), query)).to_pylist()[0]
    assert row == {
        # An id keeps its digits.
        "pid": "12345678901234567890",
        "n": 0.1,
        "m": 1.5,
        "u": key,
        "e": "ill",
        "c": "ab",
        "o": 4294967295,
        "r": 1.5,
        "t": datetime.time(10),
        'a "b': None,
    }


@needs_server
@pytest.mark.parametrize(
    "column",
    [
        "'{}'::jsonb",
        "'{}'::json",
        "array[1, 2]",
        "'x'::bytea",
        "interval '1 day'",
        "point(1, 2)",
        "'10.0.0.1'::inet",
        "int4range(1, 2)",
    ],
)
def test_other_types_are_refused_if_they_are_asked_for(server: Postgres, column: str) -> None:
    query = f"SELECT pid, {column} AS x FROM people"  # noqa: S608
    refused(server.url(), query=query)
    assert read(opened(server.url(), query), "pid").num_rows == 3


@needs_server
@pytest.mark.parametrize(
    "value",
    ["'infinity'::date", "'-infinity'::timestamp", "date '10000-01-01'", "'0044-03-15 BC'::date"],
)
def test_dates_that_are_none_elsewhere_are_refused(server: Postgres, value: str) -> None:
    query = f"SELECT '1' AS pid, {value} AS d"
    refused(server.url(), query=query)
    ends = "SELECT '1' AS pid, date '0001-01-01' AS a, date '9999-12-31' AS b, timestamp '9999-12-31 23:59:59' AS c"
    assert read(opened(server.url(), ends)).num_rows == 1


@needs_server
def test_all_passes_see_one_state_and_the_connection_ends_with_the_stream(server: Postgres) -> None:
    server.run("CREATE TABLE growing AS SELECT i AS pid FROM generate_series(1, 1000) i")
    stream = opened(server.url(), "SELECT * FROM growing")
    before = read(stream)
    server.run(
        "INSERT INTO growing SELECT i FROM generate_series(1, 10) i",
        "UPDATE growing SET pid = pid + 1",
    )
    assert read(stream) == before
    assert read(opened(server.url(), "SELECT * FROM growing")).num_rows == 1010

    def connections() -> str:
        return server.run(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%growing%' AND pid <> pg_backend_pid()"
        )

    wait_until(connections, "1".__eq__)
    del stream
    gc.collect()
    wait_until(connections, "0".__eq__)


@needs_server
def test_passes_in_another_order_and_passes_at_once_are_told(server: Postgres) -> None:
    stream = opened(
        server.url(), "SELECT i AS pid, i AS x FROM generate_series(1, 500) i ORDER BY random()"
    )
    read(stream, "x")
    with raises(InputError, Code.FILE_INVALID):
        read(stream, "pid")
    series = opened(
        server.url(), "SELECT i AS pid, repeat('x', 100) AS x FROM generate_series(1, 400000) i"
    )
    first = series.blocks(("pid", "x"))
    # In blocks.
    assert next(first).num_rows < 400_000
    assert sum(block.num_rows for block in series.blocks(("pid",))) == 400_000
    with raises(InternalError, Code.INTERNAL):
        next(first)


@needs_server
def test_postgresql_is_never_written(server: Postgres) -> None:
    refused(server.url(), query="DELETE FROM people")
    server.run("CREATE SEQUENCE counter")
    refused(server.url(), query="SELECT nextval('counter') AS pid")
    refused(server.url(), query="WITH x AS (DELETE FROM people RETURNING 1) TABLE x")
    refused(server.url(), query="SELECT 1 AS pid; DELETE FROM people")
    refused(server.url(), query="SELECT 1) AS x; DELETE FROM people; SELECT * FROM (SELECT 1")
    assert server.run("SELECT count(*) FROM people") == "3"


@needs_server
def test_refused_queries_say_what_to_correct(server: Postgres) -> None:
    for query in (
        "SELECT hight FROM people",
        "SELECT * FROM persons",
        "SELECT pid FORM people",
        "WITH x",
    ):
        refused(server.url(), query=query)
    refused(server.url(), query=None)
    with raises(InputError, Code.DATA_INVALID):
        read(opened(server.url()), "wight")
    source = loopback(server, "ada:geheim")
    text = refused(source)
    assert text.startswith(loopback(server, "ada:***"))


@needs_server
def test_connections_that_are_refused_say_what_to_correct(
    server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = Code.FILE_INVALID
    assert "falsch" not in refused(loopback(server, "ada:falsch"), kind)
    refused(loopback(server, "ada"), kind)
    monkeypatch.setenv("PGPASSWORD", "geheim")
    assert opened(loopback(server, "ada"), "SELECT 1 AS pid").source == loopback(server, "ada")
    refused(server.url(user="nobody"), kind)
    refused(server.url(database="nosuch"), kind)
    refused(f"postgresql:///x?host={server.folder}/nowhere", kind)
    refused("postgresql://ada:geheim@127.0.0.1:1/x", kind)
    text = refused("postgresql://ada:ge@heim@127.0.0.1:1/x", kind)
    assert "heim" not in text
    for broken in (
        "ada:ge#heim/x@127.0.0.1/x",
        "ada:geheim@127.0.0.1:x/y",
        "ada:geheim@h/x?geheim=1",
    ):
        text = refused(f"postgresql://{broken}", kind)
        assert "heim" not in text.removeprefix(hide_passwords(f"postgresql://{broken}"))


@needs_server
def test_ctrl_c_during_a_query_is_no_mistake_of_the_query(server: Postgres) -> None:
    def waiting() -> str:
        return server.run(
            "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep(60)%' AND state = 'active' AND pid <> pg_backend_pid()"
        )

    def interrupt() -> None:
        wait_until(waiting, "1".__eq__)
        os.kill(os.getpid(), signal.SIGINT)

    stream = opened(server.url(), "SELECT pg_sleep(60)::text AS pid")
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            read(stream)
    finally:
        thread.join()
    wait_until(waiting, "0".__eq__)


@needs_server
def test_what_breaks_off_says_after_how_many_rows_and_shows_no_value(server: Postgres) -> None:
    series = "FROM generate_series(1, 1000000) i"
    # Fmt: skip.
    text = refused(
        server.url(),
        query=f"SELECT repeat('x', 99) AS x, CASE WHEN i = 900000 THEN ('Ada' || i)::int ELSE i END AS pid {series}",
    )
    assert "Ada" not in text
    query = f"SELECT i AS pid, repeat('x', 200) AS x {series}"
    stream = opened(server.url(), query)
    blocks = stream.blocks(stream.names)
    first = next(blocks)
    assert first.nbytes < 64 << 20
    server.run(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%200%' AND pid <> pg_backend_pid()"
    )
    with raises(InputError, Code.FILE_INVALID):
        list(blocks)
    late = f"{server.url()}&options=-cstatement_timeout%3D100"
    refused(
        late,
        Code.FILE_INVALID,
        # Fmt: skip.
        query="SELECT pg_sleep(9)::text AS pid",
    )

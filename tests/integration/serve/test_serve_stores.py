"""Where a serving party's features come from: a table, a real PostgreSQL, SQLite, a feature
service; the same numbers from all of them, and what becomes of rows that do not fit.
"""

from __future__ import annotations

import signal
import sqlite3
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.harness import cases, pki
from tests.harness.errors import raises
from tests.harness.feature_service import FeatureService, serving
from tests.harness.postgres import Postgres, postgres, programs
from tests.harness.served import Served, trained
from tests.harness.waiting import wait_until
from vfl_common.bundle import load_entries
from vfl_common.config.base import parse
from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_common.rpc.serving.stream import EMBEDDED, ServingAnswer
from vfl_party.assembly.files import read_files
from vfl_party.predict.run import Quality, load_joint
from vfl_serve.scorer import OnlineScorer
from vfl_serve.store import FeatureLookup
from vfl_serve.stores.seam import UNFIT_ROW, UNKNOWN_ROW

ROWS = 40
IDS = [f"K-{number}" for number in range(ROWS)]
COLUMNS = "id, amount, age, town, since"
needs_server = pytest.mark.skipif(programs() is None, reason="no PostgreSQL server is installed")
# Somebody who breaks out of a query that ids are written into.
EVIL = "'); DROP TABLE people; --"


def select(where: str, table: str = "people") -> str:
    return f"SELECT {COLUMNS} FROM {table} {where}"  # noqa: S608 - the tests' own words


def people() -> pd.DataFrame:
    random = np.random.default_rng(0)
    found = pd.DataFrame(
        {
            "id": IDS,
            "amount": random.normal(size=ROWS).round(4),
            "age": random.integers(18, 90, ROWS).astype(float),
            "town": random.choice(["Oslo", "Bonn", "Ivry"], ROWS),
            "since": pd.date_range("2020-01-01", periods=ROWS, freq="9D").strftime("%Y-%m-%d"),
        }
    )
    found.loc[3, "age"] = None
    found.loc[5, "town"] = None
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """p0 has labels and a column; p1 has ``people``; p2 has another column."""
    folder, frame = tmp_path_factory.mktemp("stores"), people()
    random = np.random.default_rng(1)
    for name in ("p0", "p2"):
        own = pd.DataFrame({"id": IDS, f"x{name}": random.normal(size=ROWS).round(4)})
        if name == "p0":
            own["label"] = (frame["amount"] + own["xp0"] > 0).astype(int)
        own.to_csv(folder / f"{name}.csv", index=False)
    frame.to_csv(folder / "p1.csv", index=False)
    data: dict[str, dict[str, Any]] = {
        name: {"source": str(folder / f"{name}.csv"), "id": "id"} for name in ("p0", "p1", "p2")
    }
    data["p0"]["label"] = "label"
    data["p1"]["missing"] = "mean"
    phases = cases.recipe(3, task={"kind": "binary"})["phases"]
    with trained(folder, *phases, data=data) as found:
        yield found


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as found:
        found.run(
            "CREATE TABLE people (id text PRIMARY KEY, amount numeric, age integer, town text, since date)",
            "CREATE TABLE numbered (id bigint PRIMARY KEY, amount float8, age text, town text, since date)",
            "CREATE TABLE named (id uuid PRIMARY KEY, amount float8, age int, town text, since date)",
        )
        for row in people().itertuples():
            values = ", ".join(
                "NULL" if pd.isna(each) else f"'{each}'" for each in (row.amount, row.age, row.town)
            ).replace(".0'", "'")
            found.run(f"INSERT INTO people VALUES ('{row.id}', {values}, '{row.since}')")  # noqa: S608
        yield found


@pytest.fixture
def sqlite(tmp_path: Path) -> str:
    path = tmp_path / "people.db"
    with sqlite3.connect(path) as file:
        people().to_sql("people", file, index=False)
    return f"sqlite:///{path}"


def service() -> FeatureService:
    records = people().replace({np.nan: None}).to_dict("records")
    return FeatureService({str(each["id"]): each for each in records})


@pytest.fixture(autouse=True)
def closes() -> Iterator[None]:
    """Closes the stores that a test has opened."""
    yield
    while OPENED:
        OPENED.pop().close()


OPENED: list[FeatureLookup] = []


def opened(
    served: Served,
    store: dict[str, Any] | None = None,
    said: list[str] | None = None,
    name: str = "p1",
    **data: Any,
) -> FeatureLookup:
    """Opens a party's store in this process; ``data``: other keys of [data], ``refresh_s`` of
    serve.
    """
    more = {key: data.pop(key) for key in ("refresh_s",) if key in data}
    trained_ = load_joint(served.run.folder, name)
    files = read_files(served.federation.write_party(name), recipe=trained_.recipe)
    serve = parse(ServeSettings, {**more, **({"store": store} if store else {})}, "serve")
    assert files.file.data is not None
    own = files.file.data.model_copy(update=data)
    files = replace(files, file=files.file.model_copy(update={"serve": serve, "data": own}))
    told = said if said is not None else []

    def say(_event: str, **words: Any) -> None:
        told.append(str(words.get("said", "")))

    found = FeatureLookup(files, trained_, say)
    OPENED.append(found)
    return found


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def embedded(store: FeatureLookup, ids: Sequence[str | None]) -> tuple[list[int], torch.Tensor]:
    """Returns the rows of ids, and the embeddings of those that are known."""
    found = store.held.look_up(ids, soon())
    return found.rows.tolist(), store.held.embed(found, found.rows[found.rows >= 0])


@pytest.fixture(params=["postgres", "sqlite", "service"])
def store(request: pytest.FixtureRequest, served: Served) -> Iterator[FeatureLookup]:
    with ExitStack() as stack:
        if request.param == "postgres":
            if programs() is None:
                pytest.skip("no PostgreSQL server is installed")
            url = request.getfixturevalue("server").url()
            settings = {"kind": "database", "source": url, "query": select("WHERE id = ANY(:ids)")}
        elif request.param == "sqlite":
            settings = {
                "kind": "database",
                "source": request.getfixturevalue("sqlite"),
                "query": select("WHERE id IN :ids;"),
            }
        else:
            found = stack.enter_context(serving(service()))
            settings = {"kind": "service", "url": found.url}
        yield opened(served, settings)


def test_all_stores_give_the_numbers_of_the_table_bit_for_bit(
    served: Served, store: FeatureLookup
) -> None:
    table = opened(served)
    rows, want = embedded(table, IDS)
    assert min(rows) >= 0
    for order in (IDS, IDS[::-1]):
        rows, found = embedded(store, order)
        assert min(rows) >= 0
        assert torch.equal(found, want if order is IDS else want.flip(0))
    # By itself, and several threads at the same time.
    with ThreadPoolExecutor(8) as callers:
        alone = callers.map(lambda each: embedded(store, [each])[1], IDS)
        assert torch.equal(torch.cat(list(alone)), want)
    # And the student's inputs.
    at = np.arange(ROWS)
    first, second = (each.held.look_up(IDS, soon()) for each in (table, store))
    for one, other in zip(
        first.inputs(first.rows[at]), second.inputs(second.rows[at]), strict=True
    ):
        assert torch.equal(one, other)


def test_who_is_unknown_is_told_from_the_others(store: FeatureLookup) -> None:
    odd = ["nobody", "K-1", EVIL, None, "", "a\0b", "\U0001f600", "K-1", "%s", ":ids", "$1"]
    rows, found = embedded(store, odd)
    assert rows == [UNKNOWN_ROW, 0, *[UNKNOWN_ROW] * 5, 0, *[UNKNOWN_ROW] * 3]
    assert len(found) == 2
    # Nobody has lost the table.
    assert min(embedded(store, IDS)[0]) >= 0
    assert embedded(store, [])[0] == []
    assert store.held.look_up(["K-1"], soon()).version == store.held.features_version


def test_a_row_that_does_not_fit_is_named_alone(served: Served, sqlite: str) -> None:
    """Of the others not one number changes."""
    _, want = embedded(opened(served), IDS)
    path = sqlite.removeprefix("sqlite:///")
    with sqlite3.connect(path) as file:
        file.execute("UPDATE people SET amount = 'much' WHERE id = 'K-7'")
        file.execute("UPDATE people SET since = 'long ago' WHERE id = 'K-9'")
        file.execute("UPDATE people SET amount = 9e40 WHERE id = 'K-11'")
        file.execute("UPDATE people SET town = 'Rome' WHERE id = 'K-12'")
        file.execute("INSERT INTO people SELECT * FROM people WHERE id = 'K-13'")
    said: list[str] = []
    query = select("WHERE id IN :ids")
    settings = {"kind": "database", "source": sqlite, "query": query}
    rows, found = embedded(opened(served, settings, said), IDS)
    unfit = [7, 9, 11, 13]
    assert [at for at, row in enumerate(rows) if row == UNFIT_ROW] == unfit
    same = [at for at in range(ROWS) if at not in (*unfit, 12)]
    known = [at for at, row in enumerate(rows) if row >= 0]
    assert torch.equal(found[[known.index(at) for at in same]], want[same])
    # Nobody's id is told, and everything once.
    assert not any("K-" in each for each in said)
    assert len(set(said)) == len(said) == 5
    for duplicates, row in (("first", 0), ("drop", UNKNOWN_ROW)):
        other = opened(served, settings, duplicates=duplicates)
        assert embedded(other, ["K-13"])[0] == [row]


@needs_server
def test_ids_have_the_type_that_the_query_compares(served: Served, server: Postgres) -> None:
    """Text that is no number is nobody's id, and fails no query."""
    one = "00000000-0000-0000-0000-00000000000a"
    server.run(
        "INSERT INTO numbered VALUES (7, 0.5, '41', 'Oslo', '2020-01-10'), (8, 1.5, 'old', 'Oslo', '2020-01-10')",
        "INSERT INTO named VALUES ('00000000-0000-0000-0000-00000000000a', 0.5, 41, 'Oslo', '2020-01-10')",
    )
    settings = {"kind": "database", "source": server.url()}
    for where in ("id = ANY(:ids)", "id = ANY(:ids::bigint[])"):
        query = select(f"WHERE {where}", "numbered")
        store = opened(served, {**settings, "query": query})
        odd = ["7", "07", "7.0", "x", str(2**63), str(-(2**63)), "8"]
        # A text that is a number will do, as in a CSV file; another one will not.
        assert embedded(store, odd)[0] == [0, *[UNKNOWN_ROW] * 5, UNFIT_ROW]
    query = select("WHERE id::text = ANY(:ids)", "named")
    store = opened(served, {**settings, "query": query.replace("SELECT id", "SELECT id::text")})
    assert embedded(store, [one, "x"])[0] == [0, UNKNOWN_ROW]
    # An id of several columns is one text.
    both = select("WHERE concat_ws(chr(31), id, 'north') = ANY(:ids)")
    both = both.replace("SELECT", "SELECT 'north' AS branch,")
    store = opened(served, {**settings, "query": both}, id=("id", "branch"))
    assert embedded(store, ["K-1\x1fsouth", "K-1\x1fnorth", "K-1"])[0] == [-1, 0, -1]
    # A cast that fails: only of the id that is none.
    query = select("WHERE id = ANY(:ids::text[]::bigint[])", "numbered")
    said: list[str] = []
    store = opened(served, {**settings, "query": query}, said)
    assert embedded(store, ["7", "x"])[0] == [0, UNFIT_ROW]
    assert len(said) == 1


WRONG_QUERIES = {
    "no SQL": "SELECT FROM WHERE id = ANY(:ids)",
    "no table": "SELECT * FROM nobody WHERE id = ANY(:ids)",
    "no ids": select(""),
    "a cast is none": select("WHERE id = 'x'::ids"),
    "no ids but in a comment": select("-- :ids"),
    "no column": "SELECT id, amount, town, since FROM people WHERE id = ANY(:ids)",
    "no id": "SELECT amount, age, town, since FROM people WHERE id = ANY(:ids)",
    "two of a name": select("WHERE id = ANY(:ids)").replace(" FROM", ", age FROM"),
    "writes": "DELETE FROM people WHERE id = ANY(:ids)",
    "writes within": select("WHERE id = ANY(:ids)").replace(
        "SELECT", "WITH x AS (DELETE FROM people RETURNING id) SELECT"
    ),
    "of a type": select("WHERE id = ANY(:ids)", "named"),
    "a number of rows": select("LIMIT :ids"),
}


@needs_server
@pytest.mark.parametrize("what", WRONG_QUERIES)
def test_a_wrong_query_fails_at_the_start(served: Served, server: Postgres, what: str) -> None:
    settings = {"kind": "database", "source": server.url(), "query": WRONG_QUERIES[what]}
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID, Code.CONFIG_INVALID):
        opened(served, settings)
    assert server.run("SELECT count(*) FROM people") == str(ROWS)


@pytest.mark.parametrize("what", ["no SQL", "no table", "no ids", "no column", "no id", "writes"])
def test_a_wrong_query_of_sqlite_fails_at_the_start(served: Served, sqlite: str, what: str) -> None:
    query = WRONG_QUERIES[what].replace("= ANY(:ids)", "IN :ids")
    with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID, names="people.db"):
        opened(served, {"kind": "database", "source": sqlite, "query": query})


@needs_server
def test_rows_that_nobody_asked_for_are_refused(served: Served, server: Postgres) -> None:
    query = select("WHERE id = ANY(:ids) OR cardinality(:ids) = 1")
    store = opened(served, {"kind": "database", "source": server.url(), "query": query})
    with raises(InputError, Code.DATA_INVALID, names="serve.store.query"):
        store.held.look_up(["K-1"], soon())
    query = select(", generate_series(1, 2000) WHERE id = ANY(:ids)")
    store = opened(served, {"kind": "database", "source": server.url(), "query": query})
    with raises(InputError, Code.DATA_INVALID, names=("serve.store.query", "040")):
        store.held.look_up(["K-1"], soon())


@needs_server
def test_a_slow_database_is_waited_for_until_the_deadline(served: Served, server: Postgres) -> None:
    """Then its query is ended, and its connection serves others."""
    slow = "CASE WHEN id = 'K-9' THEN pg_sleep(60)::text ELSE '' END"
    query = select(f"WHERE id = ANY(:ids) AND {slow} = ''")
    settings = {"kind": "database", "source": server.url(), "query": query, "connections": 1}
    store = opened(served, settings)
    for _ in range(3):
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            store.held.look_up(["K-9"], soon(0.2))
        assert time.monotonic() - began_s < 2.0
    assert embedded(store, ["K-1"])[0] == [0]
    running = (
        "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '%pg_sleep%' AND state = 'active'"
    )
    assert server.run(f"{running} AND pid <> pg_backend_pid()") == "0"


def test_a_slow_query_of_sqlite_is_ended(served: Served, sqlite: str) -> None:
    endless = (
        "(WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT max(x) FROM n)"
    )
    query = select(f"WHERE id IN :ids AND CASE WHEN id = 'K-9' THEN {endless} ELSE 1 END")
    settings = {"kind": "database", "source": sqlite, "query": query, "connections": 1}
    store = opened(served, settings)
    with pytest.raises(TimeoutError):
        store.held.look_up(["K-9"], soon(0.1))
    assert embedded(store, ["K-1"])[0] == [0]


@needs_server
def test_connections_that_were_ended_are_made_again(served: Served, server: Postgres) -> None:
    query = select("WHERE id = ANY(:ids)")
    url = f"{server.url()}&application_name=lookups"
    store = opened(served, {"kind": "database", "source": url, "query": query})
    mine = "FROM pg_stat_activity WHERE application_name = 'lookups'"
    for _ in range(3):
        assert embedded(store, ["K-1"])[0] == [0]
        assert server.run(f"SELECT count(*) {mine}") == "1"
        server.run(f"SELECT pg_terminate_backend(pid, 5000) {mine}")
    assert embedded(store, ["K-1"])[0] == [0]
    store.close()
    wait_until(lambda: server.run(f"SELECT count(*) {mine}") == "0")


def test_a_service_is_asked_by_the_published_schema(served: Served) -> None:
    with serving(service()) as found:
        settings = {"kind": "service", "url": found.url, "service_id": "churn-7", "context": "now"}
        store = opened(served, settings)
        embedded(store, ["K-1", "K-2", "K-1"])
    assert found.asked[-1] == {
        "header": {"data": {}},
        "model_service_id": "churn-7",
        "party_id": "p1",
        "feature_fields": [
            {"name": "amount", "type": "FIELD_DOUBLE"},
            {"name": "age", "type": "FIELD_DOUBLE"},
            {"name": "since", "type": "FIELD_STRING"},
            {"name": "town", "type": "FIELD_STRING"},
        ],
        "param": {"query_datas": ["K-1", "K-2"], "query_context": "now"},
    }
    assert found.asked[0]["param"]["query_datas"] == []


def test_a_service_may_have_other_types_and_may_close_connections(served: Served) -> None:
    _, want = embedded(opened(served), IDS[6:])
    records = people().astype({"age": "Int64"}, errors="ignore")
    rows = {
        str(each["id"]): {**each, "age": int(each["age"])}
        for each in records.to_dict("records")[6:]
    }
    for kind in ("FIELD_INT32", "FIELD_INT64"):
        with serving(FeatureService(rows, types={"age": kind}, closes=True)) as found:
            store = opened(served, {"kind": "service", "url": found.url})
            assert torch.equal(embedded(store, IDS[6:])[1], want)
            assert embedded(store, ["K-6", "x", "K-7", "y"])[0] == [0, -1, 1, -1]


WRONG_ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no JSON": lambda _: b"<html>",
    "no object": lambda _: b"[]",
    "deep": lambda _: b"[" * 100_000,
    "too much": lambda _: b" " * (3 << 20),
    "no status": lambda answer: {**answer, "status": None},
    "a failure": lambda answer: {**answer, "status": {"code": 13, "msg": "broken\x1b[31m" * 99}},
    "nothing": lambda answer: {**answer, "features": []},
    "no list": lambda answer: {**answer, "features": {"a": 1}},
    "a value less": lambda answer: {
        **answer,
        "features": [
            {**each, "value": {key: cells[1:] for key, cells in each["value"].items()}}
            for each in answer["features"]
        ],
    },
    "two lists": lambda answer: {
        **answer,
        "features": [{**each, "value": {"ss": ["a"], "ds": [1.0]}} for each in answer["features"]],
    },
}


@pytest.mark.parametrize("what", WRONG_ANSWERS)
def test_what_is_no_answer_of_a_service_is_refused(served: Served, what: str) -> None:
    with serving(service()) as found:
        store = opened(served, {"kind": "service", "url": found.url})
        found.change = WRONG_ANSWERS[what]
        with raises(InputError, Code.DATA_INVALID, Code.FILE_INVALID) as caught:
            store.held.look_up(["K-1"], soon())
        assert "\x1b" not in str(caught.value)
        found.change = lambda answer: answer
        assert embedded(store, ["K-1"])[0] == [0]


def test_a_service_may_refuse_a_question_about_nobody(served: Served) -> None:
    with serving(service()) as found:
        found.status = 400
        store = opened(served, {"kind": "service", "url": found.url})
        with raises(InputError, Code.FILE_INVALID, names=("serve.store", "400")):
            store.held.look_up(["K-1"], soon())
        found.status = 200
        assert embedded(store, ["K-1"])[0] == [0]
        found.status = 401
        with raises(InputError, Code.FILE_INVALID, names=("serve.store", "401")):
            opened(served, {"kind": "service", "url": found.url})


def test_values_of_a_service_that_are_none_are_unfit(served: Served) -> None:
    with serving(service()) as found:
        store = opened(served, {"kind": "service", "url": found.url})
        found.rows["K-1"]["amount"] = "much"
        found.rows["K-2"]["since"] = "yesterday"
        found.rows["K-3"]["amount"] = "Infinity"
        assert embedded(store, ["K-0", "K-1", "K-2", "K-3", "K-4"])[0] == [0, -2, -2, -2, 1]


def test_a_slow_service_is_late(served: Served) -> None:
    with serving(service()) as found:
        store = opened(served, {"kind": "service", "url": found.url, "connections": 1})
        found.slow_s = 1.0
        began_s = time.monotonic()
        with pytest.raises(TimeoutError):
            store.held.look_up(["K-1"], soon(0.1))
        assert time.monotonic() - began_s < 0.9
        found.slow_s = 0.0
        assert embedded(store, ["K-1"])[0] == [0]


def test_a_service_that_is_not_there_fails_the_start(served: Served, tmp_path: Path) -> None:
    with serving(service()) as found, raises(InputError, Code.FILE_INVALID):
        opened(served, {"kind": "service", "url": found.url + "s"})
    with raises(InputError, Code.FILE_INVALID):
        opened(served, {"kind": "service", "url": "http://127.0.0.1:1/x"})
    (tmp_path / "none.pem").write_text("nothing")
    for files in ({"ca": str(tmp_path / "none.pem")}, {"certificate": "a.pem"}):
        with raises(InputError, Code.CONFIG_INVALID, Code.CERTIFICATE_INVALID):
            opened(served, {"kind": "service", "url": "https://localhost:1", **files})
    with raises(InputError, Code.CONFIG_INVALID):
        opened(served, {"kind": "service", "url": "http://localhost:1", "ca": "a.pem"})


def test_a_service_is_known_by_its_certificate(served: Served, tmp_path: Path) -> None:
    """And it knows the party by its own."""
    root, other = pki.company(tmp_path / "ca"), pki.company(tmp_path / "other")
    for name in ("service", "party"):
        certificate, key = root.leaf([x509.DNSName("localhost")], common_name=name)
        (tmp_path / f"{name}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        (tmp_path / f"{name}.key").write_bytes(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
    (tmp_path / "ca.pem").write_bytes(root.pem)
    (tmp_path / "other.pem").write_bytes(other.pem)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(tmp_path / "ca.pem"))
    tls.verify_mode = ssl.CERT_REQUIRED
    tls.load_cert_chain(tmp_path / "service.pem", tmp_path / "service.key")
    own = {
        "certificate": str(tmp_path / "party.pem"),
        "key": str(tmp_path / "party.key"),
        "ca": str(tmp_path / "ca.pem"),
    }
    with serving(service(), tls) as found:
        store = opened(served, {"kind": "service", "url": found.url, **own})
        assert embedded(store, ["K-1"])[0] == [0]
        for wrong in ({**own, "ca": str(tmp_path / "other.pem")}, {"ca": own["ca"]}):
            with raises(InputError, Code.FILE_INVALID):
                opened(served, {"kind": "service", "url": found.url, **wrong})


@pytest.mark.parametrize(
    "store",
    [
        {"kind": "database", "query": "SELECT 1 WHERE 1 IN :ids"},
        {"kind": "database", "source": "people.csv", "query": "SELECT 1 WHERE 1 IN :ids"},
        {"kind": "database", "source": "sqlite:///gone.db", "query": "SELECT 1 WHERE 1 IN :ids"},
        {"kind": "database"},
        {"kind": "other"},
        {"kind": "service", "url": "ftp://host/x"},
        {"kind": "service", "url": "https://user:geheim@host/x"},
        {"kind": "service", "url": "https://host/x", "query": "SELECT 1"},
    ],
)
def test_what_is_no_store_is_refused(served: Served, store: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID, Code.FILE_INVALID) as caught:
        opened(served, store)
    assert "geheim" not in str(caught.value)


def test_the_active_partys_own_features_may_be_asked_for(served: Served, tmp_path: Path) -> None:
    """Without them in time a row has no score, and no request fails."""
    path, frame = tmp_path / "own.db", pd.read_csv(served.federation.data["p0"]["source"])
    with sqlite3.connect(path) as file:
        frame.to_sql("people", file, index=False)
    query = "SELECT id, xp0 FROM people WHERE id IN :ids"
    settings = {"kind": "database", "source": f"sqlite:///{path}", "query": query}
    store, others = opened(served, settings, name="p0"), {}
    for name in ("p1", "p2"):
        others[name] = opened(served, name=name)

    def answer(name: str, ids: Sequence[str]) -> ServingAnswer:
        z = embedded(others[name], ids)[1]
        return ServingAnswer(bytes([EMBEDDED] * len(ids)), z.numpy().astype("<f4").tobytes())

    def ask(ids: Sequence[str], timeout_s: float) -> Any:
        _ = timeout_s
        return SimpleNamespace(wait=lambda: {name: answer(name, ids) for name in others})

    found = served.run.predict()
    want = dict(zip(found["id"], found["score_1"], strict=True))
    scorer = OnlineScorer(store, ask, 20.0, Quality(), {})
    assert scorer.score(IDS).columns["score_1"].tolist() == [want[each] for each in IDS]
    with sqlite3.connect(path) as file:
        file.execute("UPDATE people SET xp0 = 'much' WHERE id = 'K-2'")
    scores = scorer.score(["K-1", "K-2", *IDS[3:5]])
    assert scores.state == ["scored", "failed", "scored", "scored"]
    assert (scores.part(1).missing, scores.part(1).parties) == ({"p0": "failed"}, ("p1", "p2"))
    assert scores.columns["score_1"][[0, 2]].tolist() == [want["K-1"], want["K-3"]]
    with sqlite3.connect(path) as file:
        file.execute("DROP TABLE people")
    scores = scorer.score(IDS[:2])
    assert scores.state == ["failed", "failed"]
    late = OnlineScorer(store, ask, 0.0, Quality(), {}).score(IDS[:2])
    assert late.state == ["failed", "failed"]
    assert late.part(0).missing == {"p0": "late"}


# --- tables in memory


def test_a_folder_of_parquet_is_renewed_when_it_is_whole(served: Served, tmp_path: Path) -> None:
    folder, frame = tmp_path / "people", people()
    frame["since"] = pd.to_datetime(frame["since"])
    folder.mkdir()
    halves = [pa.Table.from_pandas(each, preserve_index=False) for each in (frame[:20], frame[20:])]
    for number, each in enumerate(halves):
        pq.write_table(each, folder / f"{number}.parquet")
    _, want = embedded(opened(served), IDS)
    store = opened(served, source=str(folder))
    _, found = embedded(store, IDS)
    assert torch.equal(found, want)
    before = store.held
    # One file of two: the folder has changed, and changes again.
    changed = frame.assign(amount=frame["amount"] + 1)
    parts = [
        pa.Table.from_pandas(each, preserve_index=False) for each in (changed[:20], changed[20:])
    ]
    pq.write_table(parts[0], folder / "0.parquet")
    assert not store.refresh()
    pq.write_table(parts[1], folder / "1.parquet")
    assert not store.refresh()
    assert store.held is before
    assert store.refresh()
    assert store.held.version != before.version
    assert not torch.equal(embedded(store, IDS)[1], found)
    # Another folder in its place, and one that cannot be used.
    (tmp_path / "next").mkdir()
    pq.write_table(halves[0], tmp_path / "next" / "0.parquet")
    folder.rename(tmp_path / "old")
    (tmp_path / "next").rename(folder)
    assert [store.refresh() for _ in range(3)] == [False, True, False]
    assert len(store.held.places) == 20
    (folder / "1.parquet").write_bytes(b"half")
    assert [store.refresh() for _ in range(3)] == [False, False, False]
    assert len(store.held.places) == 20


def test_a_database_in_memory_is_read_again_if_that_is_asked_for(
    served: Served, sqlite: str
) -> None:
    said: list[str] = []
    query = select("")
    store = opened(served, None, said, source=sqlite, query=query)
    assert not store._refresh_s
    store = opened(served, None, said, source=sqlite, query=query, refresh_s=0.05)
    assert store._refresh_s
    before = store.held
    # The same rows are the same version.
    assert not store.refresh()
    assert store.held is before
    path = sqlite.removeprefix("sqlite:///")
    with sqlite3.connect(path) as file:
        file.execute("UPDATE people SET amount = 2.5 WHERE id = 'K-1'")
    renewed: list[bool] = []
    store.when_renewed(lambda: renewed.append(True))
    store.watch()
    wait_until(lambda: renewed)
    store.close()
    assert store.held.version != before.version
    said.clear()
    Path(path).unlink()
    assert not store.refresh()
    assert not store.refresh()
    # Once, and the rows stay.
    assert len(said) == 1
    assert min(embedded(store, IDS)[0]) >= 0


# --- programs


def bytes_to(served: Served, party: str) -> int:
    """Returns the bytes of all questions to a passive party, once the programs have ended."""
    entries = load_entries(served.run.folder / "p0" / "serve-bytes.json")
    return sum(
        each.message_bytes
        for each in entries
        if (each.peer, each.kind, each.direction) == (party, "question", "sent")
    )


@needs_server
def test_programs_ask_a_database_and_keep_what_they_may(served: Served, server: Postgres) -> None:
    """The numbers are those of a prediction from tables, and fewer bytes leave.

    It takes as long as its three programs need to start.
    """
    found = served.run.predict()
    want = dict(zip(found["id"], found["score_1"], strict=True))
    slow = "CASE WHEN id = 'K-9' THEN pg_sleep(60)::text ELSE '' END"
    query = select(f"WHERE id = ANY(:ids) AND {slow} = ''")
    database = {"kind": "database", "source": server.url(), "query": query}
    active = served.start("p0", party_timeout_ms=1500)
    served.start("p1", store=database)
    served.start("p2", cache_s=600.0)
    served.url = active.wait_for("ready", 60.0)["http"]
    served.wait_for(("p1", "p2"))
    others = [each for each in IDS if each != "K-9"]

    def scored(ids: Sequence[str]) -> dict[str, Any]:
        rows = served.rows(*ids)
        assert {(row["state"], *row["parties"]) for row in rows} == {("scored", "p0", "p1", "p2")}
        return {row["id"]: row["score_1"] for row in rows}

    for _ in range(4):
        assert scored(others) == {each: want[each] for each in others}
    with ThreadPoolExecutor(8) as callers:
        for each in callers.map(lambda one: scored([one]), others):
            assert each == {name: want[name] for name in each}
    # A database that is slow for one id makes this party late, and a broken one makes it fail.
    (row,) = served.rows("K-9")
    assert (row["state"], row["missing"]) == ("unmeasured", {"p1": "late"})
    server.run("ALTER TABLE people RENAME TO others")
    (row,) = served.rows("K-1")
    assert (row["state"], row["missing"]) == ("unmeasured", {"p1": "failed"})
    server.run("ALTER TABLE others RENAME TO people")
    assert scored(["K-1"]) == {"K-1": want["K-1"]}
    # What was kept is not used once the table has changed.
    path = Path(served.federation.data["p2"]["source"])
    frame = pd.read_csv(path)
    frame["xp2"] += 1.0
    frame.to_csv(path, index=False)
    served.program("p2").wait_for("refreshed")
    give_up_s = soon()
    while scored(["K-1"]) == {"K-1": want["K-1"]}:
        assert time.monotonic() < give_up_s
    changed = served.run.predict()
    assert scored(others) == {
        name: score
        for name, score in zip(changed["id"], changed["score_1"], strict=True)
        if name != "K-9"
    }
    for name in ("p2", "p1", "p0"):
        program = served.program(name)
        program.signal(signal.SIGTERM)
        program.wait(30.0)
    assert 0 < bytes_to(served, "p2") < 0.5 * bytes_to(served, "p1")


def test_an_answer_that_is_counted_may_not_be_kept() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("shop.toml", "cache_s")):
        parse(ServeSettings, {"cache_s": 5.0, "answers_a_day": 3}, "shop.toml: serve")

"""Tables that DuckDB makes of files train what the same tables as plain files train, bit for bit: in
one process, between processes, after a kill, and as the paper's definition says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet
import pytest

import vfl
from tests.harness import cases, reference
from tests.harness.memory import in_memory
from tests.integration.test_exact import federated, largest_deviation
from tests.integration.test_resume import (
    AFTER_FIRST,
    BATCH,
    ROWS,
    SECOND_EPOCH,
    WIDTH,
    Parameters,
    assert_equal,
    held,
    parameters,
)

pytest.importorskip("duckdb")

TOWNS = np.array(["Bonn", "Oslo", "Rome"])
RECIPE = cases.recipe(
    2,
    task={"kind": "binary"},
    model={"embedding_size": WIDTH, "encoder": {"kind": "mlp", "hidden": [16], "dropout": 0.2}},
    phase={"epochs": 3, "batch_size": BATCH},
)
QUERIES = {
    # A join, in no order.
    "p0": "SELECT who, age, income, y FROM 'ages.csv' JOIN 'bank/*.parquet' USING (who)",
    # Groups of rows that are filtered, in an order that is not that of the ids.
    "p1": "SELECT who, sum(paid)::DOUBLE AS paid, any_value(town) AS town FROM 'shop/*.parquet' WHERE paid > 0 GROUP BY who ORDER BY paid",
}


def made(folder: Path, rows: int = ROWS, seed: int = 3) -> dict[str, dict[str, Any]]:
    """Writes the files of both parties, and the same tables as plain files: {party: [data] of
    these}.
    """
    random = np.random.default_rng(seed)
    who = pa.array([f"u{row:04}" for row in range(rows)])
    # Whole cents, which are exact in any order.
    paid, town = random.integers(1, 900, size=(2, rows)), TOWNS[random.integers(3, size=rows)]
    bank = pa.table(
        {"who": who, "age": random.integers(18, 90, rows), "income": random.random(rows)}
    )
    y = (bank["age"].to_numpy() / 90 + paid.sum(0) / 1800 > 0.9).astype(int)
    bank = bank.append_column("y", pa.array(y))
    mixed = bank.take(random.permutation(rows))
    arrow_csv.write_csv(
        bank.take(random.permutation(rows)).select(["who", "age"]), folder / "ages.csv"
    )
    spark(folder / "bank", mixed.drop_columns("age"), 3)
    # Two payments each, and one that does not count.
    payments = [pa.table({"who": who, "paid": each, "town": town}) for each in (*paid, -paid[0])]
    every = pa.concat_tables(payments)
    spark(folder / "shop", every.take(random.permutation(len(every))), 4)
    parquet.write_table(bank, folder / "p0.parquet")
    arrow_csv.write_csv(
        pa.table({"who": who, "paid": paid.sum(0), "town": town}), folder / "p1.csv"
    )
    return {
        "p0": {"source": str(folder / "p0.parquet"), "id": "who", "label": "y"},
        "p1": {"source": str(folder / "p1.csv"), "id": "who"},
    }


def spark(folder: Path, table: pa.Table, parts: int) -> None:
    """Writes a table as Spark does."""
    folder.mkdir()
    for part in range(parts):
        name = f"part-{part:05}-8f1e-c000.snappy.parquet"
        parquet.write_table(table.take(np.arange(part, len(table), parts)), folder / name)
        (folder / f".{name}.crc").write_bytes(b"crc\0")
    (folder / "_SUCCESS").touch()


def queries(**more: Any) -> dict[str, dict[str, Any]]:
    """{party: its [data] table}, with paths that start at the party file's folder."""
    data = {
        name: {"source": f"duckdb:{query}", "id": "who", "scratch": "spill"} | more
        for name, query in QUERIES.items()
    }
    data["p0"]["label"] = "y"
    return data


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    folder = tmp_path_factory.mktemp("undisturbed")
    plain = made(folder)
    got = federated(folder, RECIPE, queries())
    assert list((folder / "spill").iterdir()) == []
    # As the definition says, of plain files.
    assert largest_deviation(got, reference.train(RECIPE, plain)) <= 1e-6
    return got


def test_a_query_trains_what_plain_files_train(
    tmp_path: Path, undisturbed: Parameters, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = made(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert_equal(in_memory(tmp_path / "plain", RECIPE, plain), undisturbed)
    assert_equal(in_memory(tmp_path / "queries", RECIPE, queries()), undisturbed)
    # All arrays lie in files.
    assert_equal(in_memory(tmp_path / "mapped", RECIPE, queries(memory_mib=0)), undisturbed)


def test_a_party_that_is_killed_reads_its_query_again(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    made(tmp_path)
    with held(tmp_path, RECIPE, queries(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["p1"].kill()
        federation.programs["server"].wait_for("interrupted")
        federation.start_party("p1")
        proxy.release()
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), undisturbed)
    # What the killed one had left, too.
    assert list((tmp_path / "spill").iterdir()) == []


def test_new_rows_come_from_a_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path)
    monkeypatch.chdir(tmp_path)
    data = {name: vfl.Data(each.pop("source"), settings=each) for name, each in queries().items()}
    run = vfl.simulate(RECIPE | {"simulate": {}}, data, quiet=True)
    # Its own rows again, by the queries that the run has kept.
    again = run.predict()
    assert sorted(again["who"]) == [f"u{row:04}" for row in range(ROWS)]
    (tmp_path / "new").mkdir()
    plain = made(tmp_path / "new", 40, seed=4)
    # Relative paths start where the program runs.
    monkeypatch.chdir(tmp_path / "new")
    found = [
        dict(zip(scores["who"], scores["score_1"], strict=True))
        for scores in (
            run.predict({name: f"duckdb:{query}" for name, query in QUERIES.items()}),
            run.predict({name: each["source"] for name, each in plain.items()}),
        )
    ]
    assert len(found[0]) == 40
    assert found[0] == found[1]

"""A prediction of rows that training has not seen: from a database, with categories that it did not
have.
"""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path

import pytest

from tests.harness import cases
from tests.harness.errors import assert_names
from tests.harness.federation import Federation

pytest.importorskip("sqlalchemy")
TOWNS = ("Graz", "Linz", "Wels")


def database(path: Path, towns: tuple[str, ...], rows: int) -> None:
    with sqlite3.connect(path) as opened:
        opened.execute("create table clients (who text, orders integer, town text)")
        values = [(f"u{row:03}", row % 9, towns[row % len(towns)]) for row in range(rows)]
        opened.executemany("insert into clients values (?, ?, ?)", values)
    opened.close()


def test_new_rows_of_a_database_with_new_categories(tmp_path: Path) -> None:
    (tmp_path / "p0.csv").write_text(
        "who,age,y\n" + "".join(f"u{row:03},{row % 7},{row % 2}\n" for row in range(60))
    )
    database(tmp_path / "clients.db", TOWNS, 60)
    query = "select * from clients"
    data = {
        "p0": {"source": str(tmp_path / "p0.csv"), "id": "who", "label": "y"},
        "p1": {"source": f"sqlite:///{tmp_path / 'clients.db'}", "query": query, "id": "who"},
    }
    federation = Federation(tmp_path / "f", cases.recipe(2, task={"kind": "binary"}), data)
    with federation:
        federation.start_all()
        federation.finish()
    run = federation.run_folder.name
    database(federation.folder / "new.db", (*TOWNS, "SECRET"), 40)
    (federation.folder / "new.csv").write_text(
        "who,age\n" + "".join(f"u{row:03},{row % 7}00\n" for row in range(30))
    )
    federation.programs.clear()
    federation.server_options = ("--predict",)
    new = {
        "p0": ["--data", "new.csv"],
        "p1": ["--data", "sqlite:///new.db", "--query", f"{query} limit 30"],
    }
    with federation:
        federation.start_server()
        for name in federation.names:
            path = federation.write_party(name).name
            federation.start(name, "vfl-party", "predict", path, "--run", f"runs/{run}", *new[name])
        for name, program in federation.programs.items():
            assert program.wait(60) == 0, f"{name}: {program.stderr}"
        said = federation.programs["p1"].wait_for("unseen")["said"]
        source, _, told = said.partition(": ")
        assert source == f"sqlite:///{federation.folder / 'new.db'}"
        assert all(word in told for word in ("'town'", "7 of 30"))
        assert_names(told, "town", "30")
        assert federation.programs["p0"].wait_for("predicted")["written"] == 30
        (age,) = [
            each["said"] for each in federation.programs["p0"].seen() if each["event"] == "unseen"
        ]
        source, _, outside = age.partition(": ")
        assert source == str(federation.folder / "new.csv")
        assert all(word in outside for word in ("'age'", "25 of 30"))
        assert_names(outside, "age", "25")
        assert not [
            each for each in federation.programs["p1"].seen() if "age" in str(each.get("said", ""))
        ]
    (log,) = (
        path for path in federation.folder.glob("runs/*/p1/log.jsonl") if path.parts[-3] != run
    )
    assert told in log.read_text()
    assert "SECRET" not in log.read_text()
    with (federation.folder / "predictions.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == 30

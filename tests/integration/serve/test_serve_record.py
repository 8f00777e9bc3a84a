"""What is told while a model serves is in the record before it leaves, and counts in the account."""

from __future__ import annotations

import json
import signal
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
from click.testing import CliRunner

from tests.harness import cases
from tests.harness.served import NAMES, Served, trained
from vfl_common.bundle import CONTROL, load_entries
from vfl_governance.account.store import standing
from vfl_party.cli import cli
from vfl_party.record.book import folder_of
from vfl_party.record.history import RecordHistory
from vfl_serve.opening import BYTES

NEW, MOST = "NEW-1", 4


def record_of(served: Served, name: str) -> Path:
    return folder_of(served.federation.folder / "runs", name)


def stop_all(served: Served) -> None:
    for name in reversed(NAMES):
        program = served.program(name)
        program.signal(signal.SIGTERM)
        program.wait(30.0)


def require_equal_to_ledgers(served: Served) -> None:
    """Each program has ended, and nothing but questions and answers that were given has left."""
    for name in NAMES:
        wanted, found = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
        for entry in load_entries(served.run.folder / name / BYTES):
            if entry.direction == "sent" and entry.phase != CONTROL:
                for what in ("payload_bytes", "message_bytes", "messages"):
                    wanted[entry.peer, entry.kind, what] += getattr(entry, what)
        for each in RecordHistory(record_of(served, name)).disclosures():
            assert (each.way.job, each.way.run) == ("serve", served.run.folder.name)
            for what in ("payload_bytes", "message_bytes", "messages"):
                found[each.to[0], each.way.kind, what] += getattr(each, what)
        assert sum(wanted.values()) > 0
        assert +found == +wanted, name


def shown(served: Served, name: str, *words: str) -> list[dict[str, Any]]:
    """What ``vfl-party disclosures show`` says."""
    party = str(served.federation.folder / f"{name}.toml")
    found = CliRunner().invoke(cli, ["disclosures", "show", party, "--json", *words])
    assert found.exit_code == 0, found.output
    return [json.loads(line) for line in found.output.splitlines() if line.startswith("{")]


def with_somebody_new(served: Served, folder: Path) -> str:
    """Adds a person whom no table of training has, at p0 and p1; returns p1's database."""
    tables = {}
    for name in ("p0", "p1"):
        path = Path(served.federation.data[name]["source"])
        frame = pd.read_csv(path)
        tables[name] = pd.concat([frame, frame.iloc[:1].assign(id=NEW)])
    tables["p0"].to_csv(served.federation.data["p0"]["source"], index=False)
    with sqlite3.connect(folder / "people.db") as file:
        tables["p1"].to_sql("people", file, index=False)
    return f"sqlite:///{folder / 'people.db'}"


def test_what_was_told_of_a_person_is_found_and_limited(tmp_path: Path) -> None:
    """p1 asks a database by id, and is limited; what p2 tells may be used again.

    It takes as long as its three programs need to start.
    """
    phases = cases.recipe(3, task={"kind": "binary"})["phases"]
    with trained(tmp_path, *phases) as served:
        query = "SELECT id, c2, c3 FROM people WHERE id IN :ids"
        source = with_somebody_new(served, tmp_path)
        account = {"predictions_of_a_person": MOST}
        served.federation.extra["p1"] = {"policy": {"level": "open", "account": account}}
        active = served.start("p0")
        served.start("p1", store={"kind": "database", "source": source, "query": query})
        served.start("p2", cache_s=600.0)
        served.url = active.wait_for("ready", 60.0)["http"]
        served.wait_for(NAMES[1:])
        asked = [("K-1",), ("K-1", "K-2"), ("K-1", NEW), ("K-1",)]
        for ids in asked:
            assert {row["missing"].get("p1") for row in served.rows(*ids)} == {None}
        times = Counter(each for ids in asked for each in ids)
        assert times["K-1"] == MOST
        for name, person, count in (
            *(("p1", each, count) for each, count in times.items()),
            *(("p0", each, count) for each, count in times.items()),
            # Told once, as sent.
            ("p2", "K-1", 1),
            ("p2", "K-2", 1),
            # It does not know this person.
            ("p2", NEW, 0),
            ("p1", "K-3", 0),
        ):
            history = RecordHistory(record_of(served, name))
            to = "p0" if name != "p0" else "p1"
            told = [*history.about([person], history.disclosures(peer=to))]
            assert len(told) == count, (name, person)
        (one,) = shown(served, "p1", "--id", NEW)
        assert (one["phase"], one["exchange"], one["people"]) == ("serve", "embedding", 2)
        assert one["numbers"] == one["payload_bytes"] / 4 > 0
        # Of this person, nothing leaves any more; of others, it does.
        rows = served.rows("K-1", "K-2", NEW)
        assert [row["missing"].get("p1") for row in rows] == ["not answered", None, None]
        # The fourth answer about this id is the last one, in the same question.
        rows = served.rows(*[NEW] * 4)
        assert [row["missing"].get("p1") for row in rows] == [
            None,
            None,
            "not answered",
            "not answered",
        ]
        assert len(shown(served, "p1", "--each", "--id", "K-1")) == MOST
        stop_all(served)
        sums = standing(record_of(served, "p1")).sums
        assert sums.total("p0", 0)["predictions"] == times.total() + 4
        # Who came later is of the same data set.
        assert {*sums.persons.sets.tolist()} == {0}
        require_equal_to_ledgers(served)
        for path in record_of(served, "p1").rglob("*"):
            assert path.is_dir() or NEW.encode() not in path.read_bytes(), path


def test_trees_tell_a_bit_for_each_split_on_the_way(tmp_path: Path) -> None:
    """Bytes and numbers are the ledger's, at all parties."""
    phase = {"kind": "secureboost", "trees": 4, "depth": 3, "bins": 8, "encryption": "none"}
    with trained(tmp_path, phase) as served:
        # A policy holds here, too.
        served.federation.extra["p2"] = {"policy": {"level": "open", "least_rows": 2}}
        served.start_all()
        ids = [f"K-{number}" for number in range(30)]
        served.rows(*ids)
        (row,) = served.rows("K-1")
        assert row["missing"].get("p2") == "not answered"
        stop_all(served)
        require_equal_to_ledgers(served)
        sums = standing(record_of(served, "p1")).sums
        bits = sums.vector("p0", "split_bits")
        assert 0 < bits.sum() <= (len(ids) + 1) * 4 * 3
        assert sums.total("p0", 0)["predictions"] == len(ids) + 1
        told = RecordHistory(record_of(served, "p1")).disclosures()
        assert sum(int(each.tags[1].sum()) for each in told if each.tags) == bits.sum()

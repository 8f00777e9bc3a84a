"""Everything that leaves a party is in its record before it leaves, to the byte; peers find a
record that was rewritten.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness import cases
from tests.harness.federation import Federation, refused
from tests.integration.test_ledger import table
from vfl_common.bundle import CONTROL
from vfl_common.errors import InputError
from vfl_party.cli import cli
from vfl_party.policy.meeting import SHOWN
from vfl_party.record.book import LINES, folder_of
from vfl_party.record.heads import OWN, PEERS
from vfl_party.record.history import RecordHistory
from vfl_party.record.lines import ALL
from vfl_party.record.note import StoredHead

ROWS, EPOCHS = 60, 2


def recipe(passives: int = 2) -> dict[str, Any]:
    """Split training, then an evaluation of the rows that were trained on, and of the others."""
    found = cases.recipe(
        passives + 1,
        task={"kind": "binary"},
        model={"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [8]}},
        phase={"epochs": EPOCHS, "batch_size": 16},
        rows={"validation": 0.0, "test": 0.2},
    )
    found["phases"].append({"kind": "evaluate", "splits": ["train", "test"]})
    return found


def record_of(federation: Federation, name: str) -> Path:
    return folder_of(federation.folder / "runs", name)


def disclosures(federation: Federation, *words: str, code: int = 0) -> str:
    """What ``vfl-party disclosures`` says."""
    found = CliRunner().invoke(cli, ["disclosures", *words])
    assert found.exit_code == code or (code and isinstance(found.exception, InputError)), (
        found.output
    )
    return found.output


def counted(federation: Federation, name: str) -> Counter[tuple[str, str, str, str]]:
    """Sums of a party's record: {(peer, phase, kind, what): count}."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for each in RecordHistory(record_of(federation, name)).disclosures():
        for peer in each.to:
            key = peer, each.way.phase, each.way.kind
            found[(*key, "payload_bytes")] += each.payload_bytes
            found[(*key, "message_bytes")] += each.message_bytes
            found[(*key, "messages")] += each.messages
    return +found


def test_the_record_is_the_ledgers_sum_and_tells_of_each_person(tmp_path: Path) -> None:
    with Federation(tmp_path, recipe(), table(tmp_path, ROWS, 2)) as federation:
        federation.start_all()
        federation.finish()
        for name in federation.names:
            ledger: Counter[tuple[str, str, str, str]] = Counter()
            for entry in federation.ledger(name):
                if entry.direction == "sent" and entry.phase != CONTROL:
                    for what in ("payload_bytes", "message_bytes", "messages"):
                        ledger[entry.peer, entry.phase, entry.kind, what] += getattr(entry, what)
            assert +ledger == counted(federation, name), name
            said = disclosures(federation, "verify", str(tmp_path / f"{name}.toml"))
            assert "wrong" not in said
            assert "not signed yet" not in said
            assert f"{'p1' if name == 'p0' else 'p0'} has signed" in said
        # The rows are known of all that tells of rows.
        for name in federation.names:
            for each in RecordHistory(record_of(federation, name)).disclosures():
                assert each.about != ALL, each
                assert each.way.phase == "open" or all(each.keys.get(to) for to in each.to)
        party = str(tmp_path / "p1.toml")
        by_phase = Counter[str]()
        history = RecordHistory(record_of(federation, "p1"))
        for number in range(ROWS):
            for one in history.about([f"{number:02d}"], history.disclosures(peer="p0")):
                by_phase[one.way.phase] += 1
        said = disclosures(federation, "show", party, "--id", "07", "--json")
        lines = [json.loads(line) for line in said.splitlines()]
        bundles = sum(line["bundles"] for line in lines)
        assert bundles in (1, 1 + EPOCHS)
        # Of an embedding the person has as many numbers as each other.
        widths = {line["of_person"] / line["bundles"] for line in lines}
        assert len(widths) == 1
        assert sum(line["of_person"] for line in lines) < sum(line["numbers"] for line in lines)
        assert "of the person" in disclosures(federation, "show", party, "--id", "07")
        for nobody in ("99", "", "\x1b"):
            said = disclosures(federation, "show", party, "--id", nobody)
            assert "nothing was sent about" in said
        # Bytes of a command line that are no text.
        disclosures(federation, "show", party, "--id", "\udcff", code=2)
        disclosures(federation, "accept", party, "../../x", code=2)
        # Each row once an epoch if it is for training; all rows in the evaluation.
        assert by_phase["splitnn"] == EPOCHS * ROWS * 0.8
        assert by_phase["evaluate"] == ROWS
        shown = disclosures(federation, "show", party, "--peer", "p0")
        assert "allow all -> identity" in shown
        # The bytes are those that crossed.
        said = disclosures(federation, "show", party, "--peer", "p0", "--json")
        crossed = [json.loads(line)["message_bytes"] for line in said.splitlines()]
        assert all(f" {each:,} " in shown for each in crossed)
        out = tmp_path / "statement.json"
        disclosures(federation, "export", party, federation.run_folder.name, str(out))
        same, before = tmp_path / "same.json", json.loads(out.read_text())["payload"]
        disclosures(federation, "export", party, "latest", str(same))
        assert json.loads(same.read_text())["payload"] == before
        disclosures(federation, "export", party, "production", str(same), code=2)
        assert disclosures(federation, "show", party, "--run", "latest", "--peer", "p0") == shown
        other = str(tmp_path / "p0.toml")
        assert "signed by p1" in disclosures(federation, "verify", other, "--statement", str(out))
        changed = json.loads(out.read_text())
        changed["payload"] = "A" + changed["payload"][1:]
        out.write_text(json.dumps(changed))
        disclosures(federation, "verify", other, "--statement", str(out), code=2)


@pytest.mark.parametrize("owner", ["p0", "p1"])
def test_the_peer_finds_a_record_that_was_rewritten(owner: str, tmp_path: Path) -> None:
    """Each line is as before but for one number, and the tree and the owner's heads are made
    anew.
    """
    other = "p1" if owner == "p0" else "p0"
    with Federation(tmp_path, recipe(1), table(tmp_path, ROWS, 1)) as federation:
        federation.start_all()
        federation.finish()
        folder = record_of(federation, owner)
        before = (folder / LINES).read_text()
        lines = before.splitlines(keepends=True)
        place = next(at for at, line in enumerate(lines) if '"sent"' in line)
        lines[place] = lines[place].replace('"numbers":', '"numbers":9')
        (folder / LINES).write_text("".join(lines))
        kept = (folder / OWN).read_text()
        party = str(tmp_path / f"{owner}.toml")
        said = disclosures(federation, "verify", party, code=2)
        assert "was changed after it was signed" in said
        # It is shown all the same.
        assert "splitnn" in disclosures(federation, "show", party, code=2)
        assert '"numbers":9' in disclosures(federation, "show", party, "--json", "--each", code=2)
        out = tmp_path / "statement.json"
        disclosures(federation, "export", party, "latest", str(out), code=2)
        assert not out.exists()
        for name in ("hashes", "hashes.json", OWN):
            (folder / name).unlink()
        assert "heads were lost" in disclosures(federation, "verify", party, code=2)
        disclosures(federation, "show", party, code=2)
        federation.start_all()
        sentence = refused(federation.programs[other], owner, "lines were changed or lost")
        (found,) = (record_of(federation, other) / PEERS).glob(f"{owner}.broken-*.json")
        assert found.name in sentence
        # A third party, which has the CA alone, reads who has signed what.
        said = disclosures(
            federation, "verify", str(tmp_path / f"{other}.toml"), "--evidence", owner, str(found)
        )
        assert f"{owner} has signed a head of" in said
        assert kept


def test_passive_parties_get_the_heads_that_others_hold(tmp_path: Path) -> None:
    """The server passes them on, and the active party gives a proof from each."""
    with Federation(tmp_path, recipe(2), table(tmp_path, ROWS, 2)) as federation:
        for _ in range(2):
            federation.start_all()
            assert all(each.wait() == 0 for each in federation.programs.values())
        last = max((tmp_path / "runs").glob(f"*/p2/{SHOWN}"))
        shown = json.loads(last.read_text())
        heads = {name: each.get("head") for name, each in shown.items()}
        assert heads["p0"] is None
        for name in ("p1", "p2"):
            assert StoredHead.read(json.dumps(heads[name])).note.head.owner == "p0"
        assert heads["p1"] != heads["p2"]
        for name in federation.names:
            assert not [*(record_of(federation, name) / PEERS).glob("*.json")]


@pytest.mark.parametrize(("restored", "why"), [(False, "another record"), (True, "contradicts")])
def test_a_record_that_is_lost_is_accepted_by_hand(
    restored: bool, why: str, tmp_path: Path
) -> None:
    """Also a record from yesterday's backup, with the command of the page about restoring."""
    page = (Path(__file__).parents[2] / "docs/how-to/production/keep.md").read_text()
    command = next(line for line in page.splitlines() if "disclosures accept" in line).split()
    with Federation(tmp_path, recipe(1), table(tmp_path, ROWS, 1)) as federation:
        federation.start_all()
        federation.finish()
        record, backup = record_of(federation, "p1"), tmp_path / "backup"
        if restored:
            shutil.copytree(record, backup)
            federation.start_all()
            assert all(each.wait() == 0 for each in federation.programs.values())
        shutil.rmtree(record)
        if restored:
            backup.rename(record)
        federation.start_all()
        if not restored:
            said = federation.programs["p1"].wait_for("advice")["said"]
            assert "a new record begins" in said
        refused(federation.programs["p0"], "p1", why)
        given = {"bank.toml": str(tmp_path / "p0.toml"), "shop": "p1"}
        disclosures(federation, *(given.get(word, word) for word in command[2:]))
        for each in federation.programs.values():
            each.stop()
        federation.start_all()
        assert all(each.wait() == 0 for each in federation.programs.values())

"""Real programs run, predict and serve as far as grants allow, and no further."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import Federation, refused
from tests.harness.granting import approve, command, needs_grants
from tests.harness.served import Served, trained
from tests.integration.test_ledger import table
from vfl_common.errors import Code, InputError
from vfl_governance import commands
from vfl_governance.grants.shown import look
from vfl_governance.grants.store import USES, folder_of
from vfl_party.assembly.files import read_files
from vfl_party.cli import cli
from vfl_party.policy.meeting import SHOWN
from vfl_party.record.book import LINES
from vfl_party.record.book import folder_of as record_of
from vfl_party.record.history import RecordHistory, sum_disclosures

ROWS = 40


def recipe(epochs: int = 2) -> dict[str, Any]:
    return cases.recipe(
        2,
        task={"kind": "binary"},
        model={"embedding_size": 4, "encoder": {"kind": "mlp", "hidden": [8]}},
        phase={"epochs": epochs, "batch_size": 8},
        rows={"validation": 0.0, "test": 0.2},
    )


def listed(federation: Federation, name: str) -> dict[str, Any]:
    """The newest grant of a party, as JSON."""
    found = command(federation.folder, "grants", f"{name}.toml", "--json")
    assert found.exit_code == 0, found.output
    facts: dict[str, Any] = json.loads(found.output.splitlines()[0])
    return facts


def sent(federation: Federation, name: str) -> int:
    """How many bundles a party has sent, in all runs."""
    path = record_of(federation.folder / "runs", name) / LINES
    return path.read_text().count('"sent":') if path.exists() else 0


def shown(federation: Federation, name: str) -> dict[tuple[str, str, str], tuple[int, int]]:
    """What a person has read before signing: {(phase, receiver, kind): (bytes, people)}."""
    found = look(read_files(federation.folder / f"{name}.toml"))[1].leaves
    return {
        (each.phase, each.to, each.kind): (each.payload_bytes or 0, each.people or 0)
        for each in found
    }


def recorded(federation: Federation, name: str) -> dict[tuple[str, str, str], tuple[int, int]]:
    """What has left then, by the party's record; of people all whom the table has."""
    sums = sum_disclosures(RecordHistory(record_of(federation.folder / "runs", name)).disclosures())
    return {
        (way.phase, to, way.kind): (each.payload_bytes, ROWS if each.people else 0)
        for (_, to, way), each in sums.items()
        if way.kind != "ack"
    }


def test_a_run_is_as_long_as_all_who_ask_have_allowed(tmp_path: Path) -> None:
    """Without a grant nothing begins; with one for a run there is one run, which all can show."""
    with Federation(tmp_path, recipe(), table(tmp_path, ROWS, 1)) as federation:
        needs_grants(federation, "p0", "p1")
        federation.start_server()
        said = refused(federation.start_party("p1"), "p1", "has signed no grant", "approve")
        assert "case" in said
        assert not sent(federation, "p1")
        over = approve(federation, "p1")
        assert (
            command(tmp_path, "revoke-grant", "p1.toml", over[:6], "--why", "a test").exit_code == 0
        )
        refused(federation.start_party("p1"), over, "was revoked", "(a test)")
        ids = {name: approve(federation, name, "--purpose", "a test") for name in ("p0", "p1")}
        for name in federation.names:
            federation.start_party(name)
        federation.finish()
        run = federation.run_folder
        for name in federation.names:
            assert shown(federation, name) == recorded(federation, name)
            said = command(tmp_path, "grants", f"{name}.toml", "--verify", str(run / name)).output
            lines = said.splitlines()
            assert [line.split()[0] for line in lines] == ["p0", "p1"]
            assert all(f"(grant {ids[line[:2]]}, " in line for line in lines)
            assert listed(federation, name)["runs_begun"] == [run.name]
        words = command(tmp_path, "grants", "p1.toml").output
        assert "0 of 1" in words
        assert "is used up" in words
        before = sent(federation, "p1")
        federation.start_server()
        refused(federation.start_party("p1"), ids["p1"], "allows 1 run, and 1 was begun")
        assert sent(federation, "p1") == before
        # A kept grant that somebody has changed.
        kept = run / "p0" / SHOWN
        tables = json.loads(kept.read_text())
        tables["p1"]["grant"]["grant"]["payload"] = "e30="
        kept.write_text(json.dumps(tables))
        found = command(tmp_path, "grants", "p0.toml", "--verify", str(run / "p0"))
        assert isinstance(found.exception, InputError)


def test_a_killed_run_counts_and_goes_on(tmp_path: Path) -> None:
    with Federation(tmp_path, recipe(100), table(tmp_path, ROWS, 1)) as federation:
        needs_grants(federation, "p1")
        approve(federation, "p1")
        federation.start_all()
        federation.programs["p1"].wait_for("progress")
        federation.programs["p1"].kill()
        federation.programs["server"].wait_for("interrupted")
        assert len(listed(federation, "p1")["runs_begun"]) == 1
        federation.start_party("p1")
        federation.finish()
        assert listed(federation, "p1")["runs_begun"] == [federation.run_folder.name]
        # The run is over: the next one is another.
        federation.start_server()
        refused(federation.start_party("p1"), "allows 1 run, and 1 was begun")


def test_a_revoked_grant_ends_the_training(tmp_path: Path) -> None:
    with Federation(tmp_path, recipe(3000), table(tmp_path, ROWS, 1)) as federation:
        needs_grants(federation, "p1")
        id_ = approve(federation, "p1")
        federation.start_all()
        federation.programs["p1"].wait_for("progress")
        assert command(tmp_path, "revoke-grant", "p1.toml", id_).exit_code == 0
        refused(federation.programs["p1"], id_, "was revoked")


def test_a_grant_that_is_shown_again_is_refused_by_the_peer(tmp_path: Path) -> None:
    """p1 puts its file of uses back, so that its own count begins anew."""
    with Federation(tmp_path, recipe(), table(tmp_path, ROWS, 1)) as federation:
        needs_grants(federation, "p1")
        id_ = approve(federation, "p1")
        federation.start_all()
        federation.finish()
        before = sent(federation, "p1"), sent(federation, "p0")
        for path in folder_of(tmp_path / "runs", "p1").glob(f"{USES}*"):
            path.unlink()
        federation.start_all()
        said = refused(federation.programs["p0"], "p1", "was sent for this number of other runs")
        assert id_ not in said
        assert federation.programs["p1"].wait(60) in (2, 4)
        # A bundle of p1, whose own count allows it, may leave before it hears of the refusal.
        assert sent(federation, "p1") - before[0] in (0, 1)
        assert sent(federation, "p0") == before[1]


def test_another_key_or_table_needs_another_grant(tmp_path: Path) -> None:
    data = table(tmp_path, ROWS, 1)
    with Federation(tmp_path, recipe(), data) as federation:
        needs_grants(federation, "p1")
        approve(federation, "p1")
        pins = federation.extra["p1"]["pins"]
        federation.extra["p1"]["pins"] = pins | {"p0": pins["server"]}
        federation.start_server()
        refused(federation.start_party("p1"), "is for the key", "of p0")
        federation.extra["p1"]["pins"] = {"p0": pins["p0"]}
        path = federation.write_party("p1")
        with raises(InputError, Code.CONFIG_INVALID, names="p1"):
            found = command(tmp_path, "approve", path.name, "--yes")
            assert found.exception is not None
            raise found.exception
        federation.extra["p1"]["pins"] = pins
        federation.data["p1"] = {**data["p1"], "limit": ROWS - 1}
        refused(federation.start_party("p1"), "is for a table with other ids")


def test_nobody_signs_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --yes a program that nobody sits at signs nothing; the purpose is one line."""
    with Federation(tmp_path, recipe(), table(tmp_path, ROWS, 1)) as federation:
        federation.address = "127.0.0.1:1"
        needs_grants(federation, "p1")
        path = federation.write_party("p1").name
        for given in (
            [],
            ["--yes", "--purpose", "one\ntwo"],
            ["--yes", "--until", "2001-01-31"],
            ["--yes", "--runs", "0"],
        ):
            found = command(tmp_path, "approve", path, *given)
            assert isinstance(found.exception, InputError), given
        assert "has signed no grants" in command(tmp_path, "grants", path).output
        checked = command(tmp_path, "check", path, "--offline")
        assert isinstance(checked.exception, InputError)
        assert "has signed no grant for recipe case" in checked.output
        monkeypatch.setattr(commands, "_is_interactive", lambda: True)
        no = CliRunner().invoke(cli, ["approve", str(tmp_path / path)], input="n\n")
        assert "nothing is signed" in no.output
        assert "has signed no grants" in command(tmp_path, "grants", path).output
        yes = CliRunner().invoke(cli, ["approve", str(tmp_path / path)], input="y\n")
        assert "is signed by p1" in yes.output
        assert "ok    grant" in command(tmp_path, "check", path, "--offline").output
        shown = yes.output
        for words in ("p1 would allow: 1 run", "splitnn", "R² 0.920", "to: p0, key sha256:"):
            assert words in shown
        federation.extra["p1"]["policy"]["account"] = {"numbers_of_a_person": 20}
        federation.write_party("p1")
        limit = (
            "policy.account.numbers_of_a_person = 20: 0 numbers about one person are spent at p0"
        )
        for runs, words in (("1", "1 run would make it 8"), ("3", "3 runs would make it 24")):
            shown = command(tmp_path, "approve", path, "--yes", "--runs", runs).output
            over = ", which exceeds the limit" if runs == "3" else ""
            assert f"{limit}, and {words}{over}\n" in shown
        # An embedding of four numbers is sixteen bytes.
        federation.extra["p1"]["policy"]["account"] |= {"predictions": 4, "bytes": 100}
        federation.write_party("p1")
        shown = command(tmp_path, "approve", path, "--yes", "--predictions", "5").output
        assert "1 run and one prediction of each person would make it 12\n" in shown
        both = "at p0, and 1 run and 5 predicted rows would make it"
        assert f"0 predicted rows are spent {both} 5, which exceeds the limit\n" in shown
        assert f"0 bytes are spent {both} " in shown
        alone = ["approve", path, "--yes", "--runs", "0", "--predictions", "5"]
        shown = command(tmp_path, *alone).output
        assert "0 bytes are spent at p0, and 5 predicted rows would make it 80\n" in shown


def test_predictions_count_before_they_leave(tmp_path: Path) -> None:
    with Federation(tmp_path, recipe(), table(tmp_path, ROWS, 1)) as federation:
        needs_grants(federation, "p1")
        approve(federation, "p1", "--predictions", str(ROWS + 5))
        federation.start_all()
        federation.finish()
        run = federation.run_folder.name
        federation.server_options = ("--predict",)
        for left in (5, None):
            before = sent(federation, "p1")
            federation.start_server()
            for name in federation.names:
                path = federation.write_party(name).name
                out = ["--out", "scores.csv", "--replace"] if name == "p0" else []
                words = ["predict", path, "--run", f"runs/{run}", *out]
                federation.start(name, "vfl-party", *words)
            if left is not None:
                for name in ("server", *federation.names):
                    program = federation.programs[name]
                    assert program.wait(60) == 0, f"{name}: {program.stderr}"
                assert listed(federation, "p1")["predicted"] == ROWS
            else:
                refused(federation.programs["p1"], "has 5 predicted rows left")
                # What finds the common rows, and no embedding.
                assert sent(federation, "p1") - before <= 1


@pytest.fixture
def served(tmp_path: Path) -> Any:
    pytest.importorskip("fastapi", reason="the extra serve is not installed")
    with trained(tmp_path, {"kind": "splitnn", "epochs": 1, "batch_size": 24}) as found:
        needs_grants(found.federation, "p0", "p1")
        yield found


def test_serving_ends_with_its_grant(served: Served) -> None:
    federation = served.federation
    served.start("p1")
    refused(served.program("p1"), "has signed no grant")
    numbers = ("--runs", "0", "--predictions")
    id_ = approve(federation, "p1", *numbers, "3")
    active = approve(federation, "p0", *numbers, "8")
    # What the active party keeps, it may use again without asking.
    served.start("p1", cache_s=60.0)
    refused(served.program("p1"), "serve.cache_s", "Set cache_s = 0")
    served.start_all()
    took_part = [row["parties"] for row in served.rows("K-1", "K-2")]
    assert all("p1" in parties for parties in took_part)
    rows = served.rows("K-3", "K-4", "K-5")
    assert ["p1" in row["parties"] for row in rows] == [True, False, False]
    assert listed(federation, "p1")["predicted"] == 3
    # Five of eight: all or none at the active party, before it asks anybody.
    status, answer = served.ask("/v1/predict", {"ids": ["K-1", "K-2", "K-3", "K-4"]})
    assert (status, active in answer["error"]) == (403, True)
    assert listed(federation, "p0")["predicted"] == 5
    for name, grant in (("p1", id_), ("p0", active)):
        assert command(federation.folder, "revoke-grant", f"{name}.toml", grant).exit_code == 0
        refused(served.program(name), grant, "was revoked")

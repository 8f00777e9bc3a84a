"""A run that is disturbed in the middle of an epoch ends with the parameters that it would have
had: bit for bit.

p2 reaches the active party p0 through a proxy that holds the bytes at a given number, so that a
fault happens within a known step of a known epoch on any machine; p1 goes the direct way, to the
address that the server relays.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import cases
from tests.harness.errors import assert_names, error_line
from tests.harness.federation import Federation, refused
from tests.harness.memory import in_memory
from tests.harness.proxy import Proxy
from tests.harness.waiting import wait_until
from vfl_common.bundle import load_entries

PARTIES = ("p0", "p1", "p2")
WIDTH, BATCH, ROWS = 64, 32, 200
# 160 training rows.
EPOCH_STEPS = 5
STEP_BYTES = 4 * WIDTH * BATCH
# And the validation rows.
EPOCH_BYTES = EPOCH_STEPS * STEP_BYTES + 4 * WIDTH * 20
# Roughly: TLS, HTTP/2 settings, the rows' digest.
HANDSHAKE_BYTES = 4096
# In its third step.
SECOND_EPOCH = HANDSHAKE_BYTES + EPOCH_BYTES + int(2.5 * STEP_BYTES)
# The checkpoint before it.
AFTER_FIRST = "000001.splitnn.1"

Parameters = dict[str, dict[str, Tensor]]


def recipe(**run: Any) -> dict[str, Any]:
    """State of every sort: Adam's moments, a schedule, dropout's generators, batch norm's
    statistics.
    """
    return cases.recipe(
        3,
        task={"kind": "binary"},
        model={
            "embedding_size": WIDTH,
            "encoder": {"kind": "mlp", "hidden": [32], "dropout": 0.2, "batch_norm": True},
            "top": {"hidden": [16], "dropout": 0.1},
        },
        phase={
            "epochs": 4,
            "batch_size": BATCH,
            "optimizer": {"kind": "adam", "lr": 0.01, "schedule": "cosine", "clip_norm": 1.0},
        },
        run=run,
    )


DATA = cases.columns("sklearn:breast_cancer", 3, limit=ROWS)


def behind(names: Collection[str]) -> set[str]:
    """The passive parties that reach the active party through the proxy."""
    return {*names} - {cases.ACTIVE, "p1"} if len(names) > 2 else {"p1"}


def halfway(run: Path, names: Collection[str]) -> int:
    """The bytes that parties have sent through the proxy in the middle of a run, as a run that has
    ended counted.
    """
    ledgers = [load_entries(run / name / "ledger.json") for name in behind(names)]
    sent = [
        entry
        for of in ledgers
        for entry in of
        if (entry.peer, entry.direction) == (cases.ACTIVE, "sent")
    ]
    return len(ledgers) * HANDSHAKE_BYTES + sum(entry.message_bytes for entry in sent) // 2


@contextmanager
def held(
    folder: Path,
    tables: dict[str, Any],
    data: dict[str, Any] = DATA,
    make: Callable[..., Federation] = Federation,
    /,
    **at: int,
) -> Iterator[tuple[Federation, Proxy]]:
    """A federation that has come to a stop within a step; ``at`` as for ``Proxy.hold_at``."""
    with Proxy() as proxy, make(folder, tables, data) as federation:
        federation.extra = {name: {"active": proxy.address} for name in behind(data)}
        proxy.hold_at(**at)
        federation.start_server()
        proxy.target = federation.start_party(cases.ACTIVE).wait_for("ready")["address"]
        for name in data:
            if name != cases.ACTIVE:
                federation.start_party(name)
        proxy.wait_until_held()
        yield federation, proxy


def kill(federation: Federation, proxy: Proxy, victim: str) -> None:
    """Kills a program of a federation that is held, starts it again, and lets the others go on."""
    federation.programs[victim].kill()
    if victim == "server":
        federation.start_server(federation.address)
    else:
        federation.programs["server"].wait_for("interrupted")
        again = federation.start_party(victim)
        if victim == cases.ACTIVE:
            proxy.target = again.wait_for("ready")["address"]
    proxy.release()


def wait_for_checkpoints(federation: Federation) -> None:
    """Waits until every party has a checkpoint."""
    wait_until(lambda: all(federation.checkpoint_labels(name) for name in federation.names))


def parameters(federation: Federation) -> Parameters:
    return {name: federation.parameters(name) for name in federation.names}


def assert_equal(got: Parameters, want: Parameters) -> None:
    for party, tensors in want.items():
        assert got[party].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(got[party][name], tensor), f"{party} {name}"


def server_events(federation: Federation, event: str) -> list[dict[str, Any]]:
    """Of the server's present process, which has ended."""
    return [found for found in federation.programs["server"].seen() if found["event"] == event]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    with Federation(tmp_path_factory.mktemp("undisturbed"), recipe(), DATA) as federation:
        federation.start_all()
        assert federation.finish()["interruptions"] == 0
        return parameters(federation)


def test_a_passive_party_is_killed_and_started_again(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["p2"].kill()
        interrupted = federation.programs["server"].wait_for("interrupted")
        assert interrupted["reason"].startswith("p2 ")
        proxy.release()
        federation.start_party("p2")
        summary = federation.finish()
        assert summary["interruptions"] == 1
        assert [event["checkpoint"] for event in server_events(federation, "started")] == [
            "",
            AFTER_FIRST,
        ]
        assert_equal(parameters(federation), undisturbed)
        # It computes as before, and nothing is said of that.
        assert not any(each["arithmetic"]["changes"] for each in summary["parties"][1:])
        assert "arithmetic" not in {event["event"] for event in federation.programs["p2"].seen()}


@pytest.mark.parametrize("victim", ["p2", cases.ACTIVE])
def test_a_party_is_restored_from_a_backup_that_was_made_while_it_trained(
    victim: str, tmp_path: Path, undisturbed: Parameters
) -> None:
    """As the page says: docs/how-to/production/keep.md."""
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        own, backup = federation.run_folder / victim, tmp_path / "backup"
        # The party is in the middle of a step.
        shutil.copytree(own, backup)
        federation.programs[victim].kill()
        federation.programs["server"].wait_for("interrupted")
        shutil.rmtree(own)
        shutil.copytree(backup, own)
        again = federation.start_party(victim)
        if victim == cases.ACTIVE:
            proxy.target = again.wait_for("ready")["address"]
        proxy.release()
        assert federation.finish()["interruptions"] == 1
        started = [event["checkpoint"] for event in server_events(federation, "started")]
        assert started == ["", AFTER_FIRST]
        assert_equal(parameters(federation), undisturbed)


def test_a_backup_with_none_of_the_others_checkpoints_is_refused(tmp_path: Path) -> None:
    tables, newest = recipe(), "000004.splitnn.4"
    tables["phases"][0]["checkpoint_steps"] = 2
    with held(tmp_path, tables, sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(newest)
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        for path in (federation.run_folder / "p2" / "checkpoints").iterdir():
            path.unlink()
        again = federation.start_party("p2")
        proxy.release()
        refused(again, "p2", newest)


def test_before_the_first_checkpoint_the_run_begins_again(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=HANDSHAKE_BYTES + 2 * STEP_BYTES) as (federation, proxy):
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        federation.start_party("p2")
        federation.finish()
        assert [event["checkpoint"] for event in server_events(federation, "started")] == ["", ""]
        assert_equal(parameters(federation), undisturbed)


def test_with_checkpoints_within_an_epoch_the_run_resumes_there(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    tables = recipe()
    # An epoch is three rounds: two steps, two steps, one and validation.
    tables["phases"][0]["checkpoint_steps"] = 2
    within = "000004.splitnn.4"
    with held(tmp_path, tables, sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(within)
        federation.programs["p2"].stop()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        federation.start_party("p2")
        federation.finish()
        assert [event["checkpoint"] for event in server_events(federation, "started")] == [
            "",
            within,
        ]
        assert_equal(parameters(federation), undisturbed)
        text = (federation.run_folder / "p0" / "metrics.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["round"] for line in lines if "validation" in line["metrics"]] == [3, 6, 9, 12]


def test_views_of_batches_are_those_of_a_run_without_interruption(tmp_path: Path) -> None:
    tables = recipe()
    tables["phases"][0] |= {"checkpoint_steps": 2, "augment": {"corruption": 0.3}}
    within = "000004.splitnn.4"
    with held(tmp_path / "killed", tables, sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(within)
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        federation.start_party("p2")
        federation.finish()
        started = server_events(federation, "started")
        assert [event["checkpoint"] for event in started] == ["", within]
        assert_equal(parameters(federation), in_memory(tmp_path / "calm", tables, DATA))


def test_two_parties_are_killed_one_after_the_other(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        # In the third epoch.
        proxy.hold_at(sent=proxy.sent + HANDSHAKE_BYTES + EPOCH_BYTES + 2 * STEP_BYTES)
        federation.start_party("p2")
        proxy.wait_until_held()
        federation.wait_for_checkpoint("000002.splitnn.2")
        federation.programs["p1"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        federation.start_party("p1")
        assert federation.finish()["interruptions"] == 2
        started = [event["checkpoint"] for event in server_events(federation, "started")]
        assert started == ["", AFTER_FIRST, "000002.splitnn.2"]
        assert_equal(parameters(federation), undisturbed)


@pytest.mark.parametrize("name", ["p0", "p2"])
def test_a_flipped_bit_in_the_newest_checkpoint_costs_one_round(
    name: str, tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH + EPOCH_BYTES) as (federation, proxy):
        federation.wait_for_checkpoint("000002.splitnn.2")
        federation.programs[name].kill()
        federation.programs["server"].wait_for("interrupted")
        (path,) = (federation.run_folder / name / "checkpoints").glob(
            "*-000002.splitnn.2.safetensors"
        )
        data = bytearray(path.read_bytes())
        # Of a tensor.
        data[-1] ^= 1
        path.write_bytes(data)
        again = federation.start_party(name)
        if name == cases.ACTIVE:
            proxy.target = again.wait_for("ready")["address"]
        proxy.release()
        assert federation.finish()["interruptions"] == 1
        assert [event["checkpoint"] for event in server_events(federation, "started")] == [
            "",
            AFTER_FIRST,
        ]
        assert_equal(parameters(federation), undisturbed)
        log = (federation.run_folder / name / "log.jsonl").read_text().splitlines()
        (warning,) = [line for line in log if '"warning"' in line and '"damaged"' in line]
        assert str(path.relative_to(tmp_path)) in warning
        assert path.with_name(f"damaged-{path.name}").read_bytes() == data


def test_the_active_party_is_killed_and_comes_back_at_another_address(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["p0"].kill()
        federation.programs["server"].wait_for("interrupted")
        before = proxy.target
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        assert proxy.target != before
        proxy.release()
        assert federation.finish()["interruptions"] == 1
        assert [event["checkpoint"] for event in server_events(federation, "started")] == [
            "",
            AFTER_FIRST,
        ]
        assert_equal(parameters(federation), undisturbed)


def test_the_server_is_killed_and_started_again(tmp_path: Path, undisturbed: Parameters) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        run_id = federation.run_folder.name
        federation.programs["server"].kill()
        proxy.release()
        federation.start_server(federation.address)
        assert federation.finish()["run_id"] == run_id
        (started,) = server_events(federation, "started")
        assert (started["generation"], started["checkpoint"]) == (2, AFTER_FIRST)
        assert_equal(parameters(federation), undisturbed)


@pytest.mark.parametrize("harm", [b"", b'{"run_id": "'], ids=["empty", "cut"])
def test_a_party_whose_run_json_is_damaged_is_told_before_the_others_go_back(
    harm: bytes, tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        path = federation.run_folder / "p2" / "run.json"
        text = path.read_bytes()
        path.write_bytes(harm)
        refused(federation.start_party("p2"), "run.json: ", str(path.parent))
        path.write_bytes(text)
        # Only an account.
        (path.parent / "ledger.json").write_bytes(harm)
        proxy.release()
        federation.start_party("p2")
        assert federation.finish()["interruptions"] == 1
        assert [event["checkpoint"] for event in server_events(federation, "started")] == [
            "",
            AFTER_FIRST,
        ]
        assert_equal(parameters(federation), undisturbed)
        assert (path.parent / "ledger.json.damaged").read_bytes() == harm
        assert "ledger.json: " in (path.parent / "log.jsonl").read_text()


def test_a_server_whose_run_json_is_damaged_begins_no_second_run(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        path = federation.run_folder / "server" / "run.json"
        federation.programs["server"].kill()
        proxy.release()
        text = path.read_bytes()
        path.write_bytes(b"")
        server = ("server", "vfl-server", "run", "recipe.toml")
        refused(federation.start(*server, "--listen", federation.address), "run.json: ")
        path.write_bytes(text)
        (path.parent / "ledger.json").write_bytes(b"garbage")
        federation.start_server(federation.address)
        assert federation.finish()["run_id"] == path.parent.parent.name
        assert_equal(parameters(federation), undisturbed)
        assert (path.parent / "ledger.json.damaged").read_bytes() == b"garbage"


@pytest.mark.parametrize("lost", ["request", "reply"])
def test_a_connection_that_breaks_is_no_interruption(
    lost: str, tmp_path: Path, undisturbed: Parameters
) -> None:
    at = {"sent" if lost == "request" else "received": SECOND_EPOCH - EPOCH_BYTES}
    with held(tmp_path, recipe(), DATA, **at) as (federation, proxy):
        # A look at the certificate, and the link.
        assert proxy.connections == 2
        proxy.cut()
        proxy.release()
        assert federation.finish()["interruptions"] == 0
        assert proxy.connections >= 4
        assert not server_events(federation, "interrupted")
        assert [event["generation"] for event in server_events(federation, "started")] == [1]
        assert_equal(parameters(federation), undisturbed)


def test_a_party_that_stays_away_is_named_after_the_deadline(tmp_path: Path) -> None:
    with held(tmp_path, recipe(rejoin_deadline_s=1.5), sent=SECOND_EPOCH) as (federation, proxy):
        federation.programs["p2"].kill()
        interrupted = federation.programs["server"].wait_for("interrupted")
        began_s = time.monotonic()
        assert interrupted["deadline_s"] == 1.5
        proxy.release()
        others = [federation.programs[name] for name in ("server", "p0", "p1")]
        assert [program.wait(10.0) for program in others] == [3, 3, 3]
        assert time.monotonic() - began_s > 1.0
        for program in others:
            line = error_line(program.stderr)
            assert "p2" in line
            assert "1.5 s" in line


def test_a_party_that_falls_silent_is_named_and_may_come_back(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    tables = recipe(heartbeat_s=0.2, lost_after_s=1.5)
    with held(tmp_path, tables, sent=SECOND_EPOCH) as (federation, proxy):
        federation.programs["p1"].signal(signal.SIGSTOP)
        try:
            interrupted = federation.programs["server"].wait_for("interrupted", 10.0)
            assert "p1" in interrupted["reason"]
            assert_names(interrupted["reason"], "p1", "1.5")
        finally:
            federation.programs["p1"].signal(signal.SIGCONT)
        proxy.release()
        federation.finish()
        assert_equal(parameters(federation), undisturbed)


def test_a_party_that_stays_silent_is_named_after_the_deadline(tmp_path: Path) -> None:
    tables = recipe(heartbeat_s=0.2, lost_after_s=1.0, rejoin_deadline_s=1.0)
    with held(tmp_path, tables, sent=SECOND_EPOCH) as (federation, proxy):
        federation.programs["p1"].signal(signal.SIGSTOP)
        try:
            federation.programs["server"].wait_for("interrupted", 10.0)
            proxy.release()
            others = [federation.programs[name] for name in ("server", "p0", "p2")]
            assert [program.wait(10.0) for program in others] == [3, 3, 3]
            assert all("p1" in program.stderr for program in others)
        finally:
            federation.programs["p1"].kill()


def test_early_stopping_remembers_the_best_epoch(tmp_path: Path) -> None:
    """The best epoch lies before the crash, the end of the patience after it."""
    tables = cases.recipe(
        2,
        task={"kind": "binary"},
        model={"embedding_size": WIDTH},
        phase={
            "epochs": 12,
            "batch_size": BATCH,
            "optimizer": {"kind": "sgd", "lr": 4.0, "momentum": 0.5},
            "early_stopping": {"patience": 2},
        },
        rows={"validation": 0.3},
    )
    # 60 training rows, 30 for validation.
    data = cases.columns("sklearn:breast_cancer", 2, limit=100)
    epoch_bytes = 4 * WIDTH * 90
    with Federation(tmp_path / "undisturbed", tables, data) as federation:
        federation.start_all()
        federation.finish()
        undisturbed = parameters(federation)
        rounds = int(federation.checkpoint_labels(cases.ACTIVE)[-1].rpartition(".")[2])
        # The best is two epochs before, and it is not the last of all.
        assert 3 <= rounds < 12
    at = HANDSHAKE_BYTES + (rounds - 1) * epoch_bytes + 4 * WIDTH * BATCH // 2
    # Two rounds an epoch; patience counts validations.
    tables["phases"][0]["checkpoint_steps"] = 1
    label = f"{2 * (rounds - 1):06d}.splitnn.{2 * (rounds - 1)}"
    with held(tmp_path / "disturbed", tables, data, sent=at) as (federation, proxy):
        federation.wait_for_checkpoint(label)
        federation.programs["p1"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        federation.start_party("p1")
        federation.finish()
        started = [event["checkpoint"] for event in server_events(federation, "started")]
        assert started == ["", label]
        assert_equal(parameters(federation), undisturbed)

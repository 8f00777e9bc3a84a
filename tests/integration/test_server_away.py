"""The server goes and comes back while the parties train on: nobody goes back, and the run is one
generation.

With ``run.server_absent_s``. How a fault gets into a known step: see ``test_resume``.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness.errors import assert_names
from tests.harness.federation import RUN_S, Federation
from tests.harness.proxy import Proxy
from tests.harness.scrape import key, scrape
from tests.integration import test_resume as resume
from tests.integration.test_resume import (
    AFTER_FIRST,
    DATA,
    EPOCH_BYTES,
    HANDSHAKE_BYTES,
    PARTIES,
    SECOND_EPOCH,
    Parameters,
    assert_equal,
    held,
    parameters,
    server_events,
    undisturbed,
)

# A fixture.
__all__ = ["undisturbed"]
EPOCHS = 4


def recipe(**run: Any) -> dict[str, Any]:
    return resume.recipe(**{"server_absent_s": 60.0} | run)


def until(true: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + RUN_S
    while not true():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)


def lines(federation: Federation, name: str) -> list[dict[str, Any]]:
    """Of a party's metrics."""
    path = federation.run_folder / name / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def facts(federation: Federation, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((federation.run_folder / name / "run.json").read_text())
    return found


def heard(federation: Federation) -> dict[str, int]:
    """{party: bytes that the server has received from it}, as far as the server has saved it."""
    found = dict.fromkeys(PARTIES, 0)
    for line in federation.ledger("server"):
        if line.direction == "received":
            found[line.peer] += line.message_bytes
    return found


def events(federation: Federation, name: str, *which: str) -> list[str]:
    return [found["event"] for found in federation.programs[name].seen() if found["event"] in which]


def assert_one_generation(federation: Federation, undisturbed: Parameters) -> None:
    """Of a run that has ended well."""
    assert_equal(parameters(federation), undisturbed)
    for name in PARTIES:
        assert [(each["generation"], each["round"]) for each in lines(federation, name)] == [
            (1, round_ + 1) for round_ in range(EPOCHS)
        ]
        assert events(federation, name, "started", "interrupted") == ["started"]
        assert facts(federation, name)["finished"]
    assert facts(federation, "server")["generation"] == 1
    assert facts(federation, "server")["finished"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_is_away_and_the_parties_train_on(
    number: signal.Signals, tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        join = (federation.run_folder / "server" / "recipe.json").stat().st_size
        # So much a server that is killed leaves behind.
        until(lambda: min(heard(federation).values()) > join)
        server = federation.programs["server"]
        server.signal(number)
        assert server.wait(20.0) == {signal.SIGKILL: -9, signal.SIGTERM: 130}[number]
        for name in PARTIES:
            federation.programs[name].wait_for("server_away")
        # In the fourth epoch.
        at = proxy.sent + 2 * EPOCH_BYTES
        proxy.release()
        proxy.hold_at(sent=at)
        proxy.wait_until_held()
        # Without the server.
        federation.wait_for_checkpoint("000003.splitnn.3")
        federation.start_server(federation.address)
        for name in PARTIES:
            federation.programs[name].wait_for("server_back")
        proxy.release()
        summary = federation.finish()
        assert summary["interruptions"] == 0
        assert not server_events(federation, "interrupted")
        assert not server_events(federation, "started")
        assert_one_generation(federation, undisturbed)
        for name in PARTIES:
            assert heard(federation)[name] > 2 * join
            log = (federation.run_folder / name / "log.jsonl").read_text()
            assert '"level": "warning"' in next(
                line for line in log.splitlines() if "server_away" in line
            )
            assert "server_back" in log


def test_metrics_go_on_while_the_server_is_away(tmp_path: Path) -> None:
    with Proxy() as proxy, Federation(tmp_path, recipe(), DATA) as federation:
        federation.extra = {"p2": {"active": proxy.address}}
        proxy.hold_at(sent=SECOND_EPOCH)
        server = federation.start_server("127.0.0.1:0")
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        metrics = federation.start_party("p1", "--metrics", "0").wait_for("metrics")["address"]
        federation.start_party("p2")
        proxy.wait_until_held()
        until(lambda: "goes_on" in facts(federation, "server"))
        server.kill()
        federation.programs["p1"].wait_for("server_away")
        assert scrape(metrics)[key("vfl_run_state", state="running")] == 1.0
        federation.start_server(federation.address)
        federation.programs["p1"].wait_for("server_back")
        assert scrape(metrics)[key("vfl_run_state", state="running")] == 1.0
        proxy.release()
        assert federation.finish()["interruptions"] == 0


def test_the_parties_finish_while_the_server_is_away(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        # What it needs to take the parties back.
        until(lambda: "goes_on" in facts(federation, "server"))
        federation.programs["server"].kill()
        proxy.release()
        until(lambda: all(facts(federation, name).get("trained") for name in PARTIES))
        assert all(federation.programs[name].process.poll() is None for name in PARTIES)
        federation.start_server(federation.address)
        assert federation.finish()["interruptions"] == 0
        assert_one_generation(federation, undisturbed)


def test_a_party_dies_with_the_server(tmp_path: Path, undisturbed: Parameters) -> None:
    with held(tmp_path, recipe(), sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["server"].kill()
        federation.programs["p1"].kill()
        proxy.release()
        federation.start_party("p1")
        federation.start_server(federation.address)
        assert federation.finish()["interruptions"] == 1
        (started,) = server_events(federation, "started")
        assert (started["generation"], started["checkpoint"]) == (2, AFTER_FIRST)
        assert_equal(parameters(federation), undisturbed)


def test_a_party_that_does_not_come_back_with_the_server_is_waited_for(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    tables = recipe(heartbeat_s=0.2, lost_after_s=3.0)
    with held(tmp_path, tables, sent=SECOND_EPOCH) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["server"].kill()
        federation.programs["p1"].kill()
        proxy.release()
        server = federation.start_server(federation.address)
        reason = server.wait_for("interrupted")["reason"]
        assert "p1" in reason
        assert_names(reason, "p1")
        server.wait_for("waiting", missing=["p1"])
        federation.start_party("p1")
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), undisturbed)


def test_the_server_stays_away_for_longer(tmp_path: Path, undisturbed: Parameters) -> None:
    with held(
        tmp_path, recipe(server_absent_s=1.0, rejoin_deadline_s=300.0), sent=SECOND_EPOCH
    ) as (federation, proxy):
        federation.wait_for_checkpoint(AFTER_FIRST)
        federation.programs["server"].kill()
        # Whoever notices first ends the generation of those with whom it exchanges.
        for name in PARTIES:
            federation.programs[name].wait_for("interrupted")
            waiting = federation.programs[name].wait_for("waiting", missing=["server"])
            # Which is --wait.
            assert waiting["left_s"] > 60.0
        proxy.release()
        federation.start_server(federation.address)
        assert federation.finish()["interruptions"] == 1
        (started,) = server_events(federation, "started")
        assert (started["generation"], started["checkpoint"]) == (2, AFTER_FIRST)
        assert_equal(parameters(federation), undisturbed)


def test_a_party_loses_its_connection_to_the_server(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    with Proxy() as proxy, Proxy() as between, Federation(tmp_path, recipe(), DATA) as federation:
        server = federation.start_server()
        between.target = federation.address
        federation.extra = {"p1": {"server": between.address}, "p2": {"active": proxy.address}}
        proxy.hold_at(sent=HANDSHAKE_BYTES + EPOCH_BYTES)
        proxy.target = federation.start_party("p0").wait_for("ready")["address"]
        for name in ("p1", "p2"):
            federation.start_party(name)
        proxy.wait_until_held()
        until(lambda: "goes_on" in facts(federation, "server"))
        between.cut()
        assert server.wait_for("lost")["party"] == "p1"
        assert server.wait_for("back")["party"] == "p1"
        federation.programs["p1"].wait_for("server_back")
        proxy.release()
        assert federation.finish()["interruptions"] == 0
        assert not server_events(federation, "interrupted")
        assert_one_generation(federation, undisturbed)

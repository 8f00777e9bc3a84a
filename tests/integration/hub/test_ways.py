"""The ways between members, and the keys and members of a standing federation over the years."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from cryptography import x509

from tests.harness.errors import raises
from tests.harness.federation import RUN_S, Program
from tests.harness.postgres import postgres, programs
from tests.harness.standing import BIN, HUB, MEMBERS, Standing, make_recipe, simulate
from tests.harness.waiting import wait_until
from tests.integration.hub.test_standing import assert_equal_metrics
from vfl_common.errors import Code, PeerError
from vfl_common.identity import pem
from vfl_hub import documents
from vfl_hub.streams import Client


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    with closing(Standing(tmp_path)) as federation:
        yield federation


def list_children(node: Program) -> list[psutil.Process]:
    """Returns the programs of runs that a node has started."""
    processes = psutil.Process(node.pid).children(recursive=True)
    return [one for one in processes if "run" in one.cmdline()]


def list_remote_ports(node: Program) -> set[int]:
    connections = psutil.Process(node.pid).net_connections("tcp")
    return {connection.raddr.port for connection in connections if connection.raddr}


@pytest.mark.parametrize("reachable", [True, False])
def test_members_use_a_direct_way_and_otherwise_the_hub(
    standing: Standing, reachable: bool
) -> None:
    advertised = {} if reachable else {"advertise": "127.0.0.1:1"}
    standing.write_node("bank", direct={"listen": "127.0.0.1:0", **advertised})
    standing.write_node("shop", direct={"dial": ["bank"]})
    standing.start()
    recipe = make_recipe(epochs=40)
    number = standing.submit(recipe)
    standing.wait(number, lambda row: row["last"].get("event") == "progress")
    entry = standing.ask("bank", f"/v1/proposals/{number}")
    assert entry["state"] == "running"
    remote = list_remote_ports(standing.nodes["shop"])
    own = {
        connection.laddr.port
        for connection in psutil.Process(standing.nodes["bank"].pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert bool(remote & own) == reachable
    standing.wait_for_state(number, "done")
    assert_equal_metrics(standing.read_summary(number), simulate(recipe))
    text = (standing.folder / "shop" / "node" / "log.jsonl").read_text()
    assert ("The hub is used instead" in text) == (not reachable)


def test_programs_run_behind_the_command_of_a_scheduler(standing: Standing) -> None:
    launch = {"command": ["env", "LAUNCHED=1"], "host": "127.0.0.1"}
    for name in MEMBERS:
        standing.write_node(name, launch=launch)
    standing.start()
    recipe = make_recipe(epochs=40)
    number = standing.submit(recipe)
    standing.wait(number, lambda row: row["last"].get("event") == "progress")
    for node in standing.nodes.values():
        (party,) = list_children(node)
        assert party.environ()["LAUNCHED"] == "1"
    standing.wait_for_state(number, "done")
    assert_equal_metrics(standing.read_summary(number), simulate(recipe))


def test_the_second_run_is_forked_from_a_warm_process(standing: Standing) -> None:
    standing.write_node("shop", limits={"warm_minutes": 0})
    standing.start()
    recipe = make_recipe(epochs=40)
    for _ in range(2):
        number = standing.submit(recipe)
        standing.wait(number, lambda row: row["last"].get("event") == "progress")
        warm = [
            any("vfl.launcher.forks" in one.cmdline() for one in children)
            for children in (
                psutil.Process(standing.nodes[name].pid).children() for name in MEMBERS
            )
        ]
        assert warm == [True, False]
        standing.wait_for_state(number, "done")
        assert_equal_metrics(standing.read_summary(number), simulate(recipe))


def check_way(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [str(BIN / "vfl-party"), "node", "bank/node.toml", "--check"]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_way_to_the_hub_is_measured(standing: Standing) -> None:
    absent = check_way(standing.folder)
    assert absent.returncode == 3
    assert "does not answer" in absent.stderr
    standing.start_hub()
    for plain in (True, False):
        standing.write_node("bank", plain_tunnels=plain)
        present = check_way(standing.folder)
        assert not present.returncode, present.stderr
        assert "the hub knows bank" in present.stdout
        assert "MB/s" in present.stdout


def read_certificate(path: Path) -> x509.Certificate:
    return pem.parse_certificates(pem.read(path), path)[0]


def test_certificates_are_renewed_before_they_end(tmp_path: Path) -> None:
    with closing(Standing(tmp_path, age_days=350)) as federation:
        paths = [federation.certs / f"{HUB}.pem"]
        paths += [tmp_path / name / "certs" / f"{name}.pem" for name in MEMBERS]
        before = [read_certificate(path) for path in paths]
        federation.start()
        in_a_year = datetime.now(UTC) + timedelta(days=300)
        for path, old in zip(paths, before, strict=True):
            new = wait_until(
                partial(read_certificate, path),
                lambda one: one.not_valid_after_utc > in_a_year,
                RUN_S,
            )
            assert in_a_year > old.not_valid_after_utc
            assert pem.compute_pin(new) == pem.compute_pin(old)
        host, _, port = federation.address.partition(":")
        wait_until(
            lambda: (
                x509.load_pem_x509_certificate(
                    ssl.get_server_certificate((host, int(port))).encode()
                ).not_valid_after_utc
                > in_a_year
            )
        )
        number = federation.submit(make_recipe(epochs=1))
        federation.wait_for_state(number, "done")


def test_nobody_renews_the_certificate_of_another(standing: Standing) -> None:
    from tests.integration.hub.test_hostile import load, open_session
    from vfl_hub.joining import make_request

    standing.start_hub()
    bank, shop = (load(standing.folder / name, name) for name in MEMBERS)
    client, proof = open_session(standing, bank)
    with closing(client):
        token = client.ask("/v1/session", proof)["token"]
        for request in (make_request(shop).decode(), "nonsense"):
            with raises(PeerError, Code.REFUSED, names="request"):
                client.ask("/v1/renew", {"request": request}, token=token)
        with raises(PeerError, Code.REFUSED, names="session"):
            client.ask("/v1/renew", {"request": make_request(bank).decode()})


def test_another_version_is_refused_in_one_sentence(standing: Standing) -> None:
    from tests.integration.hub.test_hostile import load, open_session

    standing.start_hub()
    bank = load(standing.folder / "bank", "bank")
    client, proof = open_session(standing, bank, version="9.1.0")
    with closing(client), raises(PeerError, Code.REFUSED, names="9.1.0"):
        client.ask("/v1/session", proof)
    settings_client = Client(client._address)
    asked = {"secret": "x", "request": "y", "version": "9.1.0"}
    with closing(settings_client), raises(PeerError, Code.REFUSED, names="token"):
        settings_client.ask("/v1/join", asked)


@pytest.mark.parametrize(
    ("hub", "node", "works"),
    [
        ("0.3.0", "0.2.9", True),
        ("0.3.0", "0.4.0", True),
        ("0.3.0", "0.1.0", False),
        ("1.0.0", "2.0.0", False),
        ("0.3.0", "", True),
        ("0.3.0", "0.3.1.dev0+x", True),
    ],
)
def test_versions_may_differ_by_a_minor_one(hub: str, node: str, works: bool) -> None:
    assert (documents.find_version_problem(hub, node) == "") == works


def remove(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    words = [str(BIN / "vfl-server"), "remove", name]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=60)


def test_a_removed_member_and_its_runs_end(standing: Standing) -> None:
    standing.start()
    number = standing.submit(make_recipe(epochs=10_000))
    standing.wait(number, lambda row: row["last"].get("event") == "progress")
    assert not remove(standing.folder, "shop").returncode
    assert standing.wait_for_state(number, "stopped")["reason"] == "shop is not a member any more"
    standing.nodes["shop"].wait_for("disconnected")
    assert remove(standing.folder, "shop").returncode == 2
    with raises(PeerError, Code.REFUSED, names="collaboration"):
        standing.submit(make_recipe(epochs=1))


@pytest.mark.skipif(programs() is None, reason="no PostgreSQL server is installed")
def test_a_hub_keeps_its_state_in_postgresql(tmp_path: Path) -> None:
    with postgres() as server:
        url = server.url().replace("postgresql://", "postgresql+psycopg://")
        with closing(Standing(tmp_path, database=url)) as federation:
            federation.start()
            recipe: dict[str, Any] = make_recipe(epochs=30, run={"rejoin_deadline_s": 60.0})
            number = federation.submit(recipe)
            federation.wait(number, lambda row: row["last"].get("event") == "progress")
            assert federation.hub is not None
            federation.hub.kill()
            federation.hub.close()
            federation.start_hub()
            federation.wait_for_state(number, "done")
            assert_equal_metrics(federation.read_summary(number), simulate(recipe))
            assert server.run("select state from proposals") == "done"
            assert not (tmp_path / "hub" / "hub.sqlite").exists()

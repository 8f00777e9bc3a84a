"""A standing federation of real programs: runs are proposed, approved, queued and trained."""

from __future__ import annotations

import base64
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import vfl
from tests.harness.errors import raises
from tests.harness.federation import toml
from tests.harness.standing import BIN, HUB, MEMBERS, Standing, make_recipe, simulate
from vfl_common.errors import Code, PeerError
from vfl_hub.library import NodeClient
from vfl_hub.streams import join_streams, read_head


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[Standing]:
    federation = Standing(tmp_path)
    yield federation
    federation.close()


def assert_equal_metrics(summary: dict[str, Any], run: vfl.Run) -> None:
    assert set(summary["metrics"]) == set(run.metrics)
    for split, metrics in run.metrics.items():
        assert summary["metrics"][split] == pytest.approx(metrics, rel=0.0, abs=0.0)


def call(folder: Path, *args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    words = [str(BIN / args[0]), *args[1:]]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, **more)


def test_members_join_propose_approve_and_train(tmp_path: Path) -> None:
    federation = Standing(tmp_path, joined=False)
    try:
        federation.start_hub()
        for name in MEMBERS:
            invited = call(tmp_path, "vfl-server", "invite", name, "--url", federation.url)
            assert not invited.returncode, invited.stderr
            joining = federation.run(
                f"join-{name}", "vfl-party", "join", invited.stdout.strip(), "--folder", name
            )
            said = joining.wait_for("text")
            pin = said["text"].rpartition(" ")[2].strip()
            wrong = call(tmp_path, "vfl-server", "admit", name, "--pin", pin[:-1] + "x")
            assert wrong.returncode == 2
            admitted = call(tmp_path, "vfl-server", "admit", name, "--pin", pin)
            assert admitted.stdout == f"{name} is a member\n"
            assert joining.wait() == 0
            joining.close()
            # The token holds for one key only.
            again = call(
                tmp_path, "vfl-party", "join", invited.stdout.strip(), "--folder", f"x-{name}"
            )
            assert again.returncode == 2
            assert "another key" in again.stderr
            federation.write_node(name, approval="each")
        for name in MEMBERS:
            federation.start_node(name)
            federation.nodes[name].wait_for("connected")
        (tmp_path / "recipe.toml").write_text(toml(make_recipe()))
        submit = federation.run(
            "submit",
            *("vfl", "submit", "recipe.toml", "--data", "bank=main", "--data", "shop=main"),
            *("--wait", "--node", "bank/node"),
        )
        number = submit.wait_for("text")["text"].strip()
        for name in MEMBERS:
            federation.wait_for_state(number, "open", at=name)
            approved = call(
                tmp_path, "vfl", "approve", number[:10], "--yes", "--node", f"{name}/node"
            )
            assert not approved.returncode, approved.stderr
        assert submit.wait() == 0, submit.stderr
        submit.close()
        assert_equal_metrics(federation.read_summary(number), simulate(make_recipe()))
        listed = call(tmp_path, "vfl", "proposals", "--node", "shop/node").stdout
        assert f"{number[:12]}" in listed
        assert "done" in listed
        assert "epoch" not in call(tmp_path, "vfl", "queue", "--node", "shop/node").stdout
        members = call(tmp_path, "vfl", "members", "--node", "shop/node").stdout
        assert members.count("connected") == len(MEMBERS)
        assert "ANOTHER KEY" not in members
        assert number[:16] in call(tmp_path, "vfl", "logs", number, "--node", "bank/node").stdout
    finally:
        federation.close()


def test_a_run_needs_all_approvals_and_ends_once(standing: Standing) -> None:
    standing.write_node("shop", approval="each")
    standing.start()
    denied, stopped, expired = (standing.submit(make_recipe(f"r{n}")) for n in range(3))
    for number in (denied, stopped, expired):
        row = standing.wait(number, lambda row: "bank" in row["votes"], at="shop")
        assert row["state"] == "open"
    vfl.Hub(standing.folder / "shop" / "node").deny(denied[:12], "no")
    standing.ask("bank", f"/v1/proposals/{stopped}/stop", {})
    assert standing.wait_for_state(denied, "denied")["reason"] == "denied by shop: no"
    assert standing.wait_for_state(stopped, "stopped")["reason"] == "stopped by bank"
    # An approval after the end is refused.
    with raises(PeerError, Code.REFUSED, names="ended"):
        standing.ask("shop", f"/v1/proposals/{denied}/approve", {})
    assert standing.row(denied)["state"] == "denied"
    assert standing.row(expired)["state"] == "open"
    assert not [*(standing.folder / "hub").glob("runs/*")]


def test_a_running_run_is_stopped_at_all_parties(standing: Standing) -> None:
    standing.start()
    number = standing.submit(make_recipe(epochs=10_000))
    standing.wait(number, lambda row: row["last"].get("event") == "progress")
    client = vfl.Hub(standing.folder / "shop" / "node")
    client.stop(number, "enough")
    assert client.wait(number)["state"] == "stopped"
    for name in MEMBERS:
        standing.wait(number, lambda row: row["own"] in ("stopped", "failed"), at=name)
    # The slots are free again.
    again = standing.submit(make_recipe(epochs=1))
    standing.wait_for_state(again, "done")


def test_a_failure_at_a_party_fails_the_run_with_its_reason(standing: Standing) -> None:
    (standing.folder / "shop.csv").unlink()
    standing.start()
    number = standing.submit(make_recipe())
    row = standing.wait_for_state(number, "failed")
    assert "shop" in row["reason"]
    # The paths of a member are for its own people.
    assert "shop.csv" not in row["reason"]
    own = standing.wait(number, lambda row: row["own"] == "failed" or row["reason"] != "", "shop")
    assert "shop.csv" in own["reason"]


@pytest.mark.parametrize("victim", [HUB, "bank", "all"])
def test_a_killed_program_goes_on_and_the_run_is_the_same(standing: Standing, victim: str) -> None:
    standing.start()
    recipe = make_recipe(epochs=30, run={"rejoin_deadline_s": 60.0})
    number = standing.submit(recipe)
    standing.wait(number, lambda row: row["last"].get("event") == "progress")
    # A person waits at the node meanwhile.
    waiting = ThreadPoolExecutor().submit(
        NodeClient(standing.folder / "bank" / "node").wait, number
    )
    victims = [*standing.nodes, HUB] if victim == "all" else [victim]
    for name in victims:
        program = standing.hub if name == HUB else standing.nodes[name]
        assert program is not None
        program.kill()
        program.close()
    for name in victims:
        if name == HUB:
            standing.start_hub()
        else:
            standing.start_node(name)
    assert standing.wait_for_state(number, "done", "failed", "stopped")["state"] == "done"
    assert waiting.result(30)["state"] == "done"
    assert_equal_metrics(standing.read_summary(number), simulate(recipe))


def test_alignments_a_day_are_counted_over_all_runs_of_a_node(standing: Standing) -> None:
    standing.write_node("shop", party={"alignments_a_day": 1})
    standing.start()
    recipe = make_recipe(epochs=1, rows={"align": "psi"})
    standing.wait_for_state(standing.submit(recipe), "done")
    number = standing.submit(make_recipe("again", epochs=1, rows={"align": "psi"}))
    standing.wait_for_state(number, "failed")
    log = standing.ask("shop", f"/v1/proposals/{number}/log")["log"]
    assert "alignments_a_day" in log


def list_open_ports(pid: int) -> set[str]:
    """Returns the addresses at which a process and its children listen."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for process in processes
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


class ConnectProxy:
    """An HTTP proxy that wants a user and a password, and counts its connections."""

    def __init__(self) -> None:
        self.count, self.refused = 0, 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://us%40er:pa%3Ass@127.0.0.1:{self._socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        head = read_head(sock).decode()
        user = base64.b64encode(b"us@er:pa:ss").decode()
        if f"Proxy-Authorization: Basic {user}\r\n" not in head:
            self.refused += 1
            sock.close()
            return
        host, _, port = head.split(" ")[1].partition(":")
        self.count += 1
        sock.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        join_streams(sock, socket.create_connection((host, int(port))))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.mark.parametrize("gateway", [False, True])
def test_nodes_listen_at_this_machine_only_and_dial_through_a_proxy(
    standing: Standing, gateway: bool
) -> None:
    proxy = ConnectProxy()
    standing.write_node("bank", proxy=proxy.url, plain_tunnels=not gateway)
    standing.write_node("shop", plain_tunnels=not gateway)
    try:
        standing.start()
        number = standing.submit(make_recipe(epochs=40))
        standing.wait(number, lambda row: row["last"].get("event") == "progress")
        for node in standing.nodes.values():
            assert list_open_ports(node.pid) == {"127.0.0.1"}
        assert proxy.count >= 3
        assert not proxy.refused
        standing.wait_for_state(number, "done")
    finally:
        proxy.close()
    assert_equal_metrics(standing.read_summary(number), simulate(make_recipe(epochs=40)))

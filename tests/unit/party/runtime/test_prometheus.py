"""Metrics for Prometheus: what is told is what was counted, and a caller cannot harm the
program.
"""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.scrape import key, samples, scrape
from vfl_common import prometheus
from vfl_common.bundle import PROTOCOL, Ledger, TcpCount
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.process.logs import Console
from vfl_common.prometheus import Families, listen_address, serve_metrics, traffic_counters
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.messages import STATES, Start
from vfl_party.base.phase import RoundReport
from vfl_party.base.step_timing import BOUNDS_S, Steps
from vfl_party.runtime.progress import Progress
from vfl_party.runtime.prometheus import PartyMetrics, make_buckets
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.run import RunHooks, RunState, ServedRun
from vfl_server.prometheus import ServerMetrics

# -- the port


@pytest.mark.parametrize(
    ("text", "address"),
    [("0", "127.0.0.1:0"), (":0", "127.0.0.1:0"), ("localhost:0", "localhost:0")],
)
def test_a_port_alone_is_for_this_machine(text: str, address: str) -> None:
    assert listen_address(text) == address


@pytest.mark.parametrize(
    "text", ["nonsense", "127.0.0.1:99999", "127.0.0.1:http", ":-1", "no.such.host.invalid:0"]
)
def test_what_is_no_address_is_told_so(text: str) -> None:
    with raises(InputError, Code.ADDRESS_INVALID, names="--metrics") as raised:
        listen_address(text)
    assert raised.value.exit_code == 2


def test_a_port_that_is_taken_is_told_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with raises(InputError, Code.ADDRESS_IN_USE, names=("--metrics", "127.0.0.1")):
            listen_address(address)
        with (
            raises(InputError, Code.ADDRESS_IN_USE, names=("--metrics", "127.0.0.1")),
            serve_metrics(address, list, lambda: "waiting"),
        ):
            pass


def ledger() -> Ledger:
    found = Ledger()
    found.add("p1", "splitnn", "embedding", "received", 4096, 4200)
    found.add("p1", "splitnn", "embedding", "received", 4096, 4201)
    found.add('p"2\\\n}', "splitnn", "gradient", "sent", 1, 2**53 - 1)
    return found


@contextmanager
def served(families: Families, state: str = "running") -> Iterator[str]:
    with serve_metrics("127.0.0.1:0", families, lambda: state) as port:
        yield port.address


def answer(address: str, path: str) -> tuple[int, str]:
    """(status, text)."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.parametrize("state", STATES)
def test_a_program_is_healthy_unless_its_run_has_failed(state: str) -> None:
    with served(list, state) as address:
        status = 503 if state == "failed" else 200
        assert answer(address, "/healthz") == (status, f"{state}\n")
        assert answer(address, "/healthz?verbose=1")[0] == status


def test_there_are_two_pages() -> None:
    with served(lambda: traffic_counters(ledger(), [])) as address:
        assert answer(address, "/elsewhere")[0] == 404
        assert answer(address, "/healthz/")[0] == 404
        for path in ("/", "/metrics", "/metrics?of=all"):
            status, text = answer(address, path)
            assert (status, "vfl_messages_total{" in text) == (200, True)


def test_the_ledger_as_prometheus_reads_it() -> None:
    with served(lambda: traffic_counters(ledger(), [TcpCount("p1", 10, 20)])) as address:
        found = scrape(address)
    came = {"peer": "p1", "phase": "splitnn", "kind": "embedding", "direction": "received"}
    assert found[key("vfl_payload_bytes_total", **came)] == 8192
    assert found[key("vfl_message_bytes_total", **came)] == 8401
    assert found[key("vfl_messages_total", **came)] == 2
    odd = {"peer": 'p"2\\\n}', "phase": "splitnn", "kind": "gradient", "direction": "sent"}
    assert found[key("vfl_message_bytes_total", **odd)] == 2**53 - 1
    assert found[key("vfl_tcp_bytes_total", peer="p1", direction="sent")] == 10
    assert key("process_resident_memory_bytes") in found
    # Refused: the port is closed at the end.
    with pytest.raises(OSError):
        scrape(address)


def test_silent_callers_cost_one_thread_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_S", 0.2)
    before = set(threading.enumerate())
    with served(lambda: traffic_counters(ledger(), [])) as address:
        host, _, port = address.partition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(4)]
        # Once each of them has had its time.
        assert scrape(address)
        assert {thread.name for thread in set(threading.enumerate()) - before} == {"metrics"}
    monkeypatch.setattr(prometheus, "REQUEST_S", 60.0)
    with served(list) as address:
        silent.append(socket.create_connection((host, int(address.rpartition(":")[2]))))
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5.0
    for each in silent:
        each.close()


def hung_up(caller: socket.socket) -> bool:
    """Whether the other end does so while a header line goes to it every 0.1 s; 20 s are given."""
    give_up_s = time.monotonic() + 20.0
    while time.monotonic() < give_up_s:
        try:
            caller.sendall(b"X-Line: 1\r\n")
            if not caller.recv(1024):
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


def test_a_caller_that_never_ends_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_S", 0.5)
    with served(list) as address:
        host, _, port = address.partition(":")
        with socket.create_connection((host, int(port))) as slow:
            slow.settimeout(0.1)
            slow.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert hung_up(slow)
        assert scrape(address) is not None


# -- a party


def test_steps_are_timed_from_one_to_the_next_and_a_round_from_its_beginning() -> None:
    steps = Steps()
    steps.begin(10.0)
    steps.tick(10.0009765625)
    steps.tick(10.25)
    steps.end(2)
    # What lies between is evaluation.
    steps.begin(50.0)
    steps.tick(50.5)
    steps.tick(150.5)
    buckets, seconds = make_buckets(steps)
    assert steps.made == 4
    assert seconds == 0.25 + 100.5
    assert dict(buckets) == {
        str(bound): sum(t <= bound for t in (0.0009765625, 0.2490234375, 0.5)) for bound in BOUNDS_S
    } | {"+Inf": 4}


def test_a_round_that_tells_its_epochs_alone_counts_its_steps_at_its_end() -> None:
    steps = Steps()
    steps.begin(0.0)
    steps.tick(1.0)
    steps.end(40)
    steps.begin(2.0)
    steps.tick(3.0)
    # After an interruption: a step that was made was made.
    steps.begin(4.0)
    assert steps.made == 41


class Quiet:
    """A session that is told nothing."""

    def progress(self, _progress: object) -> None:
        return


def party(folder: Path) -> tuple[Progress, PartyMetrics]:
    counted = ledger()
    progress = Progress(Console("test", json_lines=True), Quiet(), counted, True)  # type: ignore[arg-type]
    progress.begin(folder / "metrics.jsonl", Start("run", 3, "", ""))
    info = {"party": "p0", "role": "active", "recipe": "case", "device": "cpu"}
    waits = PartyMetrics(
        info,
        progress.standing,
        counted,
        TcpMeter(),
        lambda: "running",
        dict,
        ["p1", "p2"],
        lambda: ["p2"],
    )
    return progress, waits


def test_a_party_tells_its_round_loss_steps_and_whom_it_waits_for(tmp_path: Path) -> None:
    progress, metrics = party(tmp_path)
    progress.begin_round("splitnn", 1, 5)
    for batch in range(3):
        progress.tick("splitnn", 1, 5, batch + 1, 3)
    found = samples(metrics.families())
    assert found[key("vfl_round", phase="splitnn")] == 1
    assert found[key("vfl_rounds", phase="splitnn")] == 5
    assert found[key("vfl_steps_total", phase="splitnn")] == 3
    assert found[key("vfl_step_seconds_count", phase="splitnn")] == 3
    assert not [name for name, _ in found if name == "vfl_loss"]
    told = {"train": {"loss": 0.5}, "validation": {"loss": float("inf"), "auc": 0.9}}
    progress.observe("splitnn", 2, 5, 6, RoundReport(3, told, without=("p2",)))
    found = samples(metrics.families())
    assert found[key("vfl_round", phase="splitnn")] == 2
    assert found[key("vfl_run_steps")] == 6
    assert found[key("vfl_loss", phase="splitnn", split="train")] == 0.5
    assert found[key("vfl_loss", phase="splitnn", split="validation")] == float("inf")
    assert found[key("vfl_metric", phase="splitnn", split="validation", metric="auc")] == 0.9
    assert found[key("vfl_generation")] == 3
    assert found[key("vfl_late_parties")] == 1
    assert {peer: found[key("vfl_awaited", peer=peer)] for peer in ("p1", "p2")} == {
        "p1": 0,
        "p2": 1,
    }
    assert {each: found[key("vfl_run_state", state=each)] for each in STATES} == {
        each: each == "running" for each in STATES
    }
    assert abs(found[key("vfl_last_step_timestamp_seconds")] - time.time()) < 60


def test_names_are_as_prometheus_wants_them(tmp_path: Path) -> None:
    progress, metrics = party(tmp_path)
    progress.begin_round("splitnn", 0, 1)
    families: list[Metric] = list(metrics.families())
    assert all(
        family.documentation.endswith(".") or family.documentation.endswith(")")
        for family in families
    )
    assert all(
        family.name.startswith("vfl_") and not family.name.endswith("_total") for family in families
    )
    counters = [
        sample.name for family in families if family.type == "counter" for sample in family.samples
    ]
    assert counters
    assert all(name.endswith("_total") for name in counters)


# -- the server


def joined(recipe: Recipe, name: str) -> control_pb2.PartyMessage:
    place = recipe.party(name)
    assert place is not None
    join = control_pb2.Join(
        role=place.role,
        protocol=PROTOCOL,
        recipe_json=recipe.canonical_json(),
        job="train",
        pid=1,
        device="cpu",
    )
    return control_pb2.PartyMessage(join=join)


def test_the_server_tells_who_is_there_and_how_far_the_run_is() -> None:
    recipe = Recipe.model_validate(cases.recipe(3))
    hooks = RunHooks(lambda *_, **__: None, on_start=lambda *_: None, on_plan=lambda *_: None)
    coordinator = Coordinator(ServedRun(recipe, "train", "run"), hooks)
    server = ServerMetrics(
        coordinator, Ledger(), TcpMeter(), list, lambda: {"NOT_IN_RECIPE": 2}, dict
    )

    def places() -> dict[str, float]:
        found = samples(server.families())
        return {
            each: found[key("vfl_parties", status=each)] for each in ("joined", "left", "missing")
        }

    assert places() == {"joined": 0, "left": 0, "missing": 3}
    members = {name: coordinator.open(name) for name in ("p0", "p1", "p2")}
    for name, member in members.items():
        coordinator.handle(member, joined(recipe, name))
    progress = control_pb2.Progress(
        phase="splitnn\n", round=2, rounds=3, steps=8, metrics={"train loss": 0.5}
    )
    coordinator.handle(members["p0"], control_pb2.PartyMessage(progress=progress))
    within = control_pb2.Progress(
        phase="splitnn", round=2, rounds=3, batch=1, batches=4, metrics={"train loss": 0.4}
    )
    coordinator.handle(members["p0"], control_pb2.PartyMessage(progress=within))
    found = samples(server.families())
    assert places() == {"joined": 3, "left": 0, "missing": 0}
    assert {each.value: found[key("vfl_run_state", state=each.value)] for each in RunState} == {
        each.value: each is RunState.RUNNING for each in RunState
    }
    assert (
        found[
            key("vfl_server_info", run_id="run", recipe="case", job="train", version=version("vfl"))
        ]
        == 1
    )
    assert found[key("vfl_generation")] == 1
    assert found[key("vfl_interruptions_total")] == 0
    # Each code has a series from the beginning.
    assert {code: found[key("vfl_refusals_total", code=code.name)] for code in Code} == {
        code: 2 * (code is Code.NOT_IN_RECIPE) for code in Code
    }
    assert found[key("vfl_round", phase="splitnn")] == 2
    assert found[key("vfl_run_steps")] == 8
    assert found[key("vfl_party_metric", party="p0", phase="splitnn", metric="train loss")] == 0.4
    assert 0 <= found[key("vfl_party_silent_seconds", party="p2")] < 60

    coordinator.end_session(members["p1"])
    found = samples(server.families())
    # The others have not come back yet.
    assert places() == {"joined": 0, "left": 0, "missing": 3}
    assert (found[key("vfl_generation")], found[key("vfl_interruptions_total")]) == (1, 1)
    assert key("vfl_party_silent_seconds", party="p1") not in found
    coordinator.handle(members["p0"], joined(recipe, "p0"))
    found = samples(server.families())
    assert found[key("vfl_run_state", state="waiting")] == 1
    assert {name: found[key("vfl_party_joined", party=name)] for name in members} == {
        "p0": 1,
        "p1": 0,
        "p2": 0,
    }

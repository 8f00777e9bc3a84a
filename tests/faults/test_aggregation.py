"""Aggregation by the real server: what hostile parties try, what a lost one costs, what a whole run
comes to.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract.exchanges import WAIT_S, soon
from tests.harness import cases
from tests.harness.averaging import drift
from tests.harness.errors import assert_names, error_line
from tests.harness.federation import Federation, Program
from tests.harness.hostile import AggregatingMember, aggregation
from tests.harness.plugins import environment, metadata
from tests.harness.waiting import wait_until
from vfl.certs.authority import issue
from vfl_common.bundle import CONTROL
from vfl_common.errors import AbortedError, Code, InterruptedRun, LostError, PeerError, VflError
from vfl_common.rpc.messages import Start
from vfl_common.stages import AggregationPlan
from vfl_common.summary import Summary

FIRST = aggregation("first", 3, weight=(3, 4), bias=(3,))
OTHER = aggregation("first", 3, weight=(2, 4), bias=(3,))


def recipe(parties: int, *phases: dict[str, Any]) -> dict[str, Any]:
    """As for split training, with phases of the tests' own method."""
    plan = [{"kind": "averaging", "name": "first"} | phase for phase in phases or ({},)]
    return cases.recipe(parties) | {"phases": plan}


class Members:
    """A real server, and parties of the test's own in this process."""

    def __init__(self, federation: Federation, stack: ExitStack) -> None:
        self.federation, self._stack = federation, stack
        self.server = federation.start_server()
        self.of: dict[str, AggregatingMember] = {}

    def join(self, name: str, *declared: AggregationPlan, **offer: Any) -> Future[Start]:
        """In a thread of its own."""
        if name not in self.of:
            self.of[name] = self._stack.enter_context(AggregatingMember(self.federation, name))
        member = self.of[name]
        return soon(lambda: member.join(*declared, **offer))

    def join_all(self, *declared: AggregationPlan, **offer: Any) -> dict[str, Start]:
        asked = {name: self.join(name, *declared, **offer) for name in self.federation.names}
        return {name: future.result(WAIT_S) for name, future in asked.items()}

    def swap(self, name: str, round_: int, values: dict[str, Tensor]) -> Future[dict[str, Tensor]]:
        return soon(lambda: self.of[name].swap(FIRST, round_, values))


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with ExitStack() as stack:
        federation = stack.enter_context(Federation(tmp_path / "f", recipe(2), cases.digits(2)))
        found = Members(federation, stack)
        yield found
        # First: a party waits for the server's end of its session.
        found.server.stop()


def weights(value: float) -> dict[str, Tensor]:
    return {"weight": torch.full((3, 4), value), "bias": torch.full((3,), -value)}


def failure_of(future: Future[Any]) -> VflError:
    with pytest.raises(VflError) as caught:
        future.result(WAIT_S)
    return caught.value


# -- what parties declare


def test_parties_that_would_aggregate_different_weights_are_told_which(members: Members) -> None:
    for future in (members.join("p0", FIRST), members.join("p1", OTHER)):
        future.result(WAIT_S)
    for member in members.of.values():
        error = member.ended()
        assert isinstance(error, PeerError)
        assert (error.code, error.exit_code) == (Code.MODELS_DIFFER, 2)
        assert all(word in str(error) for word in ("'weight'", "[3, 4] at p0", "[2, 4] at p1"))
    assert members.server.wait(20) == 2
    error_line(members.server.stderr)


def test_a_party_that_declares_too_much_is_refused_and_the_others_go_on(members: Members) -> None:
    first = members.join("p0", FIRST)
    members.join("p1", aggregation("first", 3, weight=(1 << 20, 1 << 20))).result(WAIT_S)
    assert first.result(WAIT_S).generation == 1
    error = members.of["p1"].ended()
    assert isinstance(error, PeerError)
    assert error.code is Code.TENSOR_TOO_LARGE
    assert "p1" in str(error)
    assert_names(str(error), "p1")
    members.of.pop("p1").session.close()
    assert isinstance(members.of["p0"].ended(), InterruptedRun)
    assert {start.generation for start in members.join_all(FIRST).values()} == {2}


@pytest.mark.parametrize(
    "declared",
    [[aggregation("elsewhere", 1, w=(1,))], [FIRST, FIRST], [aggregation("first", 0, w=(1,))]],
    ids=["phase", "twice", "rounds"],
)
def test_a_declaration_that_makes_no_sense_is_refused(
    declared: list[AggregationPlan], members: Members
) -> None:
    members.join_all(*declared)
    codes = {name: member.ended() for name, member in members.of.items()}
    refused = [error for error in codes.values() if not isinstance(error, InterruptedRun)]
    assert {error.code for error in refused} == {Code.MALFORMED_MESSAGE}


# -- what they send


@pytest.mark.parametrize(
    ("values", "code", "names"),
    [
        (
            {"weight": torch.zeros(4, 3), "bias": torch.zeros(3)},
            Code.TENSOR_MISMATCH,
            ("'weight'", "[4, 3]", "[3, 4]"),
        ),
        ({"weight": torch.zeros(300, 400), "bias": torch.zeros(3)}, Code.TENSOR_TOO_LARGE, ("60",)),
        (
            weights(1.0) | {"bias": torch.tensor([0.0, float("nan"), 0.0])},
            Code.NON_FINITE,
            ("'bias'", "p1"),
        ),
    ],
    ids=["shape", "size", "not finite"],
)
def test_weights_that_were_not_declared_end_the_run_and_name_their_sender(
    values: dict[str, Tensor], code: Code, names: tuple[str, ...], members: Members
) -> None:
    members.join_all(FIRST)
    good, bad = members.swap("p0", 0, weights(1.0)), members.swap("p1", 0, values)
    error = failure_of(bad)
    assert error.code is code
    assert all(name in str(error) for name in names)
    assert_names(str(error), "p1")
    aborted = failure_of(good)
    assert isinstance(aborted, AbortedError)
    assert aborted.party == "p1"
    assert members.server.wait(20) == 2
    line = error_line(members.server.stderr)
    assert all(name in line for name in names)


def test_a_stranger_gets_nothing_from_the_server(members: Members) -> None:
    """It has a certificate of the federation's authority, and no place in the recipe."""
    federation = members.federation
    start = members.join_all(FIRST)["p0"]
    issue(federation.folder / "certs", "eve")
    federation.data["eve"] = federation.data["p1"]
    with AggregatingMember(federation, "eve") as eve:
        eve.link = eve.link_to(federation.address, "server", start)
        error = failure_of(soon(lambda: eve.swap(FIRST, 0, weights(9.0))))
        assert (error.code, error.party) == (Code.ROLE_MISMATCH, "eve")
        assert_names(str(error), "exchange")
    asked = [members.swap("p0", 0, weights(1.0)), members.swap("p1", 0, weights(2.0))]
    assert all(future.result(WAIT_S)["weight"].unique().tolist() == [1.5] for future in asked)


def test_where_nobody_aggregates_the_server_exchanges_nothing(members: Members) -> None:
    start = members.join_all()["p1"]
    member = members.of["p1"]
    member.link = member.link_to(members.federation.address, "server", start, reconnect_s=0.5)
    error = failure_of(members.swap("p1", 0, weights(1.0)))
    assert isinstance(error, LostError)
    assert error.party == "server"
    assert_names(str(error), "0.5")


def test_a_party_that_is_late_is_named(tmp_path: Path) -> None:
    made = recipe(2)
    made["run"] |= {"step_timeout_s": 1.0}
    with ExitStack() as stack:
        federation = stack.enter_context(Federation(tmp_path / "f", made, cases.digits(2)))
        members = Members(federation, stack)
        members.join_all(FIRST)
        error = failure_of(members.swap("p0", 0, weights(1.0)))
        assert isinstance(error, LostError)
        assert error.code is Code.STEP_TIMEOUT
        assert "p1" in str(error)
        assert_names(str(error), "run.step_timeout_s", "p1")
        assert members.server.wait(20) == 3


def test_a_party_that_is_lost_before_the_reply_sends_everyone_back(members: Members) -> None:
    starts = members.join_all(FIRST)
    for round_ in (0, 1):
        asked = [members.swap("p0", round_, weights(1.0)), members.swap("p1", round_, weights(3.0))]
        assert all(future.result(WAIT_S)["weight"].unique().tolist() == [2.0] for future in asked)
    waiting = members.swap("p0", 2, weights(7.0))
    members.of.pop("p1").vanish()
    assert isinstance(failure_of(waiting), InterruptedRun)
    members.server.wait_for("interrupted", WAIT_S)
    offer = {"run_id": starts["p0"].run_id, "checkpoints": ("000001.first.1",)}
    again = members.join_all(FIRST, **offer)
    assert {(start.generation, start.checkpoint) for start in again.values()} == {
        (2, "000001.first.1")
    }
    # Not with the 7.0 that the lost generation had.
    for round_ in (1, 2):
        asked = [members.swap("p0", round_, weights(2.0)), members.swap("p1", round_, weights(4.0))]
        assert all(future.result(WAIT_S)["bias"].unique().tolist() == [-3.0] for future in asked)
    members.server.stop()
    assert members.server.wait(20) == 130


# -- whole federations


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of programs that have the tests' own method as a plug-in."""
    entry_points = {"vfl.methods": {"averaging": "tests.harness.averaging:METHOD"}}
    return environment(
        metadata(tmp_path_factory.mktemp("site"), entry_points), Path(__file__).parents[2]
    )


def start(federation: Federation, name: str, plugin: dict[str, str]) -> Program:
    """Starts a real party."""
    return federation.start(
        name, "vfl-party", "run", federation.write_party(name).name, environment=plugin
    )


def reference(
    parties: list[str], phases: dict[str, int], widths: dict[str, int]
) -> dict[str, dict[str, Tensor]]:
    """{phase: its weights at every party at the end}, written without a wire."""
    found: dict[str, dict[str, Tensor]] = {}
    for phase, rounds in phases.items():
        layer = {"weight": torch.empty(widths[phase], 4), "bias": torch.empty(widths[phase])}
        own = {
            name: {key: drift(name, phase, -1, key, like) for key, like in layer.items()}
            for name in parties
        }
        for round_ in range(rounds):
            for name in parties:
                for key, like in layer.items():
                    own[name][key] = own[name][key] + drift(name, phase, round_, key, like)
            means = {key: sum(own[name][key] for name in parties) / len(parties) for key in layer}
            own = {name: {key: mean.clone() for key, mean in means.items()} for name in parties}  # type: ignore[union-attr]
        found[phase] = own[parties[0]]
    return found


def assert_reference(
    federation: Federation, phases: dict[str, int], widths: dict[str, int]
) -> None:
    want = reference(federation.names, phases, widths)
    for name in federation.names:
        got = federation.parameters(name)
        for phase, tensors in want.items():
            for key, tensor in tensors.items():
                assert torch.equal(got[f"{phase}.{key}"], tensor), f"{name}: {phase}.{key}"


@pytest.mark.slow
def test_a_run_of_two_aggregating_phases_with_training_between(
    tmp_path: Path, plugin: dict[str, str]
) -> None:
    """Every weight is what one process computes, and every byte is in the summary, the same at both
    ends.
    """
    made = recipe(
        3,
        {"rounds": 2},
        {"kind": "splitnn", "name": "train", "epochs": 1},
        {"name": "last", "width": 70_000},
    )
    made["phases"][1].pop("rounds", None)
    data = cases.columns("sklearn:breast_cancer", 3, limit=60)
    with Federation(tmp_path / "f", made | {"task": {"kind": "binary"}}, data) as federation:
        federation.start_server()
        for name in federation.names:
            start(federation, name, plugin)
        summary = Summary.model_validate(federation.finish())
        assert_reference(federation, {"first": 2, "last": 3}, {"first": 3, "last": 70_000})
        ledgers = {name: federation.ledger(name) for name in ["server", *federation.names]}
    assert summary.bytes.agrees
    assert list(summary.bytes.by_phase) == ["open", "first", "train", "last", "control"]
    carried = {
        (link.sender, link.receiver, link.phase): link
        for link in summary.bytes.by_link
        if link.kind == "weights"
    }
    pairs = [pair for name in federation.names for pair in ((name, "server"), ("server", name))]
    assert carried.keys() == {(*pair, phase) for pair in pairs for phase in ("first", "last")}
    for (_, _, phase), link in carried.items():
        assert link.payload_bytes == {"first": 2 * 15, "last": 3 * 5 * 70_000}[phase] * 4
    assert summary.bytes.by_phase["last"].payload_bytes == 6 * 3 * 5 * 70_000 * 4

    def counted(way: str) -> dict[tuple[str, ...], tuple[int, int, int]]:
        """Without the sessions: a party may end after a heartbeat that the server has not
        counted.
        """
        found: dict[tuple[str, ...], tuple[int, int, int]] = {}
        for name, entries in ledgers.items():
            for entry in entries:
                if entry.direction == way and entry.phase != CONTROL:
                    ends = (name, entry.peer) if way == "sent" else (entry.peer, name)
                    counts = (entry.payload_bytes, entry.message_bytes, entry.messages)
                    found[*ends, entry.phase, entry.kind] = counts
        return found

    sent, received = counted("sent"), counted("received")
    assert sent == received
    for (sender, receiver, phase), link in carried.items():
        counts = (link.payload_bytes, link.message_bytes, link.messages)
        assert counts == sent[sender, receiver, phase, "weights"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["p1", "server"])
def test_a_death_between_collecting_and_replying_changes_nothing(
    victim: str, tmp_path: Path, plugin: dict[str, str]
) -> None:
    with Federation(
        tmp_path / "f", recipe(2, {}, {"name": "last", "rounds": 1}), cases.digits(2)
    ) as federation:
        hold = federation.folder / "hold-p0-first-1"
        hold.touch()
        federation.start_server()
        for name in federation.names:
            start(federation, name, plugin)
        # The server waits for p0 alone.
        wait_until((federation.folder / "sent-p1-first-1").exists)
        federation.programs[victim].kill()
        if victim == "server":
            federation.start_server(listen=federation.address)
        else:
            federation.programs["server"].wait_for("interrupted")
            start(federation, victim, plugin)
        hold.unlink()
        summary = Summary.model_validate(federation.finish())
        assert_reference(federation, {"first": 3, "last": 1}, {"first": 3, "last": 3})
        if victim == "p1":
            assert summary.interruptions == 1
        labels = {name: federation.checkpoint_labels(name)[-1] for name in federation.names}
    assert set(labels.values()) == {"000004.last.1"}

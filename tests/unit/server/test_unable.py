"""A party that fails before it joins, and one that is refused while a generation runs."""

from __future__ import annotations

import pytest

from tests.harness.errors import assert_names
from tests.unit.server.test_control import Run, told, without_p2
from vfl_common.errors import Code, LostError, PeerError
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_server.control.run import RunState


def abort(code: int = Code.DATA_INVALID, message: str = "its data cannot be used") -> object:
    failure = failure_pb2.Failure(code=code, message=message)  # type: ignore[arg-type]
    return control_pb2.PartyMessage(abort=failure)


def unable(run: Run, name: str) -> PeerError:
    """Has a party that has not joined say that it fails; returns what its session ends with."""
    member = run.coordinator.open(name)
    with pytest.raises(PeerError) as caught:
        run.coordinator.handle(member, abort())  # type: ignore[arg-type]
    run.coordinator.note_refusal(name, caught.value)
    run.coordinator.end_session(member)
    return caught.value


def test_a_party_that_fails_before_it_joins_ends_nothing_and_the_others_read_why() -> None:
    run = Run(join_deadline_s=20.0, lost_after_s=60.0)
    run.stand_still()
    members = [run.join("p0"), run.join("p1")]
    for member in members:
        told(member)
    error = unable(run, "p2")
    assert_names(str(error), "p2")
    assert (run.coordinator.state, error.party) == (RunState.WAITING, "p2")
    for member in members:
        ((kind, waiting),) = told(member)
        assert (kind, list(waiting.missing)) == ("waiting", ["p2"])
        assert [(each.party, each.code) for each in waiting.refused] == [("p2", Code.DATA_INVALID)]

    run.pass_time(20.0)
    assert isinstance(run.coordinator.failure, LostError)
    assert_names(str(run.coordinator.failure), "p2", "20")


def test_a_party_that_fails_before_it_joins_may_come_again() -> None:
    run = Run()
    first = run.join("p0")
    unable(run, "p1")
    run.join("p1")
    assert not told(first)[-1][1].refused
    run.join("p2")
    assert run.coordinator.state is RunState.RUNNING


def test_a_party_that_has_joined_and_fails_still_ends_the_run() -> None:
    run = Run()
    run.join("p0")
    run.coordinator.handle(run.join("p1"), abort())  # type: ignore[arg-type]
    assert run.coordinator.state is RunState.FAILED


def test_those_who_wait_later_read_why_a_party_was_refused_while_the_others_went_on() -> None:
    run, members = without_p2(lost_after_s=60.0)
    unable(run, "p2")
    assert (run.coordinator.state, run.coordinator.failure) == (RunState.RUNNING, None)
    assert [told(members[name]) for name in ("p0", "p1")] == [[], []]
    run.coordinator.handle(
        members["p0"], control_pb2.PartyMessage(lenient=control_pb2.Lenient(on=False))
    )
    assert run.coordinator.state is RunState.WAITING
    run.join("p0")
    whys = [facts.get("why") for event, facts in run.events if event == "waiting"]
    assert whys[-1] is not None
    assert "p2" in whys[-1]
    assert_names(whys[-1], "p2")

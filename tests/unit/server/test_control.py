"""Membership and run state: the pure decisions, and the coordinator with outboxes that nobody
reads.
"""

from __future__ import annotations

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract.exchanges import credentials, keyring
from tests.harness import cases
from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from tests.harness.releases import newer
from tests.harness.waiting import wait_until
from vfl_common.bundle import PROTOCOL, DType, Ledger
from vfl_common.config.recipe import Recipe
from vfl_common.errors import (
    CATALOGUE,
    Code,
    InputError,
    InternalError,
    LostError,
    PeerError,
    VflError,
)
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.process.logs import JsonLines, Rate, append_held_count
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.messages import MAX_SHOWN_BYTES, to_failure
from vfl_common.stages import AggregationPlan, Job
from vfl_common.summary import PartySummary
from vfl_party.phases.course import Course
from vfl_party.runtime.joining import joining_of
from vfl_server.control import membership
from vfl_server.control.admission import admit
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.membership import Begin, GiveUp, Member, Wait, find_newest_common
from vfl_server.control.reports import ledger_of
from vfl_server.control.run import (
    MOVES,
    Departures,
    Left,
    RunHooks,
    RunState,
    ServedRun,
    find_slowest,
    get_metrics,
    move,
)
from vfl_server.control.service import ControlService

ROSTER = ("p0", "p1", "p2")

# -- membership


@pytest.mark.parametrize(
    ("waited_s", "ready", "missing"),
    [(0.0, {}, ROSTER), (4.0, {"p1": []}, ("p0", "p2")), (4.9, {"p0": [], "p2": ["x"]}, ("p1",))],
)
def test_the_run_waits_for_those_who_are_missing(
    waited_s: float, ready: dict[str, list[str]], missing: tuple[str, ...]
) -> None:
    decision = membership.decide(waited_s, 5.0, ROSTER, ready)
    assert isinstance(decision, Wait)
    assert (decision.missing, decision.left_s) == (missing, pytest.approx(5.0 - waited_s))


def test_the_run_gives_up_at_its_deadline() -> None:
    decision = membership.decide(5.0, 5.0, ROSTER, {"p1": []})
    assert decision == GiveUp(("p0", "p2"), "p0, p2 did not come within 5 s")


def test_the_run_begins_when_all_are_there_however_late_it_is() -> None:
    decision = membership.decide(
        99.0, 5.0, ROSTER, {name: ["000001.a.1", "000002.a.2"] for name in ROSTER}
    )
    assert isinstance(decision, Begin)
    assert decision.checkpoint == "000002.a.2"


END, BEFORE, EARLY = "000005.head.2", "000004.head.1", "000003.fedonce.3"


@pytest.mark.parametrize(
    ("ready", "left", "want"),
    [
        ({"p0": [BEFORE]}, {"p1": [END, BEFORE], "p2": [END, BEFORE]}, Begin(BEFORE)),
        ({"p0": [BEFORE], "p2": [END, BEFORE, EARLY]}, {"p1": [END, BEFORE]}, Begin(BEFORE)),
        ({"p0": [EARLY]}, {"p1": [END, BEFORE], "p2": [END, BEFORE, EARLY]}, Wait(("p1",), 5.0)),
        ({"p0": [""]}, {"p1": [END, BEFORE], "p2": [END, ""]}, Wait(("p1",), 5.0)),
        ({"p0": [""]}, {"p1": [END, ""], "p2": [END, ""]}, Begin("")),
        ({}, {"p1": [END, BEFORE]}, Wait(("p0", "p2"), 5.0)),
        ({"p0": [BEFORE, END], "p1": [BEFORE]}, {"p2": [END, BEFORE]}, Begin(BEFORE)),
    ],
)
def test_who_has_left_is_waited_for_only_where_it_is_needed(
    ready: dict[str, list[str]], left: dict[str, list[str]], want: Begin | Wait
) -> None:
    assert membership.decide(0.0, 5.0, ROSTER, ready, left) == want


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([], ""),
        ([[]], None),
        ([[""]], ""),
        ([["", "000001.a.1"], [""]], ""),
        ([["000001.a.1"], [""]], None),
        ([["000001.a.1"], ["000002.a.2"]], None),
        ([["000001.a.1", "000002.a.2"], ["000001.a.1"]], "000001.a.1"),
        ([["000009.a.9", "000010.b.1"], ["000010.b.1", "000009.a.9"]], "000010.b.1"),
        ([["000001.a.1", "000002.a.2"], ["000002.a.2", "000003.a.3"]], "000002.a.2"),
    ],
)
def test_the_newest_checkpoint_that_all_hold(held: list[list[str]], newest: str | None) -> None:
    assert find_newest_common(held) == newest


@pytest.mark.parametrize(
    ("offered", "held", "newest"),
    [
        # The second would skip to 2.
        (["1", "2"], [["1", "2"], ["1"]], "1"),
        (["1", "2"], [["1"], ["2"]], "2"),
        # The third skips in any case.
        (["1", "2", "3"], [["1", "2"], ["2", "3"], ["0"]], "2"),
        (["", "1"], [["", "1"], [""]], ""),
    ],
)
def test_a_label_that_all_hold_comes_before_one_to_which_some_would_skip(
    offered: list[str], held: list[list[str]], newest: str
) -> None:
    assert find_newest_common([offered] * len(held), held) == newest


@given(
    st.lists(st.lists(st.integers(0, 8).map(lambda n: f"{n:06d}.a.{n}"), max_size=5), max_size=4)
)
def test_nobody_is_asked_for_a_checkpoint_that_it_lacks(held: list[list[str]]) -> None:
    newest = find_newest_common(held)
    common = set.intersection(*map(set, held)) if held else {""}
    assert (newest is None) == (not common)
    assert all(newest is not None and label <= newest and newest in common for label in common)


@pytest.mark.parametrize(
    ("ready", "want"),
    [
        # --fresh, or a lost folder.
        ({"p0": ["7", "8"], "p1": ["7"], "p2": [""]}, membership.Refuse(("p2",), "7")),
        ({"p0": ["7", "8"], "p1": ["7"], "p2": []}, membership.Refuse(("p2",), "7")),
        ({"p0": ["7", "8"], "p1": ["7"], "p2": ["9"]}, membership.Refuse(("p2",), "7")),
        # The active party decides.
        ({"p0": ["7"], "p1": ["9"], "p2": ["8"]}, membership.Refuse(("p1", "p2"), "7")),
        # Killed before its first checkpoint.
        ({"p0": ["1", "2", ""], "p1": [""], "p2": ["1", ""]}, Begin("")),
    ],
)
def test_who_offers_less_than_it_must_have_is_refused(
    ready: dict[str, list[str]], want: membership.Refuse
) -> None:
    assert membership.decide(0.0, 5.0, ROSTER, ready, active="p0") == want


# -- run state


@pytest.mark.parametrize(("now", "to"), [*itertools.product(RunState, RunState)])
def test_only_declared_moves_are_made(now: RunState, to: RunState) -> None:
    if (now, to) in MOVES:
        assert move(now, to) is to
    else:
        with raises(InternalError, Code.INTERNAL):
            move(now, to)


def test_what_is_done_stays_done() -> None:
    assert not any(now in (RunState.COMPLETED, RunState.FAILED) for now, _ in MOVES)
    assert (RunState.WAITING, RunState.COMPLETED) not in MOVES


# -- the coordinator


HEARTBEAT = control_pb2.PartyMessage(heartbeat=control_pb2.Heartbeat())


class Run:
    """A coordinator, and parties that say what a test lets them say.

    ``later_s``: how far its clock is ahead of the machine's.
    """

    def __init__(
        self,
        *,
        tables: Recipe | None = None,
        job: Job = "train",
        on_leave: Callable[[Left], None] = lambda _: None,
        ran_s: float = 0.0,
        under_way: int = 0,
        left: dict[str, Left] | None = None,
        parties: int = 3,
        released: dict[str, str] | None = None,
        expired: bool = False,
        **run: Any,
    ) -> None:
        """``under_way``: the generation in which an earlier process of the server died.

        ``released``: {another run: why parties may leave it}; ``expired``: this run is older than
        it may be.
        """
        made = cases.recipe(parties, run={"heartbeat_s": 0.05} | run)
        self.recipe = tables or Recipe.model_validate(made)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.started: list[tuple[int, str]] = []
        self.planned: list[tuple[int, str, tuple[AggregationPlan, ...]]] = []
        self.later_s = 0.0
        hooks = RunHooks(
            lambda event, **facts: self.events.append((event, facts)),
            on_start=lambda generation, checkpoint: self.started.append((generation, checkpoint)),
            on_plan=lambda generation, checkpoint, agreed: self.planned.append(
                (generation, checkpoint, agreed)
            ),
            on_leave=on_leave,
            released=lambda other: (released or {}).get(other, ""),
            expired=lambda: expired,
        )
        served = ServedRun(
            self.recipe,
            job,
            "run",
            generation=under_way,
            left=left or {},
            ran_s=ran_s,
            under_way=under_way > 0,
        )
        self._now_s = time.monotonic
        self.coordinator = Coordinator(served, hooks, lambda: self._now_s() + self.later_s)

    def stand_still(self) -> None:
        """Lets time pass only where a test says so."""
        now_s = time.monotonic()
        self._now_s = lambda: now_s

    def pass_time(self, seconds: float, *living: Member) -> None:
        """Lets time pass, in which the server ticks and ``living`` send heartbeats."""
        until_s = self.later_s + seconds
        while self.later_s < until_s:
            self.later_s = min(self.later_s + 1.0, until_s)
            for member in living:
                self.coordinator.handle(member, HEARTBEAT)
            self.coordinator.tick()

    def join(
        self, name: str, *checkpoints: str, member: Member | None = None, **changes: Any
    ) -> Member:
        """A party joins; it offers the run's beginning too if it names no checkpoints."""
        member = member or self.coordinator.open(name)
        join = control_pb2.Join(
            role="active" if name == "p0" else "passive",
            protocol=PROTOCOL,
            recipe_json=self.recipe.canonical_json(),
            job="train",
            run_id="run" if checkpoints else "",
            checkpoints=checkpoints or [""],
            exchange_address="10.0.0.1:7001" if name == "p0" else "",
            pid=100 + int(name[1:]),
            device="cpu",
        )
        for key, value in changes.items():
            if isinstance(value, list | dict):
                several: dict[str, Any] = {key: value}
                join.MergeFrom(control_pb2.Join(**several))
            else:
                setattr(join, key, value)
        self.say(member, join=join)
        return member

    def plan(self, member: Member, rounds: int | None = None) -> None:
        """The party says what it is going to do: ``rounds`` of aggregation in the recipe's phase,
        or nothing.
        """
        plan = control_pb2.Plan()
        if rounds is not None:
            aggregation = plan.aggregations.add(phase=self.recipe.phases[0].name, rounds=rounds)
            aggregation.tensors.add(name="w", dtype=int(DType.FLOAT32), shape=[2])
        self.say(member, plan=plan)

    def begin(self, *checkpoints: str) -> dict[str, Member]:
        members = {name: self.join(name, *checkpoints) for name in ROSTER}
        assert self.coordinator.state is RunState.RUNNING
        for member in members.values():
            told(member)
        return members

    def say(self, member: Member, **said: Any) -> None:
        self.coordinator.handle(member, control_pb2.PartyMessage(**said))

    def report(self, member: Member, steps: int = 5) -> None:
        self.say(member, report=control_pb2.Report(steps=steps, wall_s=1.5))


def begun(*checkpoints: str, **settings: Any) -> tuple[Run, dict[str, Member]]:
    run = Run(**settings)
    return run, run.begin(*checkpoints)


def told(member: Member) -> list[tuple[str, Any]]:
    """What is in a party's outbox: (kind, message), and ("end", None) where its stream is to
    end.
    """
    found: list[tuple[str, Any]] = []
    while True:
        try:
            message = member.outbox.get_nowait()
        except queue.Empty:
            return found
        if message is None:
            found.append(("end", None))
        else:
            body = present(message.WhichOneof("body"))
            found.append((body, getattr(message, body)))


def kinds(member: Member) -> list[str]:
    return [kind for kind, _ in told(member)]


def test_the_run_starts_when_all_have_joined() -> None:
    run = Run()
    first = run.join("p1")
    ((kind, waiting),) = told(first)
    assert (kind, list(waiting.missing)) == ("waiting", ["p0", "p2"])
    assert 299.0 < waiting.deadline_s <= 300.0
    second, third = run.join("p2"), run.join("p0")
    assert run.coordinator.state is RunState.RUNNING
    assert run.started == [(1, "")]
    starts = {
        name: told(member)[-1] for name, member in (("p1", first), ("p2", second), ("p0", third))
    }
    assert all(kind == "start" and start.run_id == "run" for kind, start in starts.values())
    assert {name: start.exchange_address for name, (_, start) in starts.items()} == {
        "p0": "",
        "p1": "10.0.0.1:7001",
        "p2": "10.0.0.1:7001",
    }
    assert [event for event, _ in run.events].count("joined") == 3


def test_what_parties_show_is_passed_on_to_all_when_a_generation_begins() -> None:
    run = Run()
    members = {name: run.join(name, shown_json=f'{{"{name}":1}}') for name in ROSTER}
    for member in members.values():
        kind, start = told(member)[-1]
        assert kind == "start"
        assert dict(start.shown) == {name: f'{{"{name}":1}}' for name in ROSTER}


def test_a_party_that_shows_too_much_is_refused() -> None:
    run = Run()
    run.join("p1", shown_json="x" * MAX_SHOWN_BYTES)
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p2", "65")):
        run.join("p2", shown_json="x" * (MAX_SHOWN_BYTES + 1))


def test_a_stranger_is_refused() -> None:
    with raises(PeerError, Code.NOT_IN_RECIPE, names=("p0", "p1")):
        Run().coordinator.open("eve")


def test_a_second_party_of_a_living_name_is_refused() -> None:
    run = Run(heartbeat_s=1.0)
    alive = run.join("p1")
    result: list[object] = []

    def intrude() -> None:
        try:
            result.append(run.coordinator.open("p1"))
        except VflError as error:
            result.append(error)

    intruder = threading.Thread(target=intrude)
    intruder.start()
    give_up_s = time.monotonic() + 5.0
    while intruder.is_alive() and time.monotonic() < give_up_s:
        run.coordinator.handle(alive, HEARTBEAT)
        intruder.join(timeout=0.01)
    (error,) = result
    assert isinstance(error, PeerError)
    assert error.code is Code.NAME_TAKEN
    assert "p1" in error.public
    # The living one goes on.
    assert "end" not in kinds(alive)


def test_a_silent_party_is_superseded_by_its_new_process() -> None:
    run, members = begun()
    again = run.coordinator.open("p1")
    assert kinds(members["p1"]) == ["end"]
    assert run.coordinator.state is RunState.WAITING
    assert_names(told(members["p0"])[-1][1].reason, "p1")
    # Its stream's end comes late, and means nothing now.
    run.coordinator.end_session(members["p1"])
    for name, member in (("p0", members["p0"]), ("p1", again), ("p2", members["p2"])):
        run.join(name, member=member)
    assert run.started == [(1, ""), (2, "")]


def test_a_party_that_leaves_in_time_makes_room_at_once() -> None:
    run = Run(heartbeat_s=60.0, lost_after_s=120.0)
    older = run.join("p1")
    threading.Timer(0.05, lambda: run.coordinator.end_session(older)).start()
    began_s = time.monotonic()
    assert run.coordinator.open("p1") is not older
    assert time.monotonic() - began_s < 5.0


def test_a_lost_party_interrupts_and_all_go_back_to_what_all_hold() -> None:
    run, members = begun(rejoin_deadline_s=30.0)
    run.coordinator.end_session(members["p2"])
    assert run.coordinator.state is RunState.WAITING
    for name in ("p0", "p1"):
        ((kind, interrupt),) = told(members[name])
        assert (kind, list(interrupt.lost), interrupt.generation) == ("interrupt", ["p2"], 1)
    assert ("interrupted", {"reason": "p2 was lost", "deadline_s": 30.0}) in run.events
    run.join("p0", "000002.a.2", "000003.a.3", member=members["p0"])
    run.join("p1", "000002.a.2", "000003.a.3", member=members["p1"])
    run.join("p2", "000001.a.1", "000002.a.2")
    assert run.started == [(1, ""), (2, "000002.a.2")]


def test_checkpoints_of_another_run_do_not_count() -> None:
    run = Run(released={"yesterday": "run yesterday is complete"})
    members = [run.join("p0", "", "000002.a.2"), run.join("p1", "", "000002.a.2")]
    members.append(run.join("p2", "000002.a.2", run_id="yesterday"))
    assert run.started == [(1, "")]
    starts = [message for member in members for kind, message in told(member) if kind == "start"]
    assert [start.anew for start in starts] == ["", "", "run yesterday is complete"]


def test_a_server_without_the_run_that_parties_are_in_begins_no_other() -> None:
    run = Run()
    members = [run.join(name, "000002.a.2", run_id="lost") for name in ("p0", "p1")]
    assert run.coordinator.state is RunState.FAILED
    said = str(run.coordinator.failure)
    assert_names(said, "--fresh", "p0")
    assert [kinds(member)[-2:] for member in members] == [["stop", "end"]] * 2


def test_a_party_that_has_written_nothing_of_another_run_loses_nothing() -> None:
    run = Run()
    for name in ROSTER:
        run.join(name, "", run_id="never begun")
    assert run.started == [(1, "")]


def test_one_party_of_another_run_is_refused_where_the_others_have_begun() -> None:
    run = Run()
    members = run.begin("000002.a.2")
    run.coordinator.end_session(members["p2"])
    run.join("p0", "000002.a.2", member=members["p0"])
    run.join("p1", "000002.a.2", member=members["p1"])
    with raises(PeerError, Code.CHECKPOINT_INVALID, names="p2"):
        run.join("p2", "000002.a.2", run_id="another")
    assert run.coordinator.state is RunState.WAITING


@pytest.mark.parametrize("expired", [False, True])
def test_a_run_that_a_party_cannot_resume_is_set_aside_when_it_is_old(expired: bool) -> None:
    run = Run(expired=expired, resume_within_s=3600.0)
    members = run.begin("000002.a.2")
    run.join("p1", member=members["p1"], run_id="run", unfit="its rows have changed")
    assert run.coordinator.finished.is_set()
    if expired:
        assert run.coordinator.set_aside == "p1 cannot resume run run: its rows have changed"
        assert run.coordinator.failure is None
        assert all(kinds(member)[-1] == "end" for member in members.values())
        return
    assert run.coordinator.set_aside == ""
    said = str(run.coordinator.failure)
    assert_names(said, "--fresh", "run.resume_within_s")
    (stop,) = [message for kind, message in told(members["p0"]) if kind == "stop"]
    assert (stop.code, stop.party, stop.message) == (int(Code.DATA_INVALID), "p1", said)


def test_who_cannot_resume_while_the_others_go_on_without_it_is_refused_alone() -> None:
    run, _ = without_p2()
    with raises(PeerError, Code.CHECKPOINT_INVALID, names=("--fresh", "p2")):
        run.join("p2", run_id="run", unfit="its rows have changed")
    assert run.coordinator.state is RunState.RUNNING


def test_parties_resume_where_nobody_loses_anything() -> None:
    """p1 and p2 may skip to what p0 alone has; at what all hold, they need not."""
    run = Run()
    run.join("p0", "000038.a.38", "000039.a.39", held=["000038.a.38", "000039.a.39"])
    for name in ("p1", "p2"):
        run.join(
            name, "000037.a.37", "000038.a.38", "000039.a.39", held=["000037.a.37", "000038.a.38"]
        )
    assert run.started == [(1, "000038.a.38")]


def test_a_party_that_has_lost_its_checkpoints_is_refused_and_waited_for() -> None:
    run = Run()
    first = [run.join(name, "000008.a.8", "000009.a.9") for name in ("p0", "p1")]
    lost = run.join("p2")
    assert run.started == []
    (stop,) = [message for kind, message in told(lost) if kind == "stop"]
    assert (stop.code, stop.party) == (int(Code.CHECKPOINT_INVALID), "p2")
    assert_names(stop.message, "--fresh", "a.9")
    assert "--fresh" in stop.message
    assert all("stop" not in kinds(member) for member in first)
    run.join("p2", "000008.a.8")
    assert run.started == [(1, "000008.a.8")]


def test_sessions_that_opened_at_once_behind_a_silent_one_all_end() -> None:
    """One replaces the silent session; the others are refused. Each session's thread gets its
    end.
    """
    run = Run()
    silent = run.join("p1")
    found: queue.SimpleQueue[Member | VflError] = queue.SimpleQueue()

    def come() -> None:
        try:
            found.put(run.coordinator.open("p1"))
        except VflError as error:
            found.put(error)

    threads = [threading.Thread(target=come) for _ in range(3)]
    for thread in threads:
        thread.start()
    came = [found.get(timeout=5.0) for _ in threads]
    (member,) = [each for each in came if isinstance(each, Member)]
    assert [error.code for error in came if isinstance(error, PeerError)] == [Code.NAME_TAKEN] * 2
    assert kinds(silent)[-1] == "end"
    run.coordinator.end_session(silent)
    run.coordinator.end_session(member)
    assert kinds(member)[-1] == "end"


def test_nobody_is_blamed_for_time_in_which_the_server_stood_still() -> None:
    run = Run(lost_after_s=15.0)
    run.begin()
    run.coordinator.tick()
    run.later_s = 60.0
    run.coordinator.tick()
    assert run.coordinator.state is RunState.RUNNING
    # It ticks again, and they are silent.
    run.pass_time(16.0)
    assert run.coordinator.state is RunState.WAITING


def test_a_server_says_at_once_for_whom_it_waits() -> None:
    run = Run()
    # The second time is too soon after the first.
    for _ in range(2):
        run.coordinator.tick()
    ((event, facts),) = run.events
    assert (event, facts["missing"]) == ("waiting", ["p0", "p1", "p2"])


def test_those_who_wait_are_told_each_minute_how_long_it_still_is() -> None:
    run = Run(join_deadline_s=300.0, lost_after_s=1000.0)
    first = run.join("p1")
    told(first)
    run.pass_time(125.0)
    left_s = [message.deadline_s for kind, message in told(first) if kind == "waiting"]
    assert [round(each / 10) for each in left_s] == [24, 18]


def test_many_who_join_at_once_are_not_told_of_each_other() -> None:
    """Each hears at once that it waits, and all hear the rest a second later; else there were
    20,000 messages.
    """
    run = Run(parties=200, join_deadline_s=300.0, lost_after_s=1000.0)
    run.stand_still()
    members = [run.join(f"p{number}") for number in range(199)]
    heard = [[list(message.missing) for _, message in told(member)] for member in members]
    assert all(heard)
    assert sum(map(len, heard)) < 2 * len(members)
    assert len([event for event, _ in run.events if event == "waiting"]) < 10
    run.coordinator.tick()
    assert [told(member) for member in members] == [[]] * 199
    run.later_s += 1.0
    run.coordinator.tick()
    for member in members:
        ((kind, waiting),) = told(member)
        assert (kind, list(waiting.missing)) == ("waiting", ["p199"])


def test_a_party_that_was_stopped_is_waited_for() -> None:
    run, members = begun()
    run.say(members["p0"], stopping=control_pb2.Stopping())
    assert run.coordinator.state is RunState.WAITING
    assert run.coordinator.failure is None
    assert kinds(members["p0"]) == ["end"]
    ((kind, interrupt),) = told(members["p1"])
    assert (kind, list(interrupt.lost), interrupt.reason) == ("interrupt", ["p0"], "p0 was stopped")


def test_a_server_that_was_stopped_ends_the_sessions_and_not_the_run() -> None:
    run, members = begun()
    run.coordinator.stop()
    assert run.coordinator.failure is None
    for member in members.values():
        (kind, interrupt), end = told(member)
        assert (kind, interrupt.reason, end) == ("interrupt", "server was stopped", ("end", None))
    # Before the session has ended.
    for name in ("p0", "p1"):
        run.join(name, member=members[name])
    run.coordinator.end_session(members["p2"])
    # In a session of its own.
    assert kinds(run.join("p2")) == ["end"]
    assert run.started == [(1, "")]


# -- a server that was away


def planned(**run: Any) -> tuple[Run, dict[str, Member]]:
    """A generation that goes on without the server."""
    found = Run(**({"server_absent_s": 60.0} | run))
    members = found.begin()
    for member in members.values():
        found.plan(member)
    return found, members


def claim(
    run: Run, name: str, generation: int = 1, member: Member | None = None, run_id: str = "run"
) -> Member:
    """A party joins again, and says that it went on in ``generation``."""
    return run.join(name, member=member, generation=generation, run_id=run_id)


def test_a_restarted_server_takes_up_the_generation_of_those_who_went_on() -> None:
    run = Run(under_way=3, server_absent_s=60.0)
    assert run.coordinator.status().interruptions == 2
    members = {name: claim(run, name, 3) for name in ("p2", "p0", "p1")}
    for member in members.values():
        ((kind, start),) = told(member)
        assert (kind, start.goes_on, start.run_id, start.generation) == ("start", True, "run", 3)
        assert (start.checkpoint, start.exchange_address, start.returning) == ("", "", False)
    run.coordinator.tick()
    assert (run.coordinator.state, run.started) == (RunState.RUNNING, [])
    for member in members.values():
        run.report(member)
    assert run.coordinator.state is RunState.COMPLETED
    assert run.coordinator.status().interruptions == 2
    assert [party.name for party in run.coordinator.parties()] == list(ROSTER)


@pytest.mark.parametrize("first", ["p0", "p1"])
def test_a_party_that_died_with_the_server_takes_the_others_back(first: str) -> None:
    run = Run(under_way=3, server_absent_s=60.0)
    members: dict[str, Member] = {}
    for name in (first, *(name for name in ROSTER if name != first)):
        members[name] = run.join(name, "000001.a.1") if name == "p1" else claim(run, name, 3)
    assert run.coordinator.state is RunState.WAITING
    for name in ("p0", "p2"):
        assert kinds(members[name])[-1] == "interrupt"
        run.join(name, "000001.a.1", member=members[name])
    assert run.started == [(4, "000001.a.1")]
    assert run.coordinator.status().interruptions == 3


def test_who_does_not_come_back_with_the_server_is_waited_for_and_then_named() -> None:
    run = Run(under_way=3, server_absent_s=60.0, rejoin_deadline_s=1.0)
    members = {name: claim(run, name, 3) for name in ("p0", "p1")}
    run.pass_time(15.5, *members.values())
    assert run.coordinator.state is RunState.WAITING
    (_, (kind, interrupt)) = told(members["p0"])
    assert (kind, interrupt.reason, list(interrupt.lost)) == (
        "interrupt",
        "p2 did not come back within 15 s",
        ["p2"],
    )
    late = claim(run, "p2", 3)
    # Too late: the others have gone back.
    assert kinds(late) == ["interrupt"]
    run.pass_time(1.5)
    assert isinstance(run.coordinator.failure, LostError)


@pytest.mark.parametrize(
    ("generation", "run_id"), [(2, "run"), (4, "run"), (2**32 - 1, "run"), (3, "yesterday")]
)
def test_a_stale_claim_is_told_so_and_the_server_waits_no_longer_for_it(
    generation: int, run_id: str
) -> None:
    run = Run(under_way=3, server_absent_s=60.0)
    members = {name: claim(run, name, 3) for name in ("p0", "p2")}
    stale = claim(run, "p1", generation, run_id=run_id)
    ((kind, interrupt),) = told(stale)
    assert (kind, interrupt.reason) == ("interrupt", f"generation {generation} is over")
    assert run.coordinator.state is RunState.RUNNING
    run.pass_time(15.5, stale, *members.values())
    assert kinds(members["p0"]) == ["start", "interrupt"]
    for name, member in (*members.items(), ("p1", stale)):
        run.join(name, "000001.a.1", member=member)
    assert run.started == [(4, "000001.a.1")]


def test_a_server_that_knows_of_no_generation_takes_up_none() -> None:
    run = Run(server_absent_s=60.0)
    assert kinds(claim(run, "p1")) == ["interrupt"]
    assert run.coordinator.state is RunState.WAITING
    assert run.coordinator.status().joined == ()


def test_a_party_whose_connection_was_lost_goes_on_and_interrupts_nobody() -> None:
    run, members = planned()
    run.report(members["p1"])
    run.coordinator.end_session(members["p1"])
    assert run.coordinator.state is RunState.RUNNING
    assert ("lost", {"party": "p1", "how": "was lost"}) in run.events
    again = claim(run, "p1")
    assert kinds(again) == ["start"]
    assert (told(members["p0"]), told(members["p2"])) == ([], [])
    for name in ("p0", "p2"):
        run.report(members[name])
    # What p1 said before is to be said again.
    assert run.coordinator.state is RunState.RUNNING
    run.report(again)
    assert run.coordinator.state is RunState.COMPLETED


def test_a_party_that_lost_its_connection_is_not_blamed_for_a_standstill() -> None:
    run, members = planned()
    run.coordinator.end_session(members["p1"])
    run.later_s = 60.0
    run.coordinator.tick()
    assert run.coordinator.state is RunState.RUNNING


def test_a_party_that_reconnects_before_its_loss_is_noticed_goes_on() -> None:
    run, members = planned()
    again = run.coordinator.open("p1")
    claim(run, "p1", member=again)
    assert kinds(members["p1"]) == ["end"]
    assert kinds(again) == ["start"]
    assert told(members["p0"]) == []


@pytest.mark.parametrize(
    "case", ["it began anew", "it was stopped", "before the plans", "weights are averaged", "off"]
)
def test_whose_loss_interrupts_although_the_server_may_be_away(case: str) -> None:
    run, members = begun(server_absent_s=0.0 if case == "off" else 60.0)
    for name, member in members.items():
        if case != "before the plans" or name == "p1":
            run.plan(member, 3 if case == "weights are averaged" else None)
    if case == "it was stopped":
        run.say(members["p1"], stopping=control_pb2.Stopping())
    else:
        run.coordinator.end_session(members["p1"])
    if case == "it began anew":
        assert run.coordinator.state is RunState.RUNNING
        run.join("p1", "000001.a.1")
    else:
        assert kinds(claim(run, "p1")) == ["interrupt"]
    assert run.coordinator.state is RunState.WAITING
    assert kinds(members["p0"])[0] == "interrupt"


def test_a_claim_of_a_party_that_is_there_changes_nothing_for_the_others() -> None:
    run, members = planned()
    claim(run, "p1", member=members["p1"])
    assert kinds(members["p1"]) == ["interrupt"]
    assert run.coordinator.state is RunState.RUNNING
    assert told(members["p0"]) == []


def test_a_new_generation_counts_nobody_as_missed_in_the_one_before() -> None:
    run, members = planned()
    run.coordinator.end_session(members["p1"])
    run.pass_time(14.5, members["p0"], members["p2"])
    run.say(members["p2"], stopping=control_pb2.Stopping())
    for name, member in (("p0", members["p0"]), ("p1", None), ("p2", None)):
        run.join(name, "000001.a.1", member=member)
    run.pass_time(1.0)
    assert run.coordinator.state is RunState.RUNNING
    assert run.started == [(1, ""), (2, "000001.a.1")]
    # Its plan is not known yet.
    assert kinds(claim(run, "p1", member=run.coordinator.open("p1"))) == ["interrupt"]
    assert run.coordinator.state is RunState.WAITING


def test_a_stopped_server_does_not_interrupt_who_goes_on_without_it() -> None:
    run, members = planned()
    run.coordinator.stop()
    for member in members.values():
        assert kinds(member) == ["end"]
        run.coordinator.end_session(member)
    assert not {"lost", "interrupted"} & {event for event, _ in run.events}
    assert kinds(claim(run, "p1")) == ["end"]


def test_a_claim_while_the_server_stops_is_for_the_next_one() -> None:
    run, members = planned()
    run.coordinator.end_session(members["p1"])
    again = run.coordinator.open("p1")
    run.coordinator.stop()
    claim(run, "p1", member=again)
    assert "interrupt" not in kinds(again)


def test_a_session_that_has_not_joined_reports_nothing() -> None:
    run = Run(under_way=1, server_absent_s=60.0)
    free(run.coordinator.open("p2"), run, END, BEFORE)
    vouch(run, claim(run, "p0"))
    run.coordinator.tick()
    assert (run.coordinator.state, run.coordinator.status().left) == (RunState.RUNNING, ())


def test_who_did_not_hear_that_it_may_leave_hears_it_from_the_next_server() -> None:
    report = control_pb2.Report(steps=3, free_from=[END, BEFORE])
    left = {"p2": Left(PartySummary(name="p2", role="passive", pid=1, device="cpu"), report)}
    run = Run(under_way=1, server_absent_s=60.0, left=left)
    assert kinds(claim(run, "p2")) == ["complete", "end"]
    for name in ("p0", "p1"):
        run.report(claim(run, name))
    assert run.coordinator.state is RunState.COMPLETED


def test_a_party_that_is_away_only_for_the_server_comes_back_without_repeating_anything() -> None:
    run, members = planned()
    lenient(run, members)
    run.coordinator.end_session(members["p2"])
    assert ("away", {"party": "p2", "how": "was lost"}) in run.events
    ((kind, start),) = told(claim(run, "p2"))
    assert (kind, start.goes_on, start.returning) == ("start", True, False)


def test_a_dead_party_returns_only_once_the_active_one_is_there() -> None:
    run, members = planned()
    lenient(run, members)
    run.coordinator.end_session(members["p2"])
    run.coordinator.end_session(members["p0"])
    run.join("p2", "000001.a.1")
    assert run.coordinator.state is RunState.WAITING
    assert kinds(members["p1"])[0] == "interrupt"


def lenient(run: Run, members: dict[str, Member], *, on: bool = True, plans: bool = True) -> None:
    for name, member in members.items():
        if plans and member.plan is None:
            run.say(member, plan=control_pb2.Plan())
        if name == "p0":
            run.say(member, lenient=control_pb2.Lenient(on=on))
        told(member)


def without_p2(**settings: Any) -> tuple[Run, dict[str, Member]]:
    """A run that goes on although p2 is lost."""
    run, members = begun(**settings)
    lenient(run, members)
    run.coordinator.end_session(members["p2"])
    return run, members


def test_the_others_go_on_without_a_lost_party_and_take_it_back() -> None:
    run, members = without_p2()
    assert run.coordinator.state is RunState.RUNNING
    assert (told(members["p0"]), told(members["p1"])) == ([], [])
    members["p2"] = run.join("p2", "000001.a.1")
    ((kind, start),) = told(members["p2"])
    assert (kind, start.returning, start.generation, start.checkpoint) == ("start", True, 1, "")
    assert start.exchange_address == "10.0.0.1:7001"
    assert (told(members["p0"]), told(members["p1"])) == ([], [])
    run.say(members["p2"], plan=control_pb2.Plan())
    lenient(run, members, on=False)
    assert run.coordinator.state is RunState.RUNNING
    assert run.started == [(1, "")]


def restarted_without_p2() -> tuple[Run, dict[str, Member]]:
    """A server that was started again while the others trained on, with p2 away."""
    run = Run(under_way=3, server_absent_s=60.0)
    members = {name: claim(run, name, 3) for name in ("p0", "p1")}
    run.say(members["p0"], lenient=control_pb2.Lenient(on=True))
    for member in members.values():
        told(member)
    return run, members


def test_a_restarted_server_learns_that_the_others_go_on_without_a_party() -> None:
    run, members = restarted_without_p2()
    run.pass_time(15.5, *members.values())
    assert run.coordinator.state is RunState.RUNNING
    assert run.events[-1] == ("away", {"party": "p2", "how": "did not come back within 15 s"})
    run.say(members["p0"], lenient=control_pb2.Lenient(on=False))
    assert [each.reason for kind, each in told(members["p1"]) if kind == "interrupt"] == [
        "p2 is away, and needed now"
    ]


@pytest.mark.parametrize("missed", [False, True])
def test_a_restarted_server_takes_back_who_was_away(missed: bool) -> None:
    run, members = restarted_without_p2()
    if missed:
        run.pass_time(15.5, *members.values())
    members["p2"] = run.join("p2", "000001.a.1")
    ((kind, start),) = told(members["p2"])
    assert (kind, start.returning, start.generation) == ("start", True, 3)
    assert (told(members["p0"]), told(members["p1"])) == ([], [])
    # Nobody misses it any more.
    run.pass_time(20.0, *members.values())
    assert run.coordinator.state is RunState.RUNNING
    assert run.coordinator.status().joined == ROSTER


def test_a_run_that_has_failed_waits_for_nobody() -> None:
    run, members = without_p2()
    run.coordinator.fail(LostError(Code.STEP_TIMEOUT, "p1 was too slow", party="p1"))
    told(members["p0"])
    run.say(members["p0"], lenient=control_pb2.Lenient(on=False))
    assert run.coordinator.state is RunState.FAILED
    assert told(members["p0"]) == []


def test_a_party_that_is_away_when_it_is_needed_is_waited_for() -> None:
    run, members = without_p2()
    run.say(members["p0"], lenient=control_pb2.Lenient(on=False))
    assert run.coordinator.state is RunState.WAITING
    ((kind, interrupt), *_) = told(members["p1"])
    assert (kind, interrupt.reason, list(interrupt.lost)) == (
        "interrupt",
        "p2 is away, and needed now",
        ["p2"],
    )
    for name in ("p0", "p1"):
        run.join(name, "000003.a.3", member=members[name])
    members["p2"] = run.join("p2", "000003.a.3")
    ((_, start),) = [each for each in told(members["p2"]) if each[0] == "start"]
    assert (start.returning, start.generation, start.checkpoint) == (False, 2, "000003.a.3")


@pytest.mark.parametrize("who", ["p0", "p2"])
@pytest.mark.parametrize("when", ["not said", "before the plans", "said by another"])
def test_whose_loss_interrupts_all_the_same(who: str, when: str) -> None:
    run, members = begun()
    if when == "said by another":
        lenient(run, members, on=False)
        run.say(members["p1"], lenient=control_pb2.Lenient(on=True))
    elif when == "before the plans":
        lenient(run, members, plans=False)
    else:
        lenient(run, members, on=False)
    run.coordinator.end_session(members[who])
    assert run.coordinator.state is RunState.WAITING


def test_the_loss_of_the_active_party_interrupts_who_goes_on_without_others() -> None:
    run, members = without_p2()
    run.coordinator.end_session(members["p0"])
    assert run.coordinator.state is RunState.WAITING
    assert kinds(members["p1"])[0] == "interrupt"


def test_only_the_active_party_says_whether_others_may_be_away() -> None:
    run, members = without_p2()
    run.say(members["p1"], lenient=control_pb2.Lenient(on=False))
    assert run.coordinator.state is RunState.RUNNING


def test_a_party_that_ends_with_an_error_of_its_own_is_away() -> None:
    run, members = begun()
    lenient(run, members)
    abort = failure_pb2.Failure(code=Code.DATA_INVALID, message="its data have changed", party="p2")  # type: ignore[arg-type]
    run.say(members["p2"], abort=abort)
    assert (run.coordinator.state, run.coordinator.failure) == (RunState.RUNNING, None)
    assert told(members["p1"]) == []
    # What it finds wrong ends the run.
    run.say(members["p0"], abort=abort)
    assert run.coordinator.state is RunState.FAILED


def test_a_party_that_comes_back_and_says_nothing_is_away_again() -> None:
    run, members = without_p2(step_timeout_s=60.0)
    members["p2"] = run.join("p2", "000001.a.1")
    run.pass_time(60.5, *members.values())
    assert (run.coordinator.state, run.coordinator.failure) == (RunState.RUNNING, None)
    assert kinds(members["p2"]) == ["start", "end"]


def test_a_party_that_comes_back_without_its_run_is_refused_and_interrupts_nobody() -> None:
    run, members = without_p2()
    with raises(PeerError, Code.CHECKPOINT_INVALID, names=("--fresh", "p2"), party="p2"):
        run.join("p2")
    assert run.coordinator.state is RunState.RUNNING
    assert (told(members["p0"]), told(members["p1"])) == ([], [])


def test_a_party_that_joins_again_before_its_loss_is_noticed_interrupts() -> None:
    run, members = begun()
    run.join("p1", "000001.a.1", member=members["p1"])
    assert run.coordinator.state is RunState.WAITING
    assert kinds(members["p0"]) == ["interrupt"]
    run.join("p0", "000001.a.1", member=members["p0"])
    run.join("p2", "000001.a.1", member=members["p2"])
    assert run.started == [(1, ""), (2, "000001.a.1")]


def test_a_party_that_joins_again_without_end_does_not_stop_the_others_each_time() -> None:
    run, members = begun()
    for _ in range(20):
        for name in ("p1", "p0", "p2"):
            run.join(name, "000001.a.1", member=members[name])
    with raises(PeerError, Code.NAME_TAKEN, names=("p1", "20"), party="p1"):
        run.join("p1", "000001.a.1", member=members["p1"])
    assert (len(run.started), run.coordinator.state) == (21, RunState.RUNNING)


def test_two_losses_at_once_are_one_interruption() -> None:
    run, members = begun()
    run.coordinator.end_session(members["p1"])
    run.coordinator.end_session(members["p2"])
    run.coordinator.end_session(members["p2"])


def test_a_silent_party_is_lost() -> None:
    run, members = begun(lost_after_s=15.0)
    run.pass_time(15.5, members["p0"], members["p2"])
    assert run.coordinator.state is RunState.WAITING
    assert_names(told(members["p0"])[-1][1].reason, "p1", "15")
    assert kinds(members["p1"]) == ["end"]


@pytest.mark.parametrize("begun", [False, True])
def test_the_run_gives_up_on_who_stays_away_and_says_who(begun: bool) -> None:
    run = Run(join_deadline_s=5.0, rejoin_deadline_s=5.0, lost_after_s=60.0)
    if begun:
        members = run.begin()
        run.coordinator.end_session(members["p2"])
        told(members["p0"])
        run.join("p0", member=members["p0"])
        run.join("p1", member=members["p1"])
    else:
        members = {name: run.join(name) for name in ("p0", "p1")}

    run.pass_time(5.5)
    assert run.coordinator.state is RunState.FAILED
    failure = run.coordinator.failure
    assert isinstance(failure, LostError)
    assert (failure.code, failure.party, failure.exit_code) == (Code.PARTY_LOST, "p2", 3)
    assert_names(str(failure), "p2")
    for name in ("p0", "p1"):
        stop, end = told(members[name])[-2:]
        assert (stop[0], stop[1].party, stop[1].message) == ("stop", "p2", str(failure))
        assert end == ("end", None)


REFUSED: dict[str, tuple[dict[str, Any], Code]] = {
    "protocol": ({"protocol": PROTOCOL + 1}, Code.PROTOCOL_DIFFERS),
    "role": ({"role": "active"}, Code.ROLE_MISMATCH),
    "no role": ({"role": ""}, Code.ROLE_MISMATCH),
    "job": ({"job": "predict"}, Code.RECIPE_DIFFERS),
    "no JSON": ({"recipe_json": "{"}, Code.RECIPE_DIFFERS),
    "deep JSON": ({"recipe_json": "[" * 100_000}, Code.RECIPE_DIFFERS),
    "long number": ({"recipe_json": '{"seed": 1' + "0" * 5_000 + "}"}, Code.RECIPE_DIFFERS),
    "no text": ({"recipe_json": '{"\\ud800": 1}'}, Code.RECIPE_DIFFERS),
    "long key": ({"recipe_json": '{"' + "A" * 5_000 + '": 1}'}, Code.RECIPE_DIFFERS),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_party_that_does_not_fit_is_refused_and_the_others_go_on(case: str) -> None:
    changes, code = REFUSED[case]
    run = Run()
    other = run.join("p0")
    with raises(PeerError, code, party="p1") as caught:
        run.join("p1", **changes)
    assert "p1" in caught.value.public
    assert len(caught.value.public) < 300
    assert to_failure(caught.value).message == caught.value.public
    assert run.coordinator.state is RunState.WAITING
    assert "stop" not in kinds(other)


def test_a_recipe_that_differs_is_refused_with_the_key() -> None:
    run = Run()
    theirs = Recipe.model_validate(
        cases.recipe(3, run={"heartbeat_s": 0.05}, model={"embedding_size": 16})
    )
    with raises(PeerError, Code.RECIPE_DIFFERS, names=("model.embedding_size", "p1")):
        run.join("p1", recipe_json=theirs.canonical_json())
    theirs = Recipe.model_validate(cases.recipe(3, run={"heartbeat_s": 0.05}, phase={"epochs": 4}))
    # As people write it.
    with raises(PeerError, Code.RECIPE_DIFFERS, names=("phases.0.epochs", "p1")):
        run.join("p1", recipe_json=theirs.canonical_json())


def said_by(made: Recipe, **changes: Any) -> dict[str, Any]:
    """What a party of this release says of its recipe when it joins."""
    said = joining_of(Course(made), "passive", {})
    return {
        "recipe_json": said.recipe_json,
        "filled_json": said.filled_json,
        "oldest": said.oldest,
    } | changes


def written(made: Recipe) -> list[str]:
    return list(joining_of(Course(made), "passive", {}).written)


def test_a_key_that_nobody_wrote_is_no_difference_between_releases() -> None:
    run = Run()
    made = newer(cases.recipe(3, run={"heartbeat_s": 0.05}))
    run.join("p1", **said_by(made), written=written(made))
    # The other way round.
    run.join("p2", **said_by(run.recipe), written=written(run.recipe))
    # Of the release before, which sends no more than its canonical form.
    run.join("p0")
    assert run.coordinator.state is RunState.RUNNING


def test_a_key_that_is_written_and_unknown_is_refused_with_both_values() -> None:
    run = Run()
    made = newer(cases.recipe(3, run={"heartbeat_s": 0.05, "audit_every": 9}))
    with raises(PeerError, Code.RECIPE_DIFFERS, names=("run.audit_every", "p1")):
        run.join("p1", **said_by(made), written=written(made))


def test_a_default_that_differs_between_releases_is_refused() -> None:
    run = Run(tables=newer(cases.recipe(3, run={"heartbeat_s": 0.05})))
    made = newer(cases.recipe(3, run={"heartbeat_s": 0.05}), default=8)
    with raises(PeerError, Code.RECIPE_DIFFERS, names=("run.audit_every", "p1")):
        run.join("p1", **said_by(made), written=written(made))


def test_defaults_of_methods_are_compared_between_the_parties() -> None:
    run = Run()
    said = said_by(run.recipe)
    filled = json.loads(said["filled_json"])
    run.join("p1", **said, written=written(run.recipe))
    other = json.dumps(filled | {"phases.0.optimizer.lr": 0.5})
    refused = run.coordinator.open("p2")
    with raises(PeerError, Code.RECIPE_DIFFERS, names=("phases.0.optimizer.lr", "p2")):
        run.join("p2", member=refused, **said | {"filled_json": other}, written=written(run.recipe))
    # A key of a later release of the method.
    more = json.dumps(filled | {"phases.0.added": 1})
    run.join("p2", member=refused, **said | {"filled_json": more})


def test_a_key_without_a_name_is_one_that_the_server_does_not_know() -> None:
    run = Run()
    said = said_by(run.recipe)
    filled = json.dumps(json.loads(said["filled_json"]) | {"": 1})
    with raises(PeerError, Code.RECIPE_DIFFERS, names="p1"):
        run.join("p1", **said | {"filled_json": filled}, written=[*written(run.recipe), ""])


@pytest.mark.parametrize(
    "filled",
    [
        "[]",
        "{",
        "[" * 100_000,
        '{"a": 1' + "0" * 5_000 + "}",
        json.dumps({"a." * 5_000: 1}),
        json.dumps("x" * 500_000),
    ],
)
def test_a_filled_recipe_that_is_none_is_refused(filled: str) -> None:
    run = Run()
    with raises(PeerError, Code.RECIPE_DIFFERS, names="p1") as caught:
        run.join("p1", filled_json=filled)
    assert len(caught.value.public) < 300


def test_releases_agree_on_the_smallest_protocol() -> None:
    run = Run()
    members = [run.join("p0", protocol=8, oldest=7), run.join("p1", protocol=9, oldest=8)]
    refused = run.coordinator.open("p2")
    with raises(PeerError, Code.PROTOCOL_DIFFERS):
        run.join("p2", member=refused, protocol=7)
    members.append(run.join("p2", member=refused, protocol=8, oldest=7))
    assert [told(each)[-1][1].protocol for each in members] == [8, 8, 8]
    run = Run()
    members = [
        run.join("p0", protocol=8, oldest=7),
        run.join("p1", protocol=7),
        run.join("p2", protocol=8, oldest=7),
    ]
    assert [told(each)[-1][1].protocol for each in members] == [7, 7, 7]
    with raises(PeerError, Code.PROTOCOL_DIFFERS):
        admit("p1", join_of(8, 8), run.recipe, "train", {"p0": join_of(7, 0)})
    with raises(PeerError, Code.PROTOCOL_DIFFERS):
        admit("p1", join_of(7, 0), run.recipe, "train", {}, oldest=8)
    for protocol, oldest in ((6, 0), (9, 9), (0, 0)):
        with raises(PeerError, Code.PROTOCOL_DIFFERS):
            admit("p1", join_of(protocol, oldest), run.recipe, "train", {})


def join_of(protocol: int, oldest: int) -> control_pb2.Join:
    said = Run().recipe.canonical_json()
    return control_pb2.Join(
        role="passive", protocol=protocol, oldest=oldest, recipe_json=said, job="train"
    )


def test_those_who_wait_hear_at_once_who_was_refused_and_why_and_each_reason_once() -> None:
    run = Run(join_deadline_s=20.0, lost_after_s=60.0)
    run.stand_still()
    members = [run.join("p0"), run.join("p1")]
    for member in members:
        told(member)
    refused = run.coordinator.open("p2")
    for _ in range(50):
        with pytest.raises(PeerError) as caught:
            run.join("p2", member=refused, recipe_json="{}")
        run.coordinator.note_refusal("p2", caught.value)
    for member in members:
        ((kind, waiting),) = told(member)
        assert (kind, list(waiting.missing)) == ("waiting", ["p2"])
        assert [(each.party, each.code) for each in waiting.refused] == [
            ("p2", Code.RECIPE_DIFFERS)
        ]
    run.coordinator.note_refusal("p2", PeerError(Code.PROTOCOL_DIFFERS, "secret", party="p2"))
    run.coordinator.note_refusal("eve", PeerError(Code.NOT_IN_RECIPE, "eve", party="eve"))
    # It is here.
    run.coordinator.note_refusal("p1", PeerError(Code.NAME_TAKEN, "p1", party="p1"))
    ((_, waiting),) = told(members[0])
    assert [(each.party, each.code) for each in waiting.refused] == [("p2", Code.PROTOCOL_DIFFERS)]
    assert "secret" not in str(waiting)
    whys = [facts["why"] for event, facts in run.events if event == "waiting" and "why" in facts]
    assert whys == [
        "p2 was refused: its recipe differs from the server's",
        "p2 was refused: it speaks another version of the protocol",
    ]

    run.pass_time(20.0)
    assert_names(str(run.coordinator.failure), "p2", "20")


def test_who_comes_after_a_refusal_is_refused_no_more() -> None:
    run = Run()
    first = run.join("p0")
    run.coordinator.note_refusal("p1", PeerError(Code.RECIPE_DIFFERS, "x", party="p1"))
    run.join("p1")
    assert not told(first)[-1][1].refused
    run.pass_time(61.0, first)
    assert [list(message.refused) for _, message in told(first)] == [[]]


def test_a_question_is_answered_as_the_joining_and_leaves_nothing() -> None:
    run = Run()
    run.join("p0", plugins={"vfl.codecs:mine": "pack 1.0"})
    events, before = list(run.events), run.coordinator.status()

    def ask(name: str, **changes: Any) -> None:
        role = "active" if name == "p0" else "passive"
        recipe = run.recipe.canonical_json()
        plain: dict[str, Any] = {
            "role": role,
            "protocol": PROTOCOL,
            "recipe_json": recipe,
            "job": "train",
        }
        run.coordinator.ask(name, control_pb2.Join(**plain | changes))

    ask("p1")
    # Who has joined already, too.
    ask("p0")
    for changes, code in REFUSED.values():
        # It asks for any.
        if "job" not in changes:
            with raises(PeerError, code):
                ask("p1", **changes)
    with raises(PeerError, Code.PLUGINS_DIFFER, names=("vfl.codecs", "p1")):
        ask("p1", plugins={"vfl.codecs:mine": "pack 2.0"})
    with raises(PeerError, Code.NOT_IN_RECIPE, names=("p0", "p1")):
        ask("eve")
    after = run.coordinator.status()
    assert run.events == events
    assert (after.state, after.joined, list(after.silent_s)) == (
        before.state,
        before.joined,
        list(before.silent_s),
    )
    run.join("p1")
    run.join("p2")
    # While the run is under way.
    ask("p1")
    assert run.coordinator.state is RunState.RUNNING


def test_the_version_of_a_party_is_told_and_kept() -> None:
    run = Run()
    run.join("p1", version="1.2.3\n")
    assert run.coordinator.parties()[0].version == "1.2.3"
    assert ("joined", "1.2.3") in [(event, facts.get("version")) for event, facts in run.events]
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p2", "200")):
        run.join("p2", version="1" * 201)


def test_all_predict_with_one_trained_run() -> None:
    run = Run(job="predict")
    run.join("p0", job="predict", run_id="monday")
    with raises(PeerError, Code.RECIPE_DIFFERS, names="p1"):
        run.join("p1", job="predict", run_id="tuesday")


def test_the_run_is_complete_when_all_have_reported() -> None:
    run, members = begun()
    for name in ("p1", "p0"):
        run.report(members[name])
        assert not run.coordinator.finished.is_set()
    run.report(members["p2"], steps=7)
    assert run.coordinator.finished.is_set()
    assert run.coordinator.state is RunState.COMPLETED
    assert {name: report.steps for name, report in run.coordinator.reports.items()} == {
        "p0": 5,
        "p1": 5,
        "p2": 7,
    }
    assert [(p.name, p.role, p.pid, p.steps) for p in run.coordinator.parties()] == [
        ("p0", "active", 100, 5),
        ("p1", "passive", 101, 5),
        ("p2", "passive", 102, 7),
    ]
    run.coordinator.complete("{}")
    for name, text in (("p0", "{}"), ("p1", ""), ("p2", "")):
        (complete, end) = told(members[name])
        assert (complete[0], complete[1].summary_json) == ("complete", text)
        assert end == ("end", None)


def test_the_summary_has_devices_by_name_and_the_memory_of_gpus() -> None:
    run = Run()
    hardware = {"p0": ("cuda:0", "NVIDIA H100\n80GB"), "p1": ("cpu", "Xeon"), "p2": ("cpu", "Xeon")}
    members = {
        name: run.join(name, device=device, device_name=text)
        for name, (device, text) in hardware.items()
    }
    for name, member in members.items():
        report = control_pb2.Report(steps=5, wall_s=1.5)
        if name == "p0":
            report.peak_memory_bytes = 2**33
        run.say(member, report=report)
    found = [(p.device, p.device_name, p.peak_memory_bytes) for p in run.coordinator.parties()]
    assert found == [
        ("cuda:0", "NVIDIA H100 80GB", 2**33),
        ("cpu", "Xeon", None),
        ("cpu", "Xeon", None),
    ]
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p1", "200")):
        Run().join("p1", device_name="x" * 201)


def test_reports_outlive_their_parties() -> None:
    """A party that ends, or is killed, right after the last report: the run is complete all the
    same.
    """
    run, members = begun()
    for member in members.values():
        run.report(member)
    for member in members.values():
        run.coordinator.end_session(member)
    assert set(run.coordinator.reports) == set(ROSTER)
    assert [party.steps for party in run.coordinator.parties()] == [5, 5, 5]
    assert run.coordinator.state is RunState.COMPLETED
    assert run.coordinator.generation == 1
    run.coordinator.complete("{}")
    run.coordinator.wait_until_empty(0.0)


@pytest.mark.parametrize(
    "privacy", ["{", '{"epsilon": 1}', '{"epsilon": "' + "9" * 20 + "x" + '"}', "[]"]
)
def test_a_report_whose_privacy_cannot_be_read_ends_the_run(privacy: str) -> None:
    run, members = begun()
    run.say(members["p0"], report=control_pb2.Report(privacy_json=privacy))
    assert run.coordinator.state is RunState.FAILED
    assert_names(str(run.coordinator.failure), "p0")


def test_a_report_with_a_number_that_no_float_holds_ends_the_run() -> None:
    run, members = begun()
    metrics = '{"test": {"loss": 1' + "0" * 400 + "}}"
    run.say(members["p0"], report=control_pb2.Report(metrics_json=metrics))
    assert_names(str(run.coordinator.failure), "p0")


def test_a_report_before_an_interruption_does_not_count_after_it() -> None:
    run, members = begun()
    run.report(members["p0"])
    run.report(members["p1"])
    run.coordinator.end_session(members["p2"])
    members |= {"p2": run.join("p2")}
    for name in ("p0", "p1"):
        run.join(name, member=members[name])
    run.report(members["p2"])
    assert run.coordinator.state is RunState.RUNNING
    run.report(members["p0"])
    run.report(members["p1"])
    assert run.coordinator.state is RunState.COMPLETED


def vouch(run: Run, active: Member) -> None:
    run.say(active, alone=control_pb2.Alone())


def free(member: Member, run: Run, *labels: str) -> None:
    report = control_pb2.Report(steps=3, wall_s=1.0, free_from=labels)
    run.say(member, report=report)


def test_a_passive_party_that_was_alone_at_the_end_may_go() -> None:
    run, members = begun()
    # It was not alone.
    free(members["p1"], run, END)
    free(members["p2"], run, END, BEFORE)
    # Its own word is not enough.
    assert kinds(members["p2"]) == []
    # Nor a passive party's.
    vouch(run, members["p1"])
    assert kinds(members["p2"]) == []
    vouch(run, members["p0"])
    assert kinds(members["p2"]) == ["complete", "end"]
    assert ("left", {"party": "p2"}) in run.events
    assert run.coordinator.state is RunState.RUNNING
    # The active party stays: it gets the summary.
    free(members["p0"], run, END, BEFORE)
    assert kinds(members["p0"]) == kinds(members["p1"]) == []
    assert run.coordinator.state is RunState.COMPLETED
    assert set(run.coordinator.reports) == set(ROSTER)


def test_the_run_goes_on_without_those_who_left_also_after_another_was_lost() -> None:
    run, members = begun()
    vouch(run, members["p0"])
    free(members["p2"], run, END, BEFORE)
    run.coordinator.end_session(members["p2"])
    assert run.coordinator.state is RunState.RUNNING
    with raises(PeerError, Code.NAME_TAKEN, names="p2"):
        run.join("p2")
    assert run.coordinator.state is RunState.RUNNING
    run.coordinator.end_session(members["p1"])
    assert run.coordinator.state is RunState.WAITING
    run.join("p0", BEFORE, member=members["p0"])
    again = run.join("p1", EARLY, BEFORE)
    assert run.started == [(1, ""), (2, BEFORE)]
    ((_, start),) = [each for each in told(again) if each[0] == "start"]
    assert list(start.left) == ["p2"]
    run.report(members["p0"])
    run.report(again)
    assert run.coordinator.state is RunState.COMPLETED
    assert [party.name for party in run.coordinator.parties()] == list(ROSTER)


def test_who_left_and_is_needed_again_is_named() -> None:
    run, members = begun()
    vouch(run, members["p0"])
    free(members["p2"], run, END, BEFORE)
    run.coordinator.end_session(members["p0"])
    run.join("p1", EARLY, BEFORE, member=members["p1"])
    active = run.join("p0", EARLY)
    ((_, waiting),) = [each for each in told(active) if each[0] == "waiting"]
    assert list(waiting.missing) == ["p2"]
    run.join("p2", EARLY)
    assert run.started == [(1, ""), (2, EARLY)]


def test_a_server_that_is_started_again_knows_who_has_left(tmp_path: Path) -> None:
    departures = Departures(tmp_path / "left.json")
    run = Run(on_leave=departures.add)
    assert departures.read() == {}
    members = run.begin()
    vouch(run, members["p0"])
    for name in ("p1", "p2"):
        free(members[name], run, END, BEFORE)
    found = departures.read()
    assert list(found) == ["p1", "p2"]
    assert all(list(left.report.free_from) == [END, BEFORE] for left in found.values())
    assert [left.identity.pid for left in found.values()] == [101, 102]
    for damage in (b'{"p1": {"identity": 3}}', b"[" * 100_000, b"\xff"):
        (tmp_path / "left.json").write_bytes(damage)
        with raises(InputError, Code.FILE_INVALID):
            departures.read()
    (tmp_path / "left.json").unlink()
    (tmp_path / "left.json").mkdir()
    with raises(InputError, Code.FILE_INVALID):
        departures.read()


def test_seconds_count_from_the_first_start_also_of_an_earlier_process() -> None:
    run, again = Run(), Run(ran_s=60.0)
    assert run.coordinator.status().wall_s == 0
    for each in (run, again):
        each.begin()
    assert 0 < run.coordinator.status().wall_s < 60 < again.coordinator.status().wall_s


def test_a_party_that_stops_stops_the_run_and_the_others_learn_whose_fault_it_was() -> None:
    run, members = begun()
    code: Any = Code.TENSOR_MISMATCH
    abort = failure_pb2.Failure(code=code, message="z has another shape", party="p2")
    run.say(members["p0"], abort=abort)
    failure = run.coordinator.failure
    assert isinstance(failure, PeerError)
    assert (failure.code, failure.party) == (Code.TENSOR_MISMATCH, "p2")
    for member in members.values():
        stop, _ = told(member)
        assert (stop[1].code, stop[1].party) == (Code.TENSOR_MISMATCH, "p2")
        assert_names(stop[1].message, "another")
    # A second one changes nothing.
    run.say(members["p1"], abort=abort)
    assert run.coordinator.failure is failure


def test_who_joins_after_the_end_hears_how_the_run_has_ended() -> None:
    run, members = begun()
    run.coordinator.fail(PeerError(Code.NON_FINITE, "p2 sent NaN", party="p2"))
    for member in members.values():
        run.coordinator.end_session(member)
    for name in ROSTER:
        stop, end = told(run.join(name))
        assert (stop[0], stop[1].message, end[0]) == ("stop", "p2 sent NaN", "end")
    assert len(run.started) == 1


def test_who_joins_while_the_summary_is_made_hears_that_the_run_is_complete() -> None:
    run, members = begun()
    for member in members.values():
        run.report(member)
    for member in members.values():
        run.coordinator.end_session(member)
    again = [run.join(name) for name in ROSTER]
    assert [kinds(member) for member in again] == [[], [], []]
    run.coordinator.complete("{}")
    assert [kinds(member) for member in again] == [["complete", "end"]] * 3
    assert len(run.started) == 1


@pytest.mark.parametrize("code", [Code.STEP_TIMEOUT, Code.PARTY_LOST])
def test_who_repeats_that_another_is_late_is_not_named_for_it(code: Code) -> None:
    run, members = begun()
    late = failure_pb2.Failure(code=code, message="p2 took longer than 5 s", party="p2")  # type: ignore[arg-type]
    # Has heard it from the active party.
    run.say(members["p1"], abort=late)
    assert run.coordinator.failure is None
    run.say(members["p0"], abort=late)
    failure = run.coordinator.failure
    assert failure is not None
    assert (failure.code, failure.party) == (code, "p2")


@pytest.mark.parametrize("missed", ["p0", "p1", "server", "", "nobody"])
def test_a_passive_party_may_say_that_it_misses_those_with_whom_it_exchanges(missed: str) -> None:
    run, members = begun()
    lost = failure_pb2.Failure(code=Code.PARTY_LOST, message="p1 could not reach it", party=missed)  # type: ignore[arg-type]
    run.say(members["p1"], abort=lost)
    failure = present(run.coordinator.failure)
    assert (failure.code, failure.party) == (Code.PARTY_LOST, "p1")


@pytest.mark.parametrize("code", [0, 12345])
def test_an_abort_with_a_code_that_is_not_known(code: int) -> None:
    run, members = begun()
    abort = failure_pb2.Failure(code=code, message="x" * 10_000)  # type: ignore[arg-type]
    run.say(members["p1"], abort=abort)
    failure = present(run.coordinator.failure)
    assert (failure.code, failure.party, len(failure.public)) == (Code.INTERNAL, "p1", 500)


def test_messages_of_a_session_that_was_replaced_are_of_no_account() -> None:
    run = Run()
    older = run.join("p1")
    run.coordinator.end_session(older)
    run.join("p0")
    run.join("p2")
    run.join("p1", member=older)
    assert run.coordinator.state is RunState.WAITING
    abort = failure_pb2.Failure(code=Code.INTERNAL)  # type: ignore[arg-type]
    run.say(older, abort=abort)
    assert run.coordinator.failure is None


def test_progress_is_that_of_who_is_furthest_behind() -> None:
    run, members = begun()

    def tell(name: str, round_: int, phase: str = "splitnn") -> None:
        progress = control_pb2.Progress(
            phase=phase, round=round_, rounds=3, steps=5, metrics={"loss": round_ / 10}
        )
        run.say(members[name], progress=progress)

    def shown() -> list[tuple[int, dict[str, float], list[str]]]:
        facts = [facts for event, facts in run.events if event == "progress"]
        return [(each["round"], each["metrics"], list(each["parties"])) for each in facts]

    # The active party is idle.
    tell("p1", 2)
    tell("p2", 1)
    # p2 is still at its first round.
    tell("p1", 3)
    assert shown() == [(2, {}, ["p1"]), (1, {}, ["p1", "p2"])]
    tell("p0", 2)
    tell("p2", 3)
    tell("p0", 3)
    assert shown()[2:] == [
        (2, {"loss": 0.2}, ["p0", "p1", "p2"]),
        (3, {"loss": 0.3}, ["p0", "p1", "p2"]),
    ]
    tell("p1", 1, phase="nonsense")
    assert len(shown()) == 4


def note(run: Run, member: Member, text: str, round_: int = 0) -> None:
    progress = control_pb2.Progress(phase="splitnn", round=round_, rounds=9_999, note=text)
    run.say(member, progress=progress)


def test_the_notes_of_a_party_and_progress_are_limited_and_the_last_progress_is_shown() -> None:
    run, members = begun()
    for number in range(3_000):
        note(run, members["p1"], f"note {number}", number)
    note(run, members["p2"], "an honest one")
    for member in members.values():
        run.report(member)
    assert run.coordinator.state is RunState.COMPLETED
    notes = [facts for event, facts in run.events if event == "note"]
    assert [facts["note"] for facts in notes[:5]] == [f"note {number}" for number in range(5)]
    assert len(notes) < 50
    assert notes[-1] == {"party": "p2", "note": "an honest one"}
    shown = [facts["round"] for event, facts in run.events if event == "progress"]
    assert len(shown) < 500
    assert run.coordinator.status().round in shown


def test_progress_that_came_too_soon_is_shown_a_little_later() -> None:
    run, members = begun()
    for round_ in range(200):
        note(run, members["p1"], "", round_)

    def last_is_shown() -> bool:
        run.coordinator.tick()
        return bool(run.events[-1][1]["round"] == 199)

    wait_until(last_is_shown)
    run.coordinator.tick()
    shown = [facts["round"] for event, facts in run.events if event == "progress"]
    # None twice.
    assert shown == sorted(set(shown))
    assert len(shown) < 200


def test_metrics_have_an_order() -> None:
    names = [
        f"{split} {name}"
        for split in ("test", "train", "validation")
        for name in ("accuracy", "auc", "loss")
    ]
    progress = control_pb2.Progress(metrics=dict.fromkeys(reversed(names), 0.5))
    assert list(get_metrics(progress)) == names


def test_a_rate_lets_some_through_at_once_then_one_at_a_time() -> None:
    rate = Rate(1.0, 3)
    assert [rate.passes("a", 10.0) for _ in range(5)] == [0, 0, 0, None, None]
    # Another sender's.
    assert rate.passes("b", 10.0) == 0
    assert [rate.passes("a", now_s) for now_s in (10.9, 11.0, 11.1, 12.0)] == [None, 3, None, 1]
    assert [rate.passes("a", 99.0) for _ in range(4)] == [0, 0, 0, None]
    assert (append_held_count("x", 0), append_held_count("x", 37)) == ("x", "x (and 37 more)")


class Context:
    """A call of somebody with a certificate for ``name``."""

    def __init__(self, name: str) -> None:
        self._name = name.encode()

    def auth_context(self) -> dict[str, list[bytes]]:
        pem = credentials(self._name.decode()).certificate_pem
        return {"x509_subject_alternative_name": [self._name], "x509_pem_cert": [pem]}


def test_a_refused_stranger_is_in_the_log_and_learns_no_names(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run()
    service = ControlService(run.coordinator, keyring("server"), Ledger(), TcpMeter())
    for _ in range(100):
        (data,) = service._session(iter([]), Context("eve"))
        stop = control_pb2.ServerMessage.FromString(data).stop
        assert stop.code == Code.NOT_IN_RECIPE
        assert not any(name in stop.message for name in ROSTER)
    assert service.refusals.counts() == {"NOT_IN_RECIPE": 100}
    assert len(caplog.records) == 5
    assert caplog.records[0].levelname == "WARNING"
    line = json.loads(JsonLines(party="server").format(caplog.records[0]))
    assert (line["event"], line["party_"], line["code"]) == ("refused", "eve", "NOT_IN_RECIPE")
    assert "(parties: p0, p1, p2)" in line["message"]


def test_a_refused_join_is_in_the_log_and_on_the_screen(caplog: pytest.LogCaptureFixture) -> None:
    run = Run()
    shown: list[tuple[str, dict[str, Any]]] = []
    service = ControlService(
        run.coordinator,
        keyring("server"),
        Ledger(),
        TcpMeter(),
        lambda event, **facts: shown.append((event, facts)),
    )
    member = run.coordinator.open("p1")
    join = control_pb2.PartyMessage(join=control_pb2.Join(role="active", protocol=PROTOCOL))
    service._read(member, iter([join.SerializeToString()]))
    (record,) = caplog.records
    assert_names(record.getMessage(), "active", "p1")
    why = "p1 joins as 'active'; in the recipe it is passive"
    assert shown == [("refused", {"party": "p1", "code": "ROLE_MISMATCH", "why": why})]


class Call(Context):
    """A session's call, which somebody else ends."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def add_callback(self, _callback: Any) -> bool:
        return True


@pytest.mark.parametrize("end", ["stopped", "failed", "complete"])
def test_a_session_lasts_until_its_party_has_read_the_last_word(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may exit when all sessions have ended, and would take along what the parties have
    not read.
    """
    monkeypatch.setattr("vfl_server.control.service._LAST_WORD_S", 30.0)
    run = Run()
    service = ControlService(run.coordinator, keyring("server"), Ledger(), TcpMeter())
    member, hangs_up = run.begin()["p1"], threading.Event()
    told: queue.SimpleQueue[control_pb2.ServerMessage] = queue.SimpleQueue()

    def requests() -> Iterator[bytes]:
        hangs_up.wait(30.0)
        yield from ()

    def session() -> None:
        for data in service._serve_session(member, requests(), Call("p1")):
            told.put(control_pb2.ServerMessage.FromString(data))

    thread = threading.Thread(target=session, daemon=True)
    thread.start()
    if end == "stopped":
        run.coordinator.stop()
    elif end == "failed":
        run.coordinator.fail(LostError(Code.PARTY_LOST, "p2 did not come", party="p2"))
    else:
        run.coordinator.complete("{}")
    said = "interrupt" if end == "stopped" else "stop" if end == "failed" else "complete"
    while (message := told.get(timeout=30.0)).WhichOneof("body") != said:
        pass
    assert not message.HasField("interrupt") or message.interrupt.leaving
    thread.join(0.2)
    assert thread.is_alive()
    hangs_up.set()
    thread.join(30.0)
    assert not thread.is_alive()


def test_a_party_that_does_not_hang_up_holds_its_session_for_a_moment_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vfl_server.control.service._LAST_WORD_S", 0.1)
    run = Run()
    service = ControlService(run.coordinator, keyring("server"), Ledger(), TcpMeter())
    member = run.join("p1")
    run.coordinator.fail(LostError(Code.PARTY_LOST, "p2 did not come", party="p2"))
    silence = threading.Event()
    bodies = [
        control_pb2.ServerMessage.FromString(data).WhichOneof("body")
        for data in service._serve_session(member, iter(silence.wait, True), Call("p1"))  # type: ignore[arg-type]
    ]
    assert bodies[-1] == "stop"
    silence.set()


def test_a_revoked_party_may_not_end_the_run() -> None:
    run = Run()
    member = run.begin()["p1"]
    service = ControlService(run.coordinator, keyring("server"), Ledger(), TcpMeter())
    revoked = PeerError(Code.CERTIFICATE_INVALID, "the certificate of p1 is revoked", party="p1")
    abort = control_pb2.PartyMessage(abort=to_failure(revoked))
    service._read(member, iter([abort.SerializeToString()]), Mock(side_effect=revoked))
    assert run.coordinator.failure is None


TOLD = {"a": ("two", 1), "p": ("one", 2), "q": ("one", 1)}


@pytest.mark.parametrize(
    ("change", "want"),
    [
        # The others are late, and the active party goes on without them.
        ({}, "a"),
        # The active party has finished this phase.
        ({"a": ("one", 3)}, "q"),
        ({"a": ("one", 0)}, "a"),
        ({"a": ("one", 0), "p": ("two", 1)}, "a"),
        ({"a": ("one", 3), "p": ("two", 1)}, "q"),
        ({"a": ("one", 3), "p": ("two", 1), "q": ("one", 3)}, "p"),
        # Who tells.
        ({"a": ("one", 3), "p": ("one", 3), "q": ("one", 3)}, "p"),
        ({"a": ("two", 3), "p": ("one", 2), "q": ("one", 3)}, None),
        ({"a": ("one", 3), "p": ("nonsense", 1), "q": ("one", 3)}, None),
    ],
)
def test_the_pace_is_that_of_who_is_at_work(
    change: dict[str, tuple[str, int]], want: str | None
) -> None:
    told = {
        name: control_pb2.Progress(phase=phase, round=round_, rounds=3)
        for name, (phase, round_) in (TOLD | change).items()
    }
    assert find_slowest(told, ("one", "two"), "a", "p") == want


def test_a_failure_of_the_server_reaches_everyone_without_its_private_text() -> None:
    run, members = begun()
    run.coordinator.fail(InternalError("/srv/secret"))
    for member in members.values():
        stop, _ = told(member)
        assert stop[1].message == CATALOGUE[Code.INTERNAL].public


def test_a_partys_ledger_is_what_it_reported() -> None:
    report = control_pb2.Report()
    report.ledger.add(
        peer="p0", phase="a", kind="ack", direction="sent", message_bytes=5, messages=1
    )
    report.ledger.add(
        peer="p0", phase="a", kind="ack", direction="received", payload_bytes=4, message_bytes=5
    )
    report.tcp.add(peer="p0", sent_bytes=1, received_bytes=2)
    entries, kernel = ledger_of(report)
    assert [(entry.direction, entry.message_bytes) for entry in entries] == [
        ("sent", 5),
        ("received", 5),
    ]
    assert [(count.peer, count.sent_bytes, count.received_bytes) for count in kernel] == [
        ("p0", 1, 2)
    ]


# -- plans


def test_the_aggregation_begins_once_all_have_said_what_they_plan() -> None:
    run, members = begun()
    for name in ("p2", "p0"):
        run.plan(members[name], rounds=3)
        assert run.planned == []
    run.plan(members["p1"], rounds=3)
    ((generation, checkpoint, (agreed,)),) = run.planned
    assert (generation, checkpoint) == (1, "")
    assert (agreed.phase, agreed.rounds) == (run.recipe.phases[0].name, 3)


def test_plans_that_differ_end_the_run() -> None:
    run, members = begun()
    for name, rounds in (("p0", 3), ("p1", 3), ("p2", 4)):
        run.plan(members[name], rounds=rounds)
    assert run.coordinator.state is RunState.FAILED
    assert run.coordinator.failure is not None
    assert run.coordinator.failure.code is Code.MODELS_DIFFER
    assert_names(str(run.coordinator.failure), "p0", "p2")
    assert run.planned == []


def test_a_plan_that_makes_no_sense_is_refused() -> None:
    run, members = begun()
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p1", "1000000")):
        run.plan(members["p1"], rounds=0)


def test_a_new_generation_asks_for_new_plans() -> None:
    run, members = begun()
    for member in members.values():
        run.plan(member)
    run.coordinator.end_session(members["p2"])
    # Sent before it heard that its generation had ended.
    run.plan(members["p0"], rounds=1)
    for name in ROSTER:
        members[name] = run.join(name, member=members[name] if name != "p2" else None)
    run.plan(members["p1"], rounds=2)
    run.plan(members["p2"], rounds=2)
    assert [generation for generation, _, _ in run.planned] == [1]
    run.plan(members["p0"], rounds=2)
    assert [(generation, len(agreed)) for generation, _, agreed in run.planned] == [(1, 0), (2, 1)]


def test_a_party_that_never_says_what_it_plans_ends_the_run() -> None:
    run, members = begun(step_timeout_s=5.0, lost_after_s=60.0)
    run.plan(members["p0"])
    run.plan(members["p2"])

    run.pass_time(5.5)
    failure = run.coordinator.failure
    assert isinstance(failure, LostError)
    assert (failure.code, failure.party) == (Code.STEP_TIMEOUT, "p1")
    assert_names(str(failure), "p1")


def test_a_second_plan_is_refused_and_starts_nothing() -> None:
    run, members = begun()
    for member in members.values():
        run.plan(member, rounds=2)
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        run.plan(members["p1"], rounds=2)
    assert len(run.planned) == 1


def test_a_session_that_never_joined_interrupts_nothing() -> None:
    """One that has left is started again, for example: it is refused, and goes."""
    run, members = begun()
    vouch(run, members["p0"])
    free(members["p2"], run, END, BEFORE)
    again = run.coordinator.open("p2")
    run.coordinator.end_session(again)
    assert run.coordinator.state is RunState.RUNNING
    run.coordinator.end_session(members["p1"])
    assert run.coordinator.state is RunState.WAITING
    assert run.coordinator.generation == 1
    # Nor does it start with the others: it has not joined.
    again = run.coordinator.open("p2")
    run.join("p0", BEFORE, member=members["p0"])
    run.join("p1", BEFORE)
    assert run.started == [(1, ""), (2, BEFORE)]
    assert kinds(again) == []

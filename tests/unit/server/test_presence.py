"""Presence: tables of what is known, what happens and when, and what is decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vfl_common.errors import Code
from vfl_server.control.presence import (
    Action,
    Admission,
    Claim,
    Close,
    Fail,
    Interrupt,
    PartyRecord,
    PartyState,
    Presence,
    Review,
    Tell,
)
from vfl_server.control.run import PresenceRules, RunState

AWAITED, IN, LATE, AWAY, GONE = PartyState
RUNNING, WAITING = RunState.RUNNING, RunState.WAITING
RULES = PresenceRules(
    ("p0", "p1", "p2"),
    "p0",
    learns=False,
    trains=True,
    aligns=False,
    heartbeat_s=2.0,
    lost_after_s=10.0,
    join_deadline_s=100.0,
    rejoin_deadline_s=30.0,
    step_timeout_s=20.0,
    server_absent_s=60.0,
)
END, BEFORE = "000005.head.2", "000004.head.1"


def known(
    *places: PartyState, rules: PresenceRules = RULES, state: RunState = RUNNING, **fields: Any
) -> Presence:
    """What is known at 0 s of p0, p1 and p2, at these places: all have planned, and those that are
    in have a session.
    """
    presence = Presence(rules, 0.0, state=state, **{"agreed": True} | fields)
    for name, place in zip(RULES.roster, places, strict=True):
        presence.parties[name] = PartyRecord(
            place, heard_s=0.0 if place is IN else None, planned=True, offers=("",)
        )
        if place is GONE:
            presence.parties[name].free_from = (END, BEFORE)
    return presence


def places(presence: Presence) -> tuple[PartyState, ...]:
    return tuple(party.place for party in presence.parties.values())


def interrupted(name: str, how: str) -> tuple[Action, ...]:
    return Close(name), Interrupt(f"{name} {how}", (name,)), Tell("lost", name, how), Review()


ALL_IN = (IN, IN, IN)
ALL_AWAITED = (AWAITED, AWAITED, AWAITED)
GOES_ON = {"goes_on": True}
LENIENT = {"lenient": True}
LEARNS = {"rules": replace(RULES, learns=True)}

# {case: (places, what else is known, who is lost, whether it may return, actions, places after)}
LOSSES: dict[str, tuple[Any, dict[str, Any], str, bool, tuple[Action, ...], Any]] = {
    "it interrupts": (ALL_IN, {}, "p1", True, interrupted("p1", "x"), ALL_AWAITED),
    "without the server the others go on": (
        *(ALL_IN, GOES_ON, "p1", True),
        *((Close("p1"), Tell("lost", "p1", "x")), (IN, LATE, IN)),
    ),
    "it was stopped, and does not go on": (
        *(ALL_IN, GOES_ON, "p1", False, interrupted("p1", "x"), ALL_AWAITED),
    ),
    "the others do without it": (
        *(ALL_IN, LENIENT, "p1", True),
        *((Close("p1"), Tell("away", "p1", "x")), (IN, AWAY, IN)),
    ),
    "and rather so than wait for its return": (
        *(ALL_IN, LENIENT | GOES_ON, "p1", True),
        *((Close("p1"), Tell("away", "p1", "x")), (IN, AWAY, IN)),
    ),
    "nobody does without the active party": (
        *(ALL_IN, LENIENT, "p0", True, interrupted("p0", "x"), ALL_AWAITED),
    ),
    "the last passive party is needed": (
        *((IN, IN, AWAY), LENIENT, "p1", True, interrupted("p1", "x"), ALL_AWAITED),
    ),
    "unless the active party has features": (
        *((IN, IN, AWAY), LENIENT | LEARNS, "p1", True),
        *((Close("p1"), Tell("away", "p1", "x")), (IN, AWAY, AWAY)),
    ),
    "before the plans are agreed nobody does without another": (
        *(ALL_IN, LENIENT | {"agreed": False}, "p1", True),
        *(interrupted("p1", "x"), ALL_AWAITED),
    ),
    "while all wait": (
        *((IN, IN, AWAITED), {"state": WAITING}, "p1", True),
        *((Close("p1"), Tell("lost", "p1", "x"), Review()), (IN, AWAITED, AWAITED)),
    ),
    "of one that has not joined": (
        *((IN, LATE, IN), GOES_ON, "p1", True, (Close("p1"),), (IN, LATE, IN)),
    ),
    "of one that has left": ((IN, IN, GONE), {}, "p2", True, (Close("p2"),), (IN, IN, GONE)),
    "after the end": (
        *(ALL_IN, {"state": RunState.FAILED}, "p1", True, (Close("p1"),), (IN, AWAITED, IN)),
    ),
}


@pytest.mark.parametrize("case", LOSSES)
def test_what_the_end_of_a_session_means(case: str) -> None:
    before, fields, name, may_return, actions, after = LOSSES[case]
    presence = known(*before, **fields)
    assert presence.lose(name, "x", 5.0, may_return=may_return) == actions
    assert places(presence) == after
    assert presence.parties[name].heard_s is None
    ended = any(isinstance(action, Interrupt) for action in actions)
    assert presence.interruptions == ended
    if ended:
        assert (presence.state, presence.waiting_since_s, presence.deadline_s) == (WAITING, 5, 30)
        assert not presence.lenient


def test_a_report_is_forgotten_with_its_session_and_with_its_generation() -> None:
    presence = known(*ALL_IN, goes_on=True)
    for name in RULES.roster:
        presence.note_report(name, ())
    presence.lose("p1", "x", 1.0, may_return=True)
    assert not presence.complete()
    presence.lose("p2", "x", 1.0)
    assert [party.free_from for party in presence.parties.values()] == [None] * 3


def test_what_has_reported_is_not_dispensable() -> None:
    presence = known(*ALL_IN, lenient=True)
    presence.note_report("p1", ())
    assert isinstance(presence.lose("p1", "x", 1.0)[1], Interrupt)


SILENT = "has been silent for 10 s"
NOT_BACK = "did not come back within 10 s"
UNPLANNED = "did not send a plan in time"

# {case: (places, what else is known, {party: changes of what is known of it}, now, actions)}
TICKS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], float, list[Action]]] = {
    "nobody is silent yet": (ALL_IN, {}, {}, 10.0, []),
    "one is silent": (
        *(ALL_IN, {}, {"p0": {"heard_s": 9.0}, "p2": {"heard_s": 9.0}}, 10.1),
        [*interrupted("p1", SILENT)],
    ),
    "two are silent, which is one interruption": (
        *(ALL_IN, {}, {"p0": {"heard_s": 9.0}}, 10.1),
        [*interrupted("p1", SILENT), Close("p2")],
    ),
    "one is late, and may still come": ((IN, LATE, IN), GOES_ON, {}, 4.0, []),
    "one has not come back": (
        *((IN, LATE, LATE), GOES_ON, {"p0": {"heard_s": 9.0}, "p1": {"since_s": 1.0}}, 10.5),
        [Interrupt(f"p2 {NOT_BACK}", ("p2",))],
    ),
    "two have not come back": (
        *((IN, LATE, LATE), GOES_ON, {"p0": {"heard_s": 9.0}}, 10.5),
        [Interrupt(f"p1, p2 {NOT_BACK}", ("p1", "p2"))],
    ),
    "one has not come back, and the others do without it": (
        *((IN, LATE, IN), GOES_ON | LENIENT),
        *({"p0": {"heard_s": 9.0}, "p2": {"heard_s": 9.0}}, 10.5),
        [Tell("away", "p1", NOT_BACK)],
    ),
    "one has come back to the others, and plans nothing": (
        *(ALL_IN, LENIENT, {"p1": {"planned": False}}, 20.5),
        [Close("p1"), Tell("away", "p1", UNPLANNED)],
    ),
}


@pytest.mark.parametrize("case", TICKS)
def test_what_a_tick_finds(case: str) -> None:
    before, fields, changes, now_s, actions = TICKS[case]
    presence = known(*before, **fields)
    for name, party in presence.parties.items():
        if now_s > 20.0:
            party.heard_s = now_s
        for key, value in changes.get(name, {}).items():
            setattr(party, key, value)
    assert list(presence.tick(now_s)) == actions


@pytest.mark.parametrize(("aligns", "limit_s"), [(False, 20.0), (True, 40.0)])
def test_who_does_not_plan_in_time_ends_the_run(aligns: bool, limit_s: float) -> None:
    presence = known(*ALL_IN, rules=replace(RULES, aligns=aligns, lost_after_s=100.0), agreed=False)
    for name in ("p1", "p2"):
        presence.parties[name].planned = False
    presence.parties["p2"].since_s = 1.0
    assert presence.tick(limit_s) == ()
    (fail,) = presence.tick(limit_s + 0.5)
    assert isinstance(fail, Fail)
    assert (fail.error.code, getattr(fail.error, "party", "")) == (Code.STEP_TIMEOUT, "p1")


@pytest.mark.parametrize(
    ("teller", "planned", "aligns", "since_s"),
    [("p0", False, True, 9.0), ("p1", False, True, 0.0), ("p0", True, True, 0.0)],
)
def test_the_active_party_gives_all_more_time_while_rows_are_aligned(
    teller: str, planned: bool, aligns: bool, since_s: float
) -> None:
    presence = known(IN, IN, AWAITED, rules=replace(RULES, aligns=aligns))
    presence.parties[teller].planned = planned
    presence.extend_planning(teller, 9.0)
    assert [party.since_s for party in presence.parties.values()] == [since_s, since_s, 0.0]


@pytest.mark.parametrize(("until_s", "still_s"), [(4.9, 0.0), (60.0, 60.0)])
def test_nobody_is_blamed_for_a_standstill(until_s: float, still_s: float) -> None:
    presence = known(IN, LATE, IN, goes_on=True)
    assert presence.pardon(until_s) == still_s
    assert presence.waiting_since_s == presence.parties["p1"].since_s == still_s
    assert presence.parties["p0"].heard_s == still_s
    assert presence.tick(until_s) == ()


# {case: (places, what else is known, who joins, how it is taken)}
ENTRIES: dict[str, tuple[Any, dict[str, Any], str, Admission]] = {
    "while all wait": ((IN, AWAITED, IN), {"state": WAITING}, "p1", Admission.ENTERS),
    "in a generation": (ALL_IN, {}, "p1", Admission.INTERRUPTS),
    "that it had left": ((IN, AWAITED, IN), {}, "p1", Admission.INTERRUPTS),
    "that goes on without it": ((IN, AWAY, IN), {}, "p1", Admission.RETURNS),
    "but whose active party is away too": ((LATE, AWAY, IN), {}, "p1", Admission.INTERRUPTS),
    "that it went on in, and now begins anew": (
        *((IN, LATE, IN), GOES_ON, "p1", Admission.INTERRUPTS),
    ),
    "that can do without it": (*((IN, LATE, IN), GOES_ON | LENIENT, "p1", Admission.RETURNS),),
    "after its part": ((IN, IN, GONE), {}, "p2", Admission.DONE),
    "after its part, while the others wait, but not for it": (
        *((AWAITED, IN, GONE), {"state": WAITING}, "p2", Admission.DONE),
    ),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_how_a_party_that_joins_is_taken(case: str) -> None:
    before, fields, name, want = ENTRIES[case]
    presence = known(*before, **fields)
    assert presence.entry(name, 1.0) is want
    # Deciding changes nothing.
    assert places(presence) == before


def test_a_party_that_has_left_is_taken_again_if_the_run_needs_it() -> None:
    presence = known(IN, IN, GONE, state=WAITING)
    for name in ("p0", "p1"):
        presence.parties[name].offers = ("000001.a.1",)
    assert presence.entry("p2", 1.0) is Admission.ENTERS


# {case: (places, what else is known, of this run, of its last generation, answer to p1)}
CLAIMS: dict[str, tuple[Any, dict[str, Any], bool, bool, Claim]] = {
    "it is missed": ((IN, LATE, IN), GOES_ON, True, True, Claim.GOES_ON),
    "the others went on without it": ((IN, AWAY, IN), {}, True, True, Claim.GOES_ON),
    "it is not missed": (ALL_IN, GOES_ON, True, True, Claim.OVER),
    "of another generation": ((IN, LATE, IN), GOES_ON, True, False, Claim.OVER),
    "of another run": ((IN, LATE, IN), GOES_ON, False, True, Claim.OVER),
    "all wait": ((AWAITED, AWAITED, AWAITED), {"state": WAITING}, True, True, Claim.OVER),
    "it has left, and did not hear it": ((IN, GONE, IN), {}, True, True, Claim.MAY_GO),
    "it has left another run": ((IN, GONE, IN), {}, False, True, Claim.OVER),
}


@pytest.mark.parametrize("case", CLAIMS)
def test_who_is_still_in_the_generation_under_way(case: str) -> None:
    before, fields, run, generation, want = CLAIMS[case]
    assert known(*before, **fields).claim("p1", 1.0, run=run, generation=generation) is want


@pytest.mark.parametrize(
    ("before", "on", "actions"),
    [
        (ALL_IN, True, ()),
        (ALL_IN, False, ()),
        ((IN, AWAY, IN), True, ()),
        ((IN, AWAY, IN), False, (Interrupt("p1 is away, and needed now", ("p1",)), Review())),
        (
            (IN, AWAY, AWAY),
            False,
            (Interrupt("p1, p2 are away, and needed now", ("p1", "p2")), Review()),
        ),
        # It is only late: the active party does not miss it.
        ((IN, LATE, IN), False, ()),
    ],
)
def test_who_is_away_is_waited_for_once_it_is_needed(
    before: tuple[PartyState, ...], on: bool, actions: tuple[Action, ...]
) -> None:
    presence = known(*before, lenient=True)
    assert presence.says_lenient(on, 1.0) == actions
    assert presence.lenient is on


@pytest.mark.parametrize(
    ("free_from", "says", "trains", "want"),
    [
        ((END, BEFORE), "p0", True, ["p2"]),
        # It was not alone at the end.
        ((END,), "p0", True, []),
        ((END, BEFORE), "p1", True, []),
        ((END, BEFORE), "p0", False, []),
        (None, "p0", True, []),
    ],
)
def test_who_may_go(
    free_from: tuple[str, ...] | None, says: str, trains: bool, want: list[str]
) -> None:
    presence = known(*ALL_IN, rules=replace(RULES, trains=trains))
    presence.parties["p0"].free_from = (END, BEFORE)
    presence.parties["p2"].free_from = free_from
    presence.says_alone(says)
    assert presence.may_go() == want


@pytest.mark.parametrize(
    ("goes_on", "actions", "after"),
    [
        (False, (Interrupt("stopped", (), leaving=True),), ALL_AWAITED),
        # They go on, and say so to the next server.
        (True, (), ALL_AWAITED),
    ],
)
def test_what_it_means_that_the_server_was_stopped(
    goes_on: bool, actions: tuple[Action, ...], after: tuple[PartyState, ...]
) -> None:
    presence = known(*ALL_IN, goes_on=goes_on)
    assert presence.stop("stopped", 1.0) == actions
    assert (places(presence), presence.state) == (after, WAITING)
    assert presence.interruptions == len(actions)
    # The end of a session is no news then.
    assert presence.lose("p1", "x", 1.0) == (Close("p1"),)


def test_a_server_that_is_started_again_misses_all_that_have_not_left() -> None:
    presence = known(AWAITED, AWAITED, GONE, state=WAITING, interruptions=3)
    presence.take_up()
    assert places(presence) == (LATE, LATE, GONE)
    assert (presence.state, presence.interruptions) == (RUNNING, 2)
    assert presence.goes_on


@pytest.mark.parametrize(
    ("heard_s", "opened_s", "now_s", "left_s"),
    [(0.0, 3.0, 3.0, 5.0), (0.0, 3.0, 8.0, 0.0), (3.5, 3.0, 4.0, None), (3.0, 3.0, 4.0, 4.0)],
)
def test_a_session_replaces_another_that_says_nothing(
    heard_s: float, opened_s: float, now_s: float, left_s: float | None
) -> None:
    presence = known(*ALL_IN)
    presence.note_message("p1", heard_s)
    assert presence.replacement_wait_s("p1", opened_s, now_s) == left_s


@pytest.mark.parametrize(
    ("absent_s", "trains", "averages", "goes_on"),
    [
        (60.0, True, False, True),
        (60.0, True, True, False),
        (60.0, False, False, False),
        (0.0, True, False, False),
    ],
)
def test_what_goes_on_without_the_server(
    absent_s: float, trains: bool, averages: bool, goes_on: bool
) -> None:
    rules = replace(RULES, server_absent_s=absent_s, trains=trains)
    presence = known(*ALL_IN, rules=rules, agreed=False)
    presence.agree(averages=averages)
    assert (presence.agreed, presence.goes_on) == (True, goes_on)


ENDS: dict[str, Callable[[Presence], bool]] = {
    "complete": lambda presence: presence.complete(),
    "fail": lambda presence: presence.fail(),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_ends_once(end: str) -> None:
    presence = known(*ALL_IN)
    for name in RULES.roster:
        presence.note_report(name, ())
    assert [ENDS[end](presence) for _ in range(2)] == [True, False]
    assert not presence.fail()
    assert not presence.complete()

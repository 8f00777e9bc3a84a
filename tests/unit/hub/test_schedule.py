"""The decisions of the hub: states of proposals, and the order of runs."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from vfl_common.identity.signing import Envelope
from vfl_hub.documents import VOTE, Vote
from vfl_hub.schedule import MOVES, State, choose_next, decide_state
from vfl_hub.store import StoredProposal


def make_vote(kind: Literal["deny", "stop"], why: str = "") -> dict[str, Any]:
    vote = Vote(proposal="0" * 64, party="shop", kind=kind, why=why, at=1.0)
    return Envelope(VOTE, vote.model_dump_json().encode(), b"", "").value


DENIED, STOPPED = {"deny": make_vote("deny", "no basis")}, {"stop": make_vote("stop")}


def make_entry(number: str = "a", state: State = "open", **facts: Any) -> StoredProposal:
    parties = facts.pop("parties", ("bank", "shop"))
    votes = facts.pop("votes", {})
    return StoredProposal(number, "bank", "r", parties, {}, state, "", 100.0, None, None, 0, votes)


@pytest.mark.parametrize(
    ("votes", "now_s", "state"),
    [
        ({}, 1.0, None),
        ({"bank": {"approve": {}}}, 1.0, None),
        ({"bank": {"approve": {}}, "shop": {"approve": {}}}, 1.0, "queued"),
        ({"bank": {"approve": {}}, "shop": {"approve": {}}}, 101.0, "expired"),
        ({"bank": {"approve": {}}, "shop": {"approve": {}, **DENIED}}, 1.0, "denied"),
        ({"bank": STOPPED, "shop": DENIED}, 1.0, "stopped"),
        ({"stranger": {"approve": {}}, "shop": {"approve": {}}}, 1.0, None),
    ],
)
def test_a_proposal_is_queued_once_all_parties_approve(
    votes: dict[str, Any], now_s: float, state: str | None
) -> None:
    move = decide_state(make_entry(votes=votes), now_s)
    assert (move[0] if move is not None else None) == state
    if move is not None:
        assert move[0] in MOVES["open"]
        assert move[0] != "denied" or move[1] == "denied by shop: no basis"


def test_a_queued_run_is_not_queued_again() -> None:
    votes: dict[str, Any] = {"bank": {"approve": {}}, "shop": {"approve": {}}}
    assert decide_state(make_entry(state="queued", votes=votes), 1.0) is None
    assert decide_state(make_entry(state="queued", votes=votes), 101.0) is not None


def choose(
    queued: list[StoredProposal], running: list[StoredProposal], slots: dict[str, int], room: int
) -> str:
    return "".join(entry.id for entry in choose_next(queued, running, slots, room))


def test_runs_begin_in_order_as_far_as_there_is_room() -> None:
    both, bank, club = (
        [make_entry(name, "queued", parties=parties) for name in names]
        for names, parties in (("abc", ("bank", "shop")), ("d", ("bank",)), ("e", ("club",)))
    )
    slots = {"bank": 2, "shop": 2, "club": 1}
    assert choose(both, [], slots, 4) == "ab"
    assert choose(both, [], slots, 1) == "a"
    assert choose(both, bank, slots, 4) == "a"
    # A run of other parties may overtake, but one of the same parties may not.
    shop = [make_entry("s", "running", parties=("shop",))]
    assert choose([*both[:1], *bank, *club], shop, {"bank": 1, "shop": 1, "club": 1}, 4) == "e"
    # A party that is away holds up only its own runs.
    assert choose([*both[:1], *bank, *club], [], {"bank": 1, "club": 1}, 4) == "de"
    assert choose([*both[:1], *bank, *club], [], {"bank": 1, "shop": 0, "club": 1}, 4) == "de"
    assert choose(both, [], {}, 4) == ""


def test_ended_states_never_change() -> None:
    assert all(not MOVES[state] for state in ("done", "failed", "stopped", "denied", "expired"))

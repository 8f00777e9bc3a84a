"""Decides which proposals change state, and which queued runs begin. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from vfl_common.text import clean

if TYPE_CHECKING:
    from vfl_hub.store import StoredProposal

State = Literal["open", "queued", "running", "done", "failed", "stopped", "denied", "expired"]
# {state of a proposal: the states that may follow}
MOVES: dict[State, frozenset[State]] = {
    "open": frozenset({"queued", "denied", "stopped", "expired"}),
    "queued": frozenset({"running", "denied", "stopped", "expired"}),
    "running": frozenset({"done", "failed", "stopped"}),
    "done": frozenset(),
    "failed": frozenset(),
    "stopped": frozenset(),
    "denied": frozenset(),
    "expired": frozenset(),
}
ENDED = frozenset(state for state, following in MOVES.items() if not following)
MOVES_ON = tuple(state for state in MOVES if state not in ENDED)


def decide_state(entry: StoredProposal, now_s: float) -> tuple[State, str] | None:
    """Returns the next state of a proposal that does not run, with the reason; None for no change.

    ``now_s``: The time in seconds since 1970.
    """
    voted = {kind: party for party, votes in sorted(entry.votes.items()) for kind in votes}
    if "stop" in voted:
        return "stopped", explain(entry, voted["stop"], "stop")
    if "deny" in voted:
        return "denied", explain(entry, voted["deny"], "deny")
    if now_s > entry.until:
        return "expired", "not all parties approved it, or it did not begin, in time"
    approved = {party for party, votes in entry.votes.items() if "approve" in votes}
    if entry.state == "open" and approved.issuperset(entry.parties):
        return "queued", ""
    return None


def explain(entry: StoredProposal, party: str, kind: Literal["deny", "stop"]) -> str:
    """Returns that a party denied or stopped a run, with the reason of its vote."""
    # The list of commands needs only the states.
    from vfl_hub.documents import read_vote

    why = read_vote(entry.votes[party][kind])[1].why
    verb = "denied" if kind == "deny" else "stopped"
    return f"{verb} by {party}: {clean(why)}" if why else f"{verb} by {party}"


def choose_next(
    queued: Sequence[StoredProposal],
    running: Sequence[StoredProposal],
    slots: Mapping[str, int],
    max_runs: int,
) -> list[StoredProposal]:
    """Returns the queued runs that begin now, in order. A run that has to wait holds the slots of
    its parties, so that later runs do not overtake it for ever.

    Args:
        queued: The queued proposals in their order.
        running: The running proposals.
        slots: {connected member: the number of runs that its node makes at a time}.
        max_runs: The number of runs that the hub makes at a time.
    """
    used = Counter(party for entry in running for party in entry.parties)
    room = max_runs - len(running)
    chosen: list[StoredProposal] = []
    for entry in queued:
        if len(chosen) < room and all(used[party] < slots.get(party, 0) for party in entry.parties):
            chosen.append(entry)
        # A party that is away, or makes no runs at this hour, must not hold up the others.
        if all(slots.get(party, 0) for party in entry.parties):
            used.update(entry.parties)
    return chosen

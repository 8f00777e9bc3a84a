"""Decides which parties take part in a run: the state of each party and the consequences of each
event.

This module reads no clock, sends nothing and waits for nothing: the time is an argument. Each event
changes the records of the parties and returns the decisions, in order. ``conduct`` carries them
out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from vfl_common.errors import Code, LostError, VflError
from vfl_server.control.membership import Begin, GiveUp, Refuse, Wait, decide
from vfl_server.control.run import PresenceRules, RunState, move

# If more seconds pass between two ticks, this process was stopped or its machine slept.
_STANDSTILL_S = 5.0
# A session without a message for this many heartbeats may be replaced by a new session.
_REPLACED_AFTER = 2.5


class PartyState(Enum):
    """The state of a party in the run."""

    # The party is in no generation. If the run needs the party, the run waits.
    AWAITED = auto()
    # The party has joined.
    IN = auto()
    # The party lost its session in a generation that continues without this server. It may return.
    LATE = auto()
    # The party was lost, and the other parties continue without it.
    AWAY = auto()
    # The party has sent its report and left.
    GONE = auto()


@dataclass
class PartyRecord:
    """The server's record of one party.

    ``heard_s``: The time of the last message of its session; None if it has no session.
    ``since_s``: The time since when it is IN a generation, or LATE. ``offers``: The labels at which
    it can resume. ``held``: The offered labels at which it loses no work; empty if these are all
    labels. ``free_from``: The labels from which the run does not need the party; None if it has not
    reported.
    """

    place: PartyState = PartyState.AWAITED
    heard_s: float | None = None
    since_s: float = 0.0
    planned: bool = False
    offers: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    free_from: tuple[str, ...] | None = None


@dataclass
class Presence:
    """The records of a run's parties, and the state of the current generation.

    ``agreed``: Whether the parties have agreed on the plans of this generation. ``goes_on``:
    Whether this generation can continue without this server, because the server averages no
    weights. ``lenient``: Whether the active party continues without a passive party that is lost.
    ``alone``: Whether the active party needs no other party for the rest of this generation.
    ``waiting_since_s``, ``deadline_s``: The time since when the run waits, and the seconds for
    which it waits.
    """

    rules: PresenceRules
    waiting_since_s: float
    parties: dict[str, PartyRecord] = field(default_factory=dict)
    state: RunState = RunState.WAITING
    agreed: bool = False
    goes_on: bool = False
    lenient: bool = False
    alone: bool = False
    interruptions: int = 0

    def __post_init__(self) -> None:
        self.parties = {name: self.parties.get(name) or PartyRecord() for name in self.rules.roster}
        self.deadline_s = self.rules.join_deadline_s
        self._ticked_s = self.waiting_since_s

    def take_up(self) -> None:
        """Resumes a generation that continued while no server ran. Its parties become LATE."""
        self.state = move(self.state, RunState.RUNNING)
        self.interruptions -= 1
        self.agreed = self.goes_on = True
        for party in self.at(PartyState.AWAITED):
            self.parties[party].place = PartyState.LATE
            self.parties[party].since_s = self.waiting_since_s

    def at(self, *places: PartyState) -> tuple[str, ...]:
        """Returns the parties whose state is in ``places``, in roster order."""
        return tuple(name for name, party in self.parties.items() if party.place in places)

    def silent_s(self, now_s: float) -> dict[str, float]:
        """Returns {party with a session: seconds since its last message}."""
        return {
            name: now_s - party.heard_s
            for name, party in self.parties.items()
            if party.heard_s is not None
        }

    def has_joined(self, name: str) -> bool:
        """Whether a party has joined."""
        return self.parties[name].place is PartyState.IN

    def takes_part(self, name: str) -> bool:
        """Whether a party is in the current generation. A party that is not in it does not know yet
        that its generation has ended.
        """
        return self.state is RunState.RUNNING and self.has_joined(name)

    def everybody_planned(self) -> bool:
        """Whether all parties in the generation have sent their plans."""
        return all(self.parties[name].planned for name in self.at(PartyState.IN))

    def can_do_without(self, name: str) -> bool:
        """Whether the generation continues without a party: the active party allows it and can
        learn from other features.
        """
        active, party = self.rules.active, self.parties[name]
        if (
            self.state is not RunState.RUNNING
            or name == active
            or not self.lenient
            or not self.agreed
            or party.free_from is not None
        ):
            return False
        return self.rules.learns or any(
            other not in (active, name) for other in self.at(PartyState.IN)
        )

    def decide(self, now_s: float) -> Begin | Wait | Refuse | GiveUp:
        """Decides whether a waiting run may begin. See ``membership.decide``."""
        joined = {name: self.parties[name] for name in self.at(PartyState.IN)}
        return decide(
            now_s - self.waiting_since_s,
            self.deadline_s,
            self.rules.roster,
            {name: party.offers for name, party in joined.items()},
            {name: self.parties[name].free_from or () for name in self.at(PartyState.GONE)},
            self.rules.active,
            {name: party.held for name, party in joined.items() if party.held},
        )

    def has_done_its_part(self, name: str, now_s: float) -> bool:
        """Whether a party has left and the run does not need the party again."""
        if self.parties[name].place is not PartyState.GONE:
            return False
        if self.state is not RunState.WAITING:
            return True
        decision = self.decide(now_s)
        missing = decision.missing if isinstance(decision, Wait | GiveUp) else ()
        return name not in missing

    def entry(self, name: str, now_s: float) -> Admission:
        """Decides how to handle a party that joins and did not continue without this server."""
        if self.has_done_its_part(name, now_s):
            return Admission.DONE
        if self.state is not RunState.RUNNING:
            return Admission.ENTERS
        place = self.parties[name].place
        continued_without = place is PartyState.AWAY or (
            place is PartyState.LATE and self.can_do_without(name)
        )
        is_active_connected = self.parties[self.rules.active].heard_s is not None
        return (
            Admission.RETURNS if continued_without and is_active_connected else Admission.INTERRUPTS
        )

    def claim(self, name: str, now_s: float, *, run: bool, generation: bool) -> Claim:
        """Decides the answer to a party that reports that it continued without this server.

        Args:
            run: Whether the party reports this run.
            generation: Whether the party reports this run's last generation.
        """
        was_missing = self.parties[name].place in (PartyState.LATE, PartyState.AWAY)
        if run and generation and was_missing and self.state is RunState.RUNNING:
            return Claim.GOES_ON
        # A party that is done did not receive the message that it may leave.
        return Claim.MAY_GO if run and self.has_done_its_part(name, now_s) else Claim.OVER

    def may_go(self) -> list[str]:
        """Returns the parties that may leave, once the active party has reported that it needs no
        other party.

        A party's own report is not enough: if the party still owed data, the others would wait for
        a party whose connection is not watched.
        """
        if not self.alone or not self.rules.trains or self.state is not RunState.RUNNING:
            return []
        return [
            name
            for name in self.at(PartyState.IN)
            if name != self.rules.active and len(self.parties[name].free_from or ()) > 1
        ]

    def has_spoken(self, name: str, since_s: float) -> bool:
        """Whether the session of a party has sent a message after ``since_s``."""
        heard_s = self.parties[name].heard_s
        return heard_s is not None and heard_s > since_s

    def replacement_wait_s(self, name: str, opened_s: float, now_s: float) -> float | None:
        """Returns the seconds before a new session of ``name``, opened at ``opened_s``, replaces
        the silent session. Returns None if the older session is alive.
        """
        if self.has_spoken(name, opened_s):
            return None
        return opened_s + _REPLACED_AFTER * self.rules.heartbeat_s - now_s

    def note_message(self, name: str, now_s: float) -> None:
        """Records that a party has opened a session or sent a message."""
        self.parties[name].heard_s = now_s

    def enter(
        self, name: str, now_s: float, offers: Sequence[str] = (), held: Sequence[str] = ()
    ) -> None:
        """Records that a party has joined."""
        party = self.parties[name]
        party.place, party.since_s, party.free_from = PartyState.IN, now_s, None
        party.offers, party.held = tuple(offers), tuple(held)
        party.planned = False

    def note_plan(self, name: str) -> None:
        """Records that a party has sent its plan."""
        self.parties[name].planned = True

    def begin(self, now_s: float) -> None:
        """Begins a generation with all parties that have joined."""
        self.state = move(self.state, RunState.RUNNING)
        self.agreed = self.goes_on = False
        for name in self.at(PartyState.IN):
            self.parties[name].since_s, self.parties[name].planned = now_s, False

    def agree(self, *, averages: bool) -> None:
        """Records that all parties' plans agree. ``averages``: Whether this server averages
        weights.
        """
        self.agreed = True
        self.goes_on = self.rules.trains and self.rules.server_absent_s > 0.0 and not averages

    def extend_planning(self, name: str, now_s: float) -> None:
        """Gives all parties more time to plan while the active party reports that the alignment
        makes progress.
        """
        if name == self.rules.active and self.rules.aligns and not self.parties[name].planned:
            for other in self.at(PartyState.IN):
                self.parties[other].since_s = max(self.parties[other].since_s, now_s)

    def says_lenient(self, on: bool, now_s: float) -> tuple[Action, ...]:
        """Records whether the active party continues without lost parties. If it no longer does,
        the run waits for the parties that are away.
        """
        if self.state is not RunState.RUNNING:
            return ()
        self.lenient, away = on, self.at(PartyState.AWAY)
        if on or not away:
            return ()
        reason = f"{', '.join(away)} {'are' if len(away) > 1 else 'is'} away, and needed now"
        return self.interrupt(reason, now_s, lost=away), Review()

    def note_report(self, name: str, free_from: Sequence[str]) -> None:
        """Records that a party has finished. ``free_from``: The labels from which the run does not
        need the party.
        """
        self.parties[name].free_from = tuple(free_from)

    def says_alone(self, name: str) -> None:
        """Records that the active party needs no other party any more."""
        self.alone = self.alone or (name == self.rules.active and self.takes_part(name))

    def leave(self, name: str) -> None:
        """Records that a party that has reported leaves the run."""
        self.parties[name].place, self.parties[name].heard_s = PartyState.GONE, None

    def complete(self) -> bool:
        """Completes the run if all parties have reported. Returns whether the run is now
        complete.
        """
        if self.state is not RunState.RUNNING or any(
            party.free_from is None for party in self.parties.values()
        ):
            return False
        self.state = move(self.state, RunState.COMPLETED)
        return True

    def interrupt(
        self, reason: str, now_s: float, *, lost: Collection[str] = (), leaving: bool = False
    ) -> Interrupt:
        """Ends the generation. The run then waits for all parties that have not left."""
        self.state = move(self.state, RunState.WAITING)
        self.interruptions += 1
        self.waiting_since_s, self.deadline_s = now_s, self.rules.rejoin_deadline_s
        self._leave_generation(PartyState.IN, PartyState.LATE, PartyState.AWAY)
        return Interrupt(reason, tuple(lost), leaving)

    def _leave_generation(self, *places: PartyState) -> None:
        self.lenient = self.alone = False
        for name in self.at(*places):
            self.parties[name].place, self.parties[name].free_from = PartyState.AWAITED, None

    def lose(
        self, name: str, how: str, now_s: float, *, may_return: bool = False
    ) -> tuple[Action, ...]:
        """Handles the end of a party's session. ``may_return``: Whether perhaps only its connection
        is lost.
        """
        party = self.parties[name]
        was_in, is_dispensable = party.place is PartyState.IN, self.can_do_without(name)
        party.heard_s, party.planned = None, False
        if name == self.rules.active:
            self.lenient = self.alone = False
        if was_in:
            party.place, party.free_from = PartyState.AWAITED, None
        # The loss of a session that has not joined does not affect the run.
        if not was_in or self.state not in (RunState.RUNNING, RunState.WAITING):
            return (Close(name),)
        if is_dispensable:
            party.place = PartyState.AWAY
            return Close(name), Tell("away", name, how)
        if self.state is RunState.RUNNING and self.goes_on and may_return:
            party.place, party.since_s = PartyState.LATE, now_s
            return Close(name), Tell("lost", name, how)
        if self.state is RunState.WAITING:
            return Close(name), Tell("lost", name, how), Review()
        interruption = self.interrupt(f"{name} {how}", now_s, lost=[name])
        return Close(name), interruption, Tell("lost", name, how), Review()

    def stop(self, reason: str, now_s: float) -> tuple[Action, ...]:
        """Handles the stop of this server. A generation that can continue without the server is not
        interrupted.
        """
        if self.state is not RunState.RUNNING:
            return ()
        if not self.goes_on:
            return (self.interrupt(reason, now_s, leaving=True),)
        self.state = move(self.state, RunState.WAITING)
        # After this, the end of a session does not count as the loss of a party.
        self._leave_generation(PartyState.IN)
        return ()

    def fail(self) -> bool:
        """Marks the run as failed. Returns false if the run had already ended."""
        if self.state in (RunState.COMPLETED, RunState.FAILED):
            return False
        self.state = move(self.state, RunState.FAILED)
        return True

    def pardon(self, now_s: float) -> float:
        """Discounts time during which this process was suspended and could not receive messages.

        Returns the seconds of the suspension; 0 if the process was not suspended.
        """
        still_s, self._ticked_s = now_s - self._ticked_s, now_s
        if still_s < _STANDSTILL_S:
            return 0.0
        self.waiting_since_s += still_s
        for party in self.parties.values():
            party.since_s += still_s
            if party.heard_s is not None:
                party.heard_s = min(party.heard_s + still_s, now_s)
        return still_s

    def tick(self, now_s: float) -> tuple[Action, ...]:
        """Handles the parties that are silent, have not returned, or have not sent a plan in
        time.
        """
        limit_s = self.rules.lost_after_s
        actions: list[Action] = []
        for name in [name for name, silent_s in self.silent_s(now_s).items() if silent_s > limit_s]:
            actions += self.lose(name, f"has been silent for {limit_s:g} s", now_s)
        if self.state is RunState.RUNNING:
            actions += self._give_up_late_parties(now_s)
        if self.state is RunState.RUNNING:
            actions += self._give_up_unplanned_parties(now_s)
        return tuple(actions)

    def _give_up_late_parties(self, now_s: float) -> list[Action]:
        """Stops waiting for LATE parties that have not returned in time."""
        limit_s = self.rules.lost_after_s
        how = f"did not come back within {limit_s:g} s"
        late = [
            name
            for name in self.at(PartyState.LATE)
            if now_s - self.parties[name].since_s > limit_s
        ]
        actions: list[Action] = []
        for name in late:
            if self.can_do_without(name):
                self.parties[name].place = PartyState.AWAY
                actions.append(Tell("away", name, how))
        needed = [name for name in late if self.parties[name].place is PartyState.LATE]
        if needed:
            actions.append(self.interrupt(f"{', '.join(needed)} {how}", now_s, lost=needed))
        return actions

    def _give_up_unplanned_parties(self, now_s: float) -> list[Action]:
        """Stops waiting for parties that have not sent a plan in time."""
        limit_s = self.rules.plan_s
        late = [
            name
            for name in self.at(PartyState.IN)
            if not self.parties[name].planned and now_s - self.parties[name].since_s > limit_s
        ]
        needed = [name for name in late if not self.can_do_without(name)]
        actions: list[Action] = []
        for name in late:
            if name not in needed:
                actions += self.lose(name, "did not send a plan in time", now_s)
        if needed:
            error = LostError(
                Code.STEP_TIMEOUT,
                f"{', '.join(needed)} did not send a plan within {limit_s:g} s after the "
                "generation started",
                party=needed[0],
            )
            actions.append(Fail(error))
        return actions


@dataclass(frozen=True)
class Close:
    """Decision to end the session of ``party``."""

    party: str


@dataclass(frozen=True)
class Tell:
    """Decision to emit an event: ``party`` is away or lost. ``how``: How it was lost."""

    event: Literal["away", "lost"]
    party: str
    how: str


@dataclass(frozen=True)
class Interrupt:
    """Decision to end the generation for all parties. ``leaving``: Whether their sessions end
    too.
    """

    reason: str
    lost: tuple[str, ...] = ()
    leaving: bool = False


@dataclass(frozen=True)
class Review:
    """Decision to check again whether the run may begin, and to report to the waiting parties whom
    the run waits for.
    """


@dataclass(frozen=True)
class Fail:
    """Decision to end the run with ``error``."""

    error: VflError


Action = Close | Tell | Interrupt | Review | Fail


class Admission(Enum):
    """How the server handles a party that joins."""

    # The party enters the run, which waits for parties.
    ENTERS = auto()
    # The party returns to the current generation, which continued without it.
    RETURNS = auto()
    # The current generation ends first, because the party left it without being noticed.
    INTERRUPTS = auto()
    # The party is refused, because it has finished its part of the run.
    DONE = auto()


class Claim(Enum):
    """The answer to a party that reports that it continued without this server."""

    GOES_ON = auto()
    MAY_GO = auto()
    OVER = auto()

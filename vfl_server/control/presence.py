"""Decides who takes part in a run: who is in, late, away, gone and awaited.

Nothing here reads a clock, sends or waits: the time is an argument. Each event changes what is
known of the parties, and returns what is to be done about it, in order. ``conduct`` does it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from vfl_common.errors import Code, LostError
from vfl_server.control.decisions import (
    Action,
    Admission,
    Claim,
    Close,
    Fail,
    Interrupt,
    Review,
    Tell,
)
from vfl_server.control.membership import Begin, GiveUp, Refuse, Wait, decide
from vfl_server.control.run import PresenceRules, RunState, move

# Between two ticks: this process was stopped, or its machine slept.
_STANDSTILL_S = 5.0
# A session without a word for so many heartbeats may be replaced by a new one.
_REPLACED_AFTER = 2.5


class PartyState(Enum):
    """Where a party stands in the run."""

    # It is in no generation. The run waits for it if the run needs it.
    AWAITED = auto()
    # It has joined.
    IN = auto()
    # It lost its session in a generation that goes on without this server, and may come back.
    LATE = auto()
    # It was lost, and the others go on without it.
    AWAY = auto()
    # It has reported and left.
    GONE = auto()


@dataclass
class PartyRecord:
    """What is known of one party.

    ``heard_s``: when its session said the last word; None: it has no session. ``since_s``: since
    when it is IN a generation, or LATE. ``offers``: the labels at which it can resume, and ``held``
    those of them at which it loses nothing; empty: all. ``free_from``: the labels from which the
    run does not need it; None: it has not reported.
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
    """The parties of a run, and the generation that they are in.

    ``agreed``: on the plans of this generation. ``goes_on``: this generation goes on without this
    server, because nothing is averaged here. ``lenient``: the active party goes on without a
    passive party that is lost. ``alone``: the active party needs no other one for the rest of this
    generation. ``waiting_since_s``, ``deadline_s``: since when, and for how long, the run waits.
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
        """Takes up a generation that went on while no server ran: its parties are late."""
        self.state = move(self.state, RunState.RUNNING)
        self.interruptions -= 1
        self.agreed = self.goes_on = True
        for party in self.at(PartyState.AWAITED):
            self.parties[party].place = PartyState.LATE
            self.parties[party].since_s = self.waiting_since_s

    def at(self, *places: PartyState) -> tuple[str, ...]:
        """Returns the parties at one of ``places``, in the order of the roster."""
        return tuple(name for name, party in self.parties.items() if party.place in places)

    def silent_s(self, now_s: float) -> dict[str, float]:
        """Returns {party with a session: seconds since its last word}."""
        return {
            name: now_s - party.heard_s
            for name, party in self.parties.items()
            if party.heard_s is not None
        }

    def has_joined(self, name: str) -> bool:
        """Whether a party has joined."""
        return self.parties[name].place is PartyState.IN

    def takes_part(self, name: str) -> bool:
        """Whether a party is in the generation under way. If not, it does not know yet that its
        generation has ended.
        """
        return self.state is RunState.RUNNING and self.has_joined(name)

    def everybody_planned(self) -> bool:
        """Whether all that are in the generation have said what they are going to do."""
        return all(self.parties[name].planned for name in self.at(PartyState.IN))

    def can_do_without(self, name: str) -> bool:
        """Whether the generation goes on without a party: the active one said so, and can learn
        from others.
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
        """Decides whether a run that waits may begin. See ``membership.decide``."""
        here = {name: self.parties[name] for name in self.at(PartyState.IN)}
        return decide(
            now_s - self.waiting_since_s,
            self.deadline_s,
            self.rules.roster,
            {name: party.offers for name, party in here.items()},
            {name: self.parties[name].free_from or () for name in self.at(PartyState.GONE)},
            self.rules.active,
            {name: party.held for name, party in here.items() if party.held},
        )

    def has_done_its_part(self, name: str, now_s: float) -> bool:
        """Whether a party has left, and the run does not need it again."""
        if self.parties[name].place is not PartyState.GONE:
            return False
        if self.state is not RunState.WAITING:
            return True
        decision = self.decide(now_s)
        missing = decision.missing if isinstance(decision, Wait | GiveUp) else ()
        return name not in missing

    def entry(self, name: str, now_s: float) -> Admission:
        """Decides how a party that joins, and has not gone on without this server, is taken."""
        if self.has_done_its_part(name, now_s):
            return Admission.DONE
        if self.state is not RunState.RUNNING:
            return Admission.ENTERS
        place = self.parties[name].place
        missed = place is PartyState.AWAY or (
            place is PartyState.LATE and self.can_do_without(name)
        )
        reachable = self.parties[self.rules.active].heard_s is not None
        return Admission.RETURNS if missed and reachable else Admission.INTERRUPTS

    def claim(self, name: str, now_s: float, *, run: bool, generation: bool) -> Claim:
        """Answers a party that says that it went on without this server.

        Args:
            run: it speaks of this run.
            generation: it speaks of this run's last generation.
        """
        missed = self.parties[name].place in (PartyState.LATE, PartyState.AWAY)
        if run and generation and missed and self.state is RunState.RUNNING:
            return Claim.GOES_ON
        # It did not hear that it may leave.
        return Claim.MAY_GO if run and self.has_done_its_part(name, now_s) else Claim.OVER

    def may_go(self) -> list[str]:
        """Returns the parties that exchange nothing more, once the active party says that it needs
        nobody.

        Their own report is not enough: if one still owed data, the others would wait for a party
        that nobody watches.
        """
        if not self.alone or not self.rules.trains or self.state is not RunState.RUNNING:
            return []
        return [
            name
            for name in self.at(PartyState.IN)
            if name != self.rules.active and len(self.parties[name].free_from or ()) > 1
        ]

    def has_spoken(self, name: str, since_s: float) -> bool:
        """Whether the session of a party has said something after ``since_s``."""
        heard_s = self.parties[name].heard_s
        return heard_s is not None and heard_s > since_s

    def replacement_wait_s(self, name: str, opened_s: float, now_s: float) -> float | None:
        """Returns how long a session of ``name`` that opened at ``opened_s`` still waits before it
        replaces the silent one; None if that one is alive.
        """
        if self.has_spoken(name, opened_s):
            return None
        return opened_s + _REPLACED_AFTER * self.rules.heartbeat_s - now_s

    def note_message(self, name: str, now_s: float) -> None:
        """Notes that a party has opened a session, or said something."""
        self.parties[name].heard_s = now_s

    def enter(
        self, name: str, now_s: float, offers: Sequence[str] = (), held: Sequence[str] = ()
    ) -> None:
        """Takes a party as one that has joined."""
        party = self.parties[name]
        party.place, party.since_s, party.free_from = PartyState.IN, now_s, None
        party.offers, party.held = tuple(offers), tuple(held)
        party.planned = False

    def note_plan(self, name: str) -> None:
        """Notes that a party has said what it is going to do."""
        self.parties[name].planned = True

    def begin(self, now_s: float) -> None:
        """Begins a generation of all that have joined."""
        self.state = move(self.state, RunState.RUNNING)
        self.agreed = self.goes_on = False
        for name in self.at(PartyState.IN):
            self.parties[name].since_s, self.parties[name].planned = now_s, False

    def agree(self, *, averages: bool) -> None:
        """Notes that the plans of all agree; ``averages``: this server averages weights."""
        self.agreed = True
        self.goes_on = self.rules.trains and self.rules.server_absent_s > 0.0 and not averages

    def extend_planning(self, name: str, now_s: float) -> None:
        """Gives all more time to plan while the active party reports that rows are aligned."""
        if name == self.rules.active and self.rules.aligns and not self.parties[name].planned:
            for other in self.at(PartyState.IN):
                self.parties[other].since_s = max(self.parties[other].since_s, now_s)

    def says_lenient(self, on: bool, now_s: float) -> tuple[Action, ...]:
        """Notes whether the active party goes on without lost ones. If it does not any more, all
        wait for those that are away.
        """
        if self.state is not RunState.RUNNING:
            return ()
        self.lenient, away = on, self.at(PartyState.AWAY)
        if on or not away:
            return ()
        reason = f"{', '.join(away)} {'are' if len(away) > 1 else 'is'} away, and needed now"
        return self.interrupt(reason, now_s, lost=away), Review()

    def note_report(self, name: str, free_from: Sequence[str]) -> None:
        """Notes that a party has finished; ``free_from``: the labels from which the run does not
        need it.
        """
        self.parties[name].free_from = tuple(free_from)

    def says_alone(self, name: str) -> None:
        """Notes that the active party needs nobody any more."""
        self.alone = self.alone or (name == self.rules.active and self.takes_part(name))

    def leave(self, name: str) -> None:
        """Lets a party go that has reported."""
        self.parties[name].place, self.parties[name].heard_s = PartyState.GONE, None

    def complete(self) -> bool:
        """Ends the run well if all have reported. Returns whether it has ended now."""
        if self.state is not RunState.RUNNING or any(
            party.free_from is None for party in self.parties.values()
        ):
            return False
        self.state = move(self.state, RunState.COMPLETED)
        return True

    def interrupt(
        self, reason: str, now_s: float, *, lost: Collection[str] = (), leaving: bool = False
    ) -> Interrupt:
        """Ends the generation: the run waits for all that have not left."""
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
        """Decides what the end of a session means; ``may_return``: perhaps only its connection is
        lost.
        """
        party = self.parties[name]
        was_in, dispensable = party.place is PartyState.IN, self.can_do_without(name)
        party.heard_s, party.planned = None, False
        if name == self.rules.active:
            self.lenient = self.alone = False
        if was_in:
            party.place, party.free_from = PartyState.AWAITED, None
        # A session that has not joined only asked: of a party that has left, for example.
        if not was_in or self.state not in (RunState.RUNNING, RunState.WAITING):
            return (Close(name),)
        if dispensable:
            party.place = PartyState.AWAY
            return Close(name), Tell("away", name, how)
        if self.state is RunState.RUNNING and self.goes_on and may_return:
            party.place, party.since_s = PartyState.LATE, now_s
            return Close(name), Tell("lost", name, how)
        if self.state is RunState.WAITING:
            return Close(name), Tell("lost", name, how), Review()
        ended = self.interrupt(f"{name} {how}", now_s, lost=[name])
        return Close(name), ended, Tell("lost", name, how), Review()

    def stop(self, reason: str, now_s: float) -> tuple[Action, ...]:
        """Decides what it means that this server was stopped. A generation that goes on without it
        is not interrupted.
        """
        if self.state is not RunState.RUNNING:
            return ()
        if not self.goes_on:
            return (self.interrupt(reason, now_s, leaving=True),)
        self.state = move(self.state, RunState.WAITING)
        # The end of their sessions is no loss.
        self._leave_generation(PartyState.IN)
        return ()

    def fail(self) -> bool:
        """Ends the run badly. Returns whether it has ended now."""
        if self.state in (RunState.COMPLETED, RunState.FAILED):
            return False
        self.state = move(self.state, RunState.FAILED)
        return True

    def pardon(self, now_s: float) -> float:
        """Discounts time during which this process was suspended: it could not hear the parties.

        Returns how long that was, in seconds; 0: it did not.
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
        """Finds those who are silent, who have not come back, and who have not planned in time."""
        limit_s = self.rules.lost_after_s
        actions: list[Action] = []
        for name in [name for name, silent_s in self.silent_s(now_s).items() if silent_s > limit_s]:
            actions += self.lose(name, f"has been silent for {limit_s:g} s", now_s)
        if self.state is RunState.RUNNING:
            actions += self._too_late(now_s)
        if self.state is RunState.RUNNING:
            actions += self._end_planning(now_s)
        return tuple(actions)

    def _too_late(self, now_s: float) -> list[Action]:
        """Waits no longer for those whose sessions were lost for too long."""
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

    def _end_planning(self, now_s: float) -> list[Action]:
        """Waits no longer for those who have not said what they are going to do."""
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
                f"{', '.join(needed)} did not send a plan within {limit_s:g} s after the start",
                party=needed[0],
            )
            actions.append(Fail(error))
        return actions

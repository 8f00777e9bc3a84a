"""The run as the server sees it: members join, are lost, report; generations start and end.

All methods may be called from any thread; one lock guards the whole state. Messages to parties go
into their outboxes; the streams' threads send them.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InterruptedRun, LostError, PeerError, VflError
from vfl_common.link import OLDEST
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.agreement import range_of
from vfl_common.rpc.failures import refusal, to_failure
from vfl_common.rpc.guard.rate import Rate
from vfl_common.stages import AggregationPlan
from vfl_common.summary import PartySummary
from vfl_common.text import clean
from vfl_server.control import declarations, membership
from vfl_server.control.admission import admit, agreed
from vfl_server.control.display import Display, Emit, metrics
from vfl_server.control.reports import done_by, is_sound
from vfl_server.control.run_state import RunState, move

Job = Literal["train", "predict"]
Outbox = queue.SimpleQueue["control_pb2.ServerMessage | None"]

# Characters of a text in a party's messages.
MAX_TEXT = 200
# Between two counts of how long the run still waits.
_ANNOUNCE_S = 60.0
# So often a party may join again into a running generation: 20 times, then 10 a minute.
_AGAIN_S, _AGAIN = 6.0, 20
# So often those who wait are told who has joined, after the first times.
_JOINED_S, _JOINED = 1.0, 8
# Between two ticks: this process was stopped, or its machine slept.
_STANDSTILL_S = 5.0

log = logging.getLogger(__name__)


@dataclass
class Member:
    """A party with an open session."""

    name: str
    outbox: Outbox
    heard_s: float
    joined: bool = False
    join: control_pb2.Join = field(default_factory=control_pb2.Join)
    # Nothing more is read from the party.
    hung_up: threading.Event = field(default_factory=threading.Event)
    # For this generation; None: not received yet.
    plan: tuple[AggregationPlan, ...] | None = None
    # The last one of this generation.
    progress: control_pb2.Progress | None = None
    report: control_pb2.Report | None = None
    # Why it leaves the run that it has offered, if that is another one.
    anew: str = ""
    # The active party: it needs no other party for the rest of this generation.
    alone: bool = False
    # The active party: it goes on without a passive party that is lost.
    lenient: bool = False
    # When it heard of the generation.
    began_s: float = 0.0


@dataclass(frozen=True)
class Left:
    """A party that has reported and left: it exchanges nothing in the rest of the run."""

    identity: PartySummary
    report: control_pb2.Report


@dataclass(frozen=True)
class Status:
    """The run at one moment.

    ``silent_s``: {party with a session: seconds since its last message}. ``phase`` to ``steps``:
    the slowest party's last report; ``steps`` as of a round's end. ``told``: {party: (phase,
    metrics)}, from each party's last report.
    """

    state: RunState
    generation: int
    interruptions: int
    joined: tuple[str, ...]
    left: tuple[str, ...]
    silent_s: dict[str, float]
    phase: str
    round: int
    rounds: int
    steps: int
    told: dict[str, tuple[str, dict[str, float]]]


class Coordinator:
    """Run state and membership of one run.

    Args:
        recipe: the server's copy; a party whose copy differs is refused.
        job: ``train`` or ``predict``.
        run_id: this run's name.
        generation: the last generation that an earlier process of this server started.
        on_start: called, under the lock, with (generation, checkpoint) when a generation starts,
            before the parties hear of it.
        on_plan: called, under the lock, with (generation, checkpoint, agreed aggregations) once all
            parties have sent their plans.
        on_end: called, under the lock, with the reason when a started generation or the run ends.
        on_leave: called, under the lock, with a party that is no longer needed, before it hears
            that it may leave.
        left: the parties that left before this process of the server began.
        completed: an earlier process of this server has completed the run; the parties may not know
            it yet.
        ran_s: seconds since an earlier process of this server first started the run; 0 if none did.
        under_way: an earlier process of this server died in the last generation, which may have
            gone on without it.
        oldest: the oldest protocol that this server can serve the recipe with.
        released: says why a party leaves another run that it has offered; '' if it must not. Called
            under the lock.
        expired: whether the run is set aside if a party's data have changed since it began. Called
            under the lock.
        emit: reports events to the person or program in front of the server.
    """

    def __init__(
        self,
        recipe: Recipe,
        job: Job,
        run_id: str,
        generation: int,
        *,
        on_start: Callable[[int, str], None],
        on_plan: Callable[[int, str, tuple[AggregationPlan, ...]], None],
        on_end: Callable[[VflError], None] = lambda _: None,
        on_leave: Callable[[Left], None] = lambda _: None,
        left: Mapping[str, Left] = MappingProxyType({}),
        completed: bool = False,
        ran_s: float = 0.0,
        under_way: bool = False,
        oldest: int = OLDEST,
        released: Callable[[str], str] = lambda _run_id: "",
        expired: Callable[[], bool] = lambda: False,
        emit: Emit,
    ) -> None:
        self.recipe, self.job, self.run_id, self.generation = recipe, job, run_id, generation
        self._roster = tuple(party.name for party in recipe.parties)
        self._phases = tuple(phase.name for phase in recipe.phases)
        self._on_start, self._on_plan, self._on_end = on_start, on_plan, on_end
        self._on_leave, self._emit = on_leave, emit
        self._oldest = oldest
        # Of this generation; 0: an earlier process of this server knew it.
        self._protocol = 0
        # Parties that came and may not join, while others wait for them.
        self._refused: dict[str, Code] = {}
        # That the others have heard of at once.
        self._refusals: set[tuple[str, Code]] = set()
        self._released, self._expired = released, expired
        # Why this run is to be set aside, once it is.
        self.set_aside = ""
        # The checkpoint from which the generation started.
        self._checkpoint = ""
        self._lock = threading.Condition()
        self._members: dict[str, Member] = {}
        self._identities = {name: each.identity for name, each in left.items()}
        # Of the completed run.
        self._reports: dict[str, control_pb2.Report] = {}
        self._left = dict(left)
        # Lost in this generation, which goes on without them.
        self._away: set[str] = set()
        # On the plans of this generation.
        self._agreed = False
        # Without this server: nothing is averaged here.
        self._goes_on = False
        # Since when these, who may go on, have had no session.
        self._cut: dict[str, float] = {}
        # An earlier process of this server ended each of its generations.
        self._interruptions = generation
        self._display = Display(emit, self._phases, recipe.active.name)
        self.state = RunState.COMPLETED if completed else RunState.WAITING
        self.failure: VflError | None = None
        self._waiting_since_s = self._ticked_s = time.monotonic()
        # The first tick says for whom the run waits.
        self._announced_s = -math.inf
        self._announces = Rate(_JOINED_S, _JOINED)
        # Parties have joined since.
        self._unannounced = False
        # Each time ends a generation for all.
        self._again = Rate(_AGAIN_S, _AGAIN)
        self._deadline_s = recipe.run.join_deadline_s
        self._started_s = time.monotonic() - ran_s if ran_s else None
        self.finished = threading.Event()
        # Once the run is complete.
        self._summary_json: str | None = None
        # Parties that have heard of it.
        self._told: set[str] = set()
        self._stopped = False
        if under_way and not completed:
            self.state = move(self.state, RunState.RUNNING)
            self._interruptions -= 1
            self._agreed = self._goes_on = True
            self._cut = {name: self._ticked_s for name in self._roster if name not in self._left}

    # -- sessions
    # ------------------------------------------------------------

    def open(self, name: str) -> Member:
        """Opens a session for ``name``.

        Refuses a second session of a living party. Replaces the session of a party that has fallen
        silent. Once this server has been stopped, a session ends as soon as it is open: the party
        waits for the next server.

        Raises:
            PeerError: NOT_IN_RECIPE, NAME_TAKEN.
        """
        self.require_place(name)
        with self._lock:
            opened_s = time.monotonic()
            # Several may have waited for the same silent session.
            while name in self._members:
                self._replace(self._members[name], opened_s)
            member = Member(name, queue.SimpleQueue(), time.monotonic())
            if self._stopped:
                member.outbox.put(None)
            else:
                self._members[name] = member
            return member

    def require_place(self, name: str) -> None:
        """Raises PeerError (NOT_IN_RECIPE) if ``name`` has no part in this run."""
        if name not in self._roster:
            text = f"{name} is not a party of recipe {self.recipe.name}"
            # A stranger does not learn who they are.
            here = f"{text} (parties: {', '.join(self._roster)})"
            raise PeerError(Code.NOT_IN_RECIPE, text, party=name).privately(here)

    def _replace(self, older: Member, opened_s: float) -> None:
        """Ends a session that says nothing. Raises PeerError (NAME_TAKEN) if it is alive after
        ``opened_s``.
        """
        self._lock.wait_for(
            lambda: self._members.get(older.name) is not older or older.heard_s > opened_s,
            timeout=2.5 * self.recipe.run.heartbeat_s,
        )
        if self._members.get(older.name) is older:
            if older.heard_s > opened_s:
                text = f"a party named {older.name} has already joined and is alive"
                raise PeerError(Code.NAME_TAKEN, text, party=older.name)
            self._lose(older, "fell silent and was restarted", may_return=True)

    def ask(self, name: str, join: control_pb2.Join) -> None:
        """Returns if a party that joined with ``join`` would be admitted; keeps nothing, and
        changes nothing.

        The answer is for any job and any run, and also for a party that has joined already.

        Raises:
            PeerError: NOT_IN_RECIPE, and those of ``admit``.
        """
        self.require_place(name)
        with self._lock:
            joined = {
                other: each.join
                for other, each in self._in_order()
                if each.joined and other != name
            }
        join.job, join.run_id = self.job, next((each.run_id for each in joined.values()), "")
        admit(name, join, self.recipe, self.job, joined, self._oldest)

    def refused(self, name: str, error: VflError) -> None:
        """Tells those who wait for a party that it came and was refused: at once, but each reason
        only once.
        """
        with self._lock:
            there = self._members.get(name)
            if (
                name not in self._roster
                or self.state is not RunState.WAITING
                or (there is not None and there.joined)
            ):
                return
            # Another process of the same name takes part.
            if error.code is Code.NAME_TAKEN:
                return
            self._refused[name] = error.code
            if (name, error.code) not in self._refusals:
                self._refusals.add((name, error.code))
                self._decide(announce=True)

    def closed(self, member: Member) -> None:
        """Handles the end of a session's stream."""
        with self._lock:
            if self._members.get(member.name) is member:
                self._lose(member, "was lost", may_return=True)
                if self._summary_json is not None and member.joined:
                    self._told.add(member.name)
            # Also to one that another session has replaced: its thread waits for the end.
            member.outbox.put(None)

    def handle(self, member: Member, message: control_pb2.PartyMessage) -> None:
        """Handles one message of a party. Raises PeerError if the party must be refused."""
        with self._lock:
            if self._members.get(member.name) is not member:
                return
            member.heard_s = time.monotonic()
            self._lock.notify_all()
            body = message.WhichOneof("body")
            if body == "join":
                self._join(member, message.join)
            elif body == "plan":
                self._planned(member, message.plan)
            elif body == "progress":
                member.progress = message.progress
                self._grant_time(member)
                self._display.take(member.name, self._progress(), member.heard_s)
            elif body == "report":
                self._report(member, message.report)
            elif body == "alone":
                member.alone = self.state is RunState.RUNNING and member.joined
                self._let_go()
                self._maybe_complete()
            elif body == "lenient":
                if member.name == self.recipe.active.name:
                    self._lenient(member, message.lenient.on)
            elif body == "stopping":
                # Another party noticed it first, and has interrupted the generation.
                if not member.joined:
                    self._emit("lost", party=member.name, how="was stopped")
                self._lose(member, "was stopped")
            elif body == "abort":
                self._aborted(member, message)

    @property
    def _plan_s(self) -> float:
        """How long a party may take to plan. In an alignment, the parties first name the one that
        they wait for.
        """
        return self.recipe.run.step_timeout_s * (1 if self.recipe.rows.align == "digest" else 2)

    def _grant_time(self, member: Member) -> None:
        """Gives all parties more time to plan while the active one reports that the rows are being
        aligned.
        """
        if (
            member.name == self.recipe.active.name
            and member.plan is None
            and self.recipe.rows.align != "digest"
        ):
            for each in self._members.values():
                each.began_s = max(each.began_s, member.heard_s)

    def tick(self) -> None:
        """Finds silent parties and deadlines that have passed; called regularly."""
        with self._lock:
            now_s = time.monotonic()
            self._pardon(now_s)
            self._display.tick(self._progress(), now_s)
            heard = {name: member.heard_s for name, member in self._members.items()}
            for name in membership.silent(now_s, heard, self.recipe.run.lost_after_s):
                self._lose(
                    self._members[name], f"has been silent for {self.recipe.run.lost_after_s:g} s"
                )
            cut = membership.silent(now_s, self._cut, self.recipe.run.lost_after_s)
            for name in [name for name in cut if self._can_do_without(name)]:
                del self._cut[name]
                self._away.add(name)
                self._emit(
                    "away",
                    party=name,
                    how=f"did not come back within {self.recipe.run.lost_after_s:g} s",
                )
            cut = tuple(name for name in cut if name in self._cut)
            if cut and self.state is RunState.RUNNING:
                reason = (
                    f"{', '.join(cut)} did not come back within {self.recipe.run.lost_after_s:g} s"
                )
                self._interrupt(reason, lost=list(cut))
            if self.state is RunState.WAITING:
                self._decide(announce=self._unannounced or now_s - self._announced_s >= _ANNOUNCE_S)
            elif self.state is RunState.RUNNING:
                began = {
                    name: each.began_s
                    for name, each in self._in_order()
                    if each.joined and each.plan is None
                }
                late = membership.unplanned(now_s, began, self._plan_s)
                for name in [name for name in late if self._can_do_without(name)]:
                    self._lose(self._members[name], "did not say what it is going to do")
                late = tuple(name for name in late if name in self._members)
                if late:
                    names, limit = ", ".join(late), f"{self._plan_s:g} s"
                    text = (
                        f"{names} did not say within {limit} after the start what it is going to do"
                    )
                    self._fail(LostError(Code.STEP_TIMEOUT, text, party=late[0]))

    def _pardon(self, now_s: float) -> None:
        """Blames nobody for time in which this process stood still: it could not hear them."""
        still_s, self._ticked_s = now_s - self._ticked_s, now_s
        if still_s < _STANDSTILL_S:
            return
        for member in self._members.values():
            member.began_s += still_s
        self._waiting_since_s += still_s
        self._cut = {name: since_s + still_s for name, since_s in self._cut.items()}
        for member in self._members.values():
            member.heard_s = min(member.heard_s + still_s, now_s)
        log.warning("this process stood still for %.0f s", still_s, extra={"event": "standstill"})

    def stop(self) -> None:
        """Ends all sessions because this server was stopped: the parties wait for it, as for one
        that was lost.

        A generation that goes on without this server is not interrupted.
        """
        with self._lock:
            self._stopped = True
            if self.state is RunState.RUNNING and self._goes_on:
                self.state = move(self.state, RunState.WAITING)
                for member in self._members.values():
                    # The end of its session is no loss.
                    member.joined = False
            elif self.state is RunState.RUNNING:
                self._interrupt(f"{self.recipe.server} was stopped", lost=[], leaving=True)
            for member in self._members.values():
                member.outbox.put(None)

    @property
    def at_work(self) -> bool:
        """Whether a generation is under way, and all its parties have said what they are going to
        do.
        """
        with self._lock:
            return self.state is RunState.RUNNING and self._agreed

    def fail(self, error: VflError) -> None:
        """Ends the run and sends ``error`` to every party."""
        with self._lock:
            self._fail(error)

    # -- reports
    # ------------------------------------------------------------

    @property
    def wall_s(self) -> float:
        """Returns the seconds since the run's first start; 0 before it."""
        return 0.0 if self._started_s is None else time.monotonic() - self._started_s

    def status(self) -> Status:
        with self._lock:
            now_s, progress = time.monotonic(), self._display.shown
            members = self._in_order()
            return Status(
                state=self.state,
                generation=self.generation,
                interruptions=self._interruptions,
                joined=tuple(name for name, member in members if member.joined),
                left=tuple(name for name in self._roster if name in self._left),
                silent_s={name: now_s - member.heard_s for name, member in members},
                phase=clean(progress.phase, MAX_TEXT),
                round=progress.round,
                rounds=progress.rounds,
                steps=self._display.steps,
                told={
                    name: (clean(each.phase, MAX_TEXT), metrics(each))
                    for name, each in self._progress().items()
                },
            )

    def reports(self) -> dict[str, control_pb2.Report]:
        """Returns {party: its report} of the completed run."""
        with self._lock:
            return dict(self._reports)

    def parties(self) -> list[PartySummary]:
        """Returns the parties, in roster order, with the facts that they reported."""
        reports = self.reports()
        found = []
        for name in self._roster:
            if name in self._identities:
                report = reports.get(name)
                found.append(
                    self._identities[name].model_copy(update=done_by(report) if report else {})
                )
        return found

    def complete(self, summary_json: str) -> None:
        """Tells every party that is here, or comes again, that the run is complete; the active one
        gets the summary.
        """
        with self._lock:
            self._summary_json = summary_json
            for member in self._members.values():
                self._complete(member)

    def wait_until_empty(self, timeout_s: float) -> None:
        """Waits, at most ``timeout_s``, until every session has ended."""
        with self._lock:
            self._lock.wait_for(lambda: not self._members, timeout=timeout_s)

    def wait_until_told(self, timeout_s: float) -> None:
        """Waits, at most ``timeout_s``, until every party has heard that the run is complete."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._told | self._left.keys() >= set(self._roster), timeout=timeout_s
            )

    # -- under the lock
    # ------------------------------------------------------------

    def _complete(self, member: Member) -> None:
        summary = self._summary_json if member.name == self.recipe.active.name else ""
        complete = control_pb2.Complete(run_id=self.run_id, summary_json=summary or "")
        member.outbox.put(control_pb2.ServerMessage(complete=complete))
        member.outbox.put(None)

    def _join(self, member: Member, join: control_pb2.Join) -> None:
        joined = {
            name: other.join
            for name, other in self._in_order()
            if other.joined and other is not member
        }
        admit(member.name, join, self.recipe, self.job, joined, self._oldest)
        # It comes too late, and hears why.
        if self.failure is not None:
            self._stop(member, self.failure)
            return
        if self.state is RunState.COMPLETED:
            member.join, member.joined = join, True
            # Otherwise ``complete`` tells it.
            if self._summary_json is not None:
                self._complete(member)
            return
        if join.generation:
            # Otherwise its session ends, and it asks the next server.
            if not self._stopped:
                self._claims(member, join)
            return
        if (
            self.job == "train"
            and join.run_id not in ("", self.run_id)
            and not self._lets_go(member, join)
        ):
            return
        if member.name in self._left and not self._needed(member.name):
            text = (
                f"{member.name} has finished its part of run {self.run_id}, which continues "
                "without it; nothing to do"
            )
            raise PeerError(Code.NAME_TAKEN, text, party=member.name)
        away = self._away | (self._cut.keys() if self._can_do_without(member.name) else set())
        back = (
            self.state is RunState.RUNNING
            and member.name in away
            and self.recipe.active.name in self._members
        )
        if back and (join.unfit or join.run_id != self.run_id):
            raise self._lacking(member.name, "the step that is under way")
        if back:
            (least, most), spoken = range_of(join), self._protocol or agreed(joined.values())
            if not least <= spoken <= most:
                text = (
                    f"{member.name} speaks protocol {most}, and the generation that is under "
                    f"way {spoken}"
                )
                raise PeerError(
                    Code.PROTOCOL_DIFFERS,
                    f"{text}; install the version that it had",
                    party=member.name,
                )
        # The party left the generation before we noticed.
        if self.state is RunState.RUNNING and not back:
            if self._again.passes(member.name, time.monotonic()) is None:
                text = (
                    f"{member.name} has joined again {_AGAIN} times in a short time, and may "
                    "not stop the others now"
                )
                raise PeerError(
                    Code.NAME_TAKEN, f"{text}; start it again in a minute", party=member.name
                )
            self._interrupt(f"{member.name} joins again", lost=[])
        if join.unfit and join.run_id == self.run_id:
            self._unfit(member.name, clean(join.unfit, MAX_TEXT))
            return
        self._left.pop(member.name, None)
        self._enter(member, join)
        if back:
            self._away.discard(member.name)
            self._cut.pop(member.name, None)
            self._start(member, returning=True)
            self._emit("back", party=member.name)
        else:
            self._decide(announce=True, joined=member)

    def _lets_go(self, member: Member, join: control_pb2.Join) -> bool:
        """Returns whether a party may leave the other run that it offers; if it must not, this run
        does not begin.

        Raises PeerError if this run has begun: then that party alone is wrong.
        """
        member.anew = self._released(join.run_id)
        if member.anew or not any(join.checkpoints):
            return True
        text = (
            f"{member.name} has checkpoints of run {clean(join.run_id, 80)}, which has not "
            "ended, and "
        )
        if self.generation:
            text += (
                f"{self.recipe.server} is in run {self.run_id}; start it with the folder of "
                "runs that it had before"
            )
            raise PeerError(Code.CHECKPOINT_INVALID, text, party=member.name)
        text += (
            f"{self.recipe.server} has not; start the server with the folder of runs that "
            "it had before, or begin a "
            "new run with vfl-server serve --fresh"
        )
        self._fail(PeerError(Code.CHECKPOINT_INVALID, text, party=member.name))
        return False

    def _unfit(self, name: str, why: str) -> None:
        """Sets the run aside because a party cannot resume it, if that is due; else the run ends
        for all.
        """
        what = f"{name} cannot resume run {self.run_id}: {why}"
        if self._expired():
            self.set_aside = what
            self.stop()
            self.finished.set()
            return
        within = (
            f"run.resume_within_s, {self.recipe.run.resume_within_s:g} s after the run trained last"
        )
        text = (
            f"{what}; restore them, or begin a new run with vfl-server serve --fresh, at the "
            "server alone"
        )
        self._fail(
            PeerError(
                Code.DATA_INVALID, f"{text} (the same commands do so from {within})", party=name
            )
        )

    def _claims(self, member: Member, join: control_pb2.Join) -> None:
        """Takes back a party that went on without this server, or tells it that its generation is
        over.
        """
        now = (self.run_id, self.generation if self.state is RunState.RUNNING else 0)
        if membership.goes_on(
            member.name, (join.run_id, join.generation), now, {*self._cut, *self._away}
        ):
            self._cut.pop(member.name, None)
            self._away.discard(member.name)
            self._enter(member, join)
            # It goes on because it swaps nothing with this server.
            member.plan = ()
            start = control_pb2.Start(run_id=self.run_id, generation=self.generation, goes_on=True)
            member.outbox.put(control_pb2.ServerMessage(start=start))
            self._emit("back", party=member.name)
        elif (
            join.run_id == self.run_id
            and member.name in self._left
            and not self._needed(member.name)
        ):
            # It did not hear that it may leave.
            member.outbox.put(control_pb2.ServerMessage(complete=control_pb2.Complete()))
            member.outbox.put(None)
        else:
            reason = f"generation {join.generation} is over"
            interrupt = control_pb2.Interrupt(generation=join.generation, reason=reason)
            member.outbox.put(control_pb2.ServerMessage(interrupt=interrupt))

    def _enter(self, member: Member, join: control_pb2.Join) -> None:
        """Takes a party as one that has joined."""
        member.join, member.joined, member.report = join, True, None
        self._refused.pop(member.name, None)
        self._identities[member.name] = PartySummary(
            name=member.name,
            role="active" if join.role == "active" else "passive",
            pid=join.pid,
            device=join.device,
            device_name=join.device_name,
            version=join.version,
        )
        facts = {"version": clean(join.version)} if join.version else {}
        self._emit(
            "joined",
            party=member.name,
            role=join.role,
            device=join.device,
            **facts,
            protocol=join.protocol,
        )

    def _in_order(self) -> list[tuple[str, Member]]:
        return [(name, self._members[name]) for name in self._roster if name in self._members]

    def _progress(self) -> dict[str, control_pb2.Progress]:
        return {name: each.progress for name, each in self._in_order() if each.progress is not None}

    def _decision(
        self,
    ) -> membership.Begin | membership.Wait | membership.Refuse | membership.GiveUp:
        ready = {
            name: list(member.join.checkpoints) if member.join.run_id == self.run_id else [""]
            for name, member in self._members.items()
            if member.joined
        }
        held = {
            name: list(self._members[name].join.held)
            for name in ready
            if self._members[name].join.held
        }
        waited_s = time.monotonic() - self._waiting_since_s
        left = {name: each.report.free_from for name, each in self._left.items()}
        return membership.decide(
            waited_s, self._deadline_s, self._roster, ready, left, self.recipe.active.name, held
        )

    def _needed(self, name: str) -> bool:
        """Returns whether a party that has left is needed again."""
        if self.state is not RunState.WAITING:
            return False
        decision = self._decision()
        return (
            isinstance(decision, membership.Wait | membership.GiveUp) and name in decision.missing
        )

    def _decide(self, *, announce: bool = False, joined: Member | None = None) -> None:
        if self._stopped:
            return
        decision = self._decision()
        if isinstance(decision, membership.Begin):
            self._begin(decision)
        elif isinstance(decision, membership.Refuse):
            for name in decision.lacking:
                self._refuse(self._members[name], decision.label)
        elif isinstance(decision, membership.GiveUp):
            why = "".join(
                f"; {self._why_refused(name)}" for name in decision.missing if name in self._refused
            )
            self._fail(
                LostError(Code.PARTY_LOST, f"{decision.reason}{why}", party=decision.missing[0])
            )
        elif announce:
            self._announce(decision, joined)

    def _announce(self, decision: membership.Wait, joined: Member | None) -> None:
        """Tells those who wait for whom. While many join at once, each hears it on joining, and the
        others later.
        """
        now_s = time.monotonic()
        self._unannounced = self._announces.passes("", now_s) is None
        told = (
            [joined]
            if self._unannounced
            else [each for each in self._members.values() if each.joined]
        )
        refused = [name for name in decision.missing if name in self._refused]
        failures = [to_failure(PeerError(self._refused[name], "", party=name)) for name in refused]
        waiting = control_pb2.Waiting(
            missing=decision.missing, deadline_s=decision.left_s, refused=failures
        )
        for member in told:
            if member is not None:
                member.outbox.put(control_pb2.ServerMessage(waiting=waiting))
        if not self._unannounced:
            self._announced_s = now_s
            why = {"why": "; ".join(map(self._why_refused, refused))} if refused else {}
            self._emit(
                "waiting", missing=list(decision.missing), left_s=round(decision.left_s, 1), **why
            )

    def _why_refused(self, name: str) -> str:
        return refusal(name, self._refused[name])

    def _refuse(self, member: Member, label: str) -> None:
        """Refuses a party that cannot resume at ``label``, as the others can: they would have to
        begin again.
        """
        error = self._lacking(member.name, label or "its beginning")
        member.outbox.put(control_pb2.ServerMessage(stop=to_failure(error)))
        self._refused[member.name] = error.code
        self._lose(member, "cannot resume at a checkpoint that the others hold")

    def _lacking(self, name: str, label: str) -> PeerError:
        text = (
            f"{name} cannot resume run {self.run_id} at {label}, as the others can; start it "
            "with the folder of runs that it had before, or begin a new run with "
            "vfl-server serve --fresh"
        )
        return PeerError(Code.CHECKPOINT_INVALID, text, party=name)

    def _begin(self, decision: membership.Begin) -> None:
        self.generation += 1
        self._checkpoint, self._agreed, self._goes_on = decision.checkpoint, False, False
        self._protocol = agreed([member.join for member in self._members.values()])
        self._display.begin()
        self._on_start(self.generation, decision.checkpoint)
        self.state = move(self.state, RunState.RUNNING)
        if self._started_s is None:
            self._started_s = time.monotonic()
        for member in self._members.values():
            self._start(member)
        self._emit(
            "started",
            run_id=self.run_id,
            generation=self.generation,
            checkpoint=decision.checkpoint,
        )

    def _start(self, member: Member, *, returning: bool = False) -> None:
        """Tells a member that its generation begins, or is under way."""
        active = self.recipe.active.name
        member.progress = member.plan = None
        member.began_s = time.monotonic()
        start = control_pb2.Start(
            run_id=self.run_id,
            generation=self.generation,
            checkpoint="" if returning else self._checkpoint,
            exchange_address=""
            if member.name == active
            else self._members[active].join.exchange_address,
            left=list(self._left),
            returning=returning,
            protocol=self._protocol
            or agreed([each.join for each in self._members.values() if each.joined]),
            anew=member.anew,
        )
        member.outbox.put(control_pb2.ServerMessage(start=start))

    def _planned(self, member: Member, plan: control_pb2.Plan) -> None:
        """Takes a party's plan; once all plans are there, compares them and begins the
        aggregation.
        """
        if self.state is not RunState.RUNNING or not member.joined:
            # The party does not know yet that its generation has ended.
            return
        if member.plan is not None:
            text = f"{member.name} said twice in a generation what it is going to do"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=member.name)
        member.plan = declarations.declared(
            plan, self._phases if self.job == "train" else (), member.name
        )
        plans = {name: each.plan for name, each in self._in_order() if each.plan is not None}
        if len(plans) < sum(each.joined for each in self._members.values()):
            return
        # The party has come back; the others have gone on.
        if self._agreed:
            declarations.agreed(plans, self._phases)
            return
        self._agreed = True
        try:
            agreed = declarations.agreed(plans, self._phases)
            self._on_plan(self.generation, self._checkpoint, agreed)
            self._goes_on = (
                self.job == "train" and self.recipe.run.server_absent_s > 0.0 and not agreed
            )
        except VflError as error:
            self._fail(error)

    def _can_do_without(self, name: str, *, reported: bool = False) -> bool:
        """Returns whether the generation goes on without a party: the active one said so, and can
        learn from others.
        """
        active = self.recipe.active
        at_it = self._members.get(active.name)
        if (
            at_it is None
            or name == active.name
            or not at_it.lenient
            or not self._agreed
            or reported
        ):
            return False
        others = [
            other
            for other, each in self._members.items()
            if each.joined and other not in (active.name, name)
        ]
        return active.features or bool(others)

    def _lenient(self, member: Member, on: bool) -> None:
        """Notes whether the active party goes on without lost parties; if it does not any more, all
        wait for them.
        """
        member.lenient = on and self.state is RunState.RUNNING
        if self._away and not on and self.state is RunState.RUNNING:
            away = [name for name in self._roster if name in self._away]
            self._interrupt(
                f"{', '.join(away)} {'are' if len(away) > 1 else 'is'} away, and needed now",
                lost=away,
            )
            self._decide(announce=True)

    def _lose(self, member: Member, how: str, *, may_return: bool = False) -> None:
        """Handles the loss of a party; ``may_return``: only its connection may be lost."""
        del self._members[member.name]
        member.outbox.put(None)
        self._lock.notify_all()
        reported = member.report is not None
        if (
            self.state is RunState.RUNNING
            and member.joined
            and self._can_do_without(member.name, reported=reported)
        ):
            self._away.add(member.name)
            self._emit("away", party=member.name, how=how)
            return
        if self.state is RunState.RUNNING and member.joined and self._goes_on and may_return:
            self._cut[member.name] = time.monotonic()
            self._emit("lost", party=member.name, how=how)
            return
        # Others only asked: one that has left, say.
        if self.state is RunState.RUNNING and member.joined:
            self._interrupt(f"{member.name} {how}", lost=[member.name])
        if self.state is RunState.WAITING and member.joined:
            self._emit("lost", party=member.name, how=how)
            self._decide(announce=True)

    def _interrupt(self, reason: str, lost: list[str], *, leaving: bool = False) -> None:
        self.state = move(self.state, RunState.WAITING)
        self._interruptions += 1
        self._away.clear()
        self._cut.clear()
        self._on_end(InterruptedRun(reason))
        self._waiting_since_s = time.monotonic()
        self._deadline_s = self.recipe.run.rejoin_deadline_s
        interrupt = control_pb2.Interrupt(
            generation=self.generation, lost=lost, reason=reason, leaving=leaving
        )
        for member in self._members.values():
            member.joined, member.report, member.alone, member.lenient = False, None, False, False
            member.outbox.put(control_pb2.ServerMessage(interrupt=interrupt))
        self._emit("interrupted", reason=reason, deadline_s=self._deadline_s)

    def _report(self, member: Member, report: control_pb2.Report) -> None:
        if self.state is not RunState.RUNNING or not member.joined:
            # The party does not know yet that its generation has ended.
            return
        if not is_sound(report):
            text = f"{member.name} sent a report that cannot be read"
            self._fail(PeerError(Code.MALFORMED_MESSAGE, text, party=member.name))
            return
        member.report = report
        self._let_go()
        self._maybe_complete()

    def _let_go(self) -> None:
        """Lets parties leave that exchange nothing more, once the active party says that it needs
        nobody.

        Their own report is not enough: if one still owed data, the others would wait for a party
        that nobody watches.
        """
        active = self._members.get(self.recipe.active.name)
        if active is None or not active.alone or self.job != "train":
            return
        for name, member in self._in_order():
            if member is active or member.report is None or len(member.report.free_from) < 2:
                continue
            self._left[name] = left = Left(self._identities[name], member.report)
            self._on_leave(left)
            del self._members[name]
            member.outbox.put(control_pb2.ServerMessage(complete=control_pb2.Complete()))
            member.outbox.put(None)
            self._lock.notify_all()
            self._emit("left", party=name)

    def _maybe_complete(self) -> None:
        reports = {
            name: member.report
            for name, member in self._members.items()
            if member.report is not None
        }
        reports |= {name: each.report for name, each in self._left.items()}
        if self.state is RunState.RUNNING and set(reports) == set(self._roster):
            self._reports = reports
            self._display.flush(self._progress())
            self.state = move(self.state, RunState.COMPLETED)
            self._on_end(InterruptedRun("the run is complete"))
            self.finished.set()

    def _aborted(self, member: Member, message: control_pb2.PartyMessage) -> None:
        failure = message.abort
        try:
            code = Code(failure.code)
        except ValueError:
            code = Code.INTERNAL
        if code is Code.INTERRUPTED:
            code = Code.ABORTED
        elif code is Code.ABORTED and failure.party != member.name:
            # It ends because of another party, which says itself why: the cause is to be told, not
            # its echo.
            return
        elif code in (Code.PARTY_LOST, Code.STEP_TIMEOUT) and not self._may_miss(
            member.name, failure.party
        ):
            # An echo too: the active party, or this server, has found out, and says so.
            return
        # The active party sees the others' data and may blame them; a passive party speaks only for
        # itself.
        may_blame = member.name == self.recipe.active.name and failure.party in self._roster
        culprit, text = failure.party if may_blame else member.name, clean(failure.message)
        reported = member.report is not None
        if self.state is RunState.RUNNING and self._can_do_without(member.name, reported=reported):
            self._lose(member, f"has ended: {text}")
            return
        self._fail(
            PeerError(code, text, party=culprit).privately(f"{member.name} stopped the run: {text}")
        )

    def _may_miss(self, name: str, missed: str) -> bool:
        """Returns whether ``name`` exchanges anything with ``missed``: passive parties do not with
        each other.
        """
        active = self.recipe.active.name
        return name == active or missed in ("", name, active) or missed not in self._roster

    def _fail(self, error: VflError) -> None:
        if self.state in (RunState.COMPLETED, RunState.FAILED):
            return
        self.state = move(self.state, RunState.FAILED)
        self.failure = error
        self._on_end(error)
        for member in self._members.values():
            self._stop(member, error)
        self.finished.set()

    @staticmethod
    def _stop(member: Member, error: VflError) -> None:
        member.outbox.put(control_pb2.ServerMessage(stop=to_failure(error)))
        member.outbox.put(None)

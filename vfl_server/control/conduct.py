"""Handles the parties' messages and carries out the decisions of ``presence``: sends messages,
calls hooks and starts generations.

Not thread-safe: the coordinator calls it under its lock and passes the time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from vfl_common.errors import Code, InterruptedRun, LostError, PeerError, VflError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.process.logs import Rate
from vfl_common.summary import PartySummary
from vfl_common.text import clean
from vfl_server.control import admission, membership
from vfl_server.control import presence as decisions
from vfl_server.control.membership import Member, WaitingNews, progress_of
from vfl_server.control.presence import Action, Admission, Claim, PartyState, Presence
from vfl_server.control.reports import get_report_facts, get_stop_error, is_sound
from vfl_server.control.run import (
    Display,
    Left,
    PresenceRules,
    RunHooks,
    RunState,
    ServedRun,
    Status,
    get_metrics,
)

# The maximum number of characters of a text in a party's messages.
MAX_TEXT = 200

log = logging.getLogger(__name__)


class Conduct:
    """Manages the sessions and the generations of one run.

    ``members``: {party: its open session}. ``reports``: {party: its report}, once the run is
    complete. ``failure``: The error with which the run has failed. ``set_aside``: The reason why
    the run is to be set aside. ``finished``: Set once the run has ended.
    """

    def __init__(self, run: ServedRun, hooks: RunHooks, now_s: float) -> None:
        self.run, self.generation = run, run.generation
        self.members: dict[str, Member] = {}
        self.reports: dict[str, control_pb2.Report] = {}
        self.failure: VflError | None = None
        self.set_aside = ""
        self.finished = threading.Event()
        self._hooks, self._emit = hooks, hooks.emit
        rules = PresenceRules.of(run.recipe, run.job)
        self._roster, self._active = rules.roster, rules.active
        self._phases = tuple(phase.name for phase in run.recipe.phases)
        self._display = Display(hooks.emit, self._phases, rules.active)
        self._waiting = WaitingNews()
        self._left = dict(run.left)
        self._identities = {name: party.identity for name, party in run.left.items()}
        # A party that joins again ends a generation for all, so the rate is limited.
        self._rejoin_rate = Rate(admission.AGAIN_S, admission.AGAIN)
        # The protocol version of this generation; 0 if an earlier process started the generation.
        self._protocol = 0
        # The checkpoint from which the generation started.
        self._checkpoint = ""
        self._started_s = now_s - run.ran_s if run.ran_s else None
        # The summary for the parties, once the run is complete.
        self._summary_json: str | None = None
        # The parties that know that the run is complete.
        self._informed: set[str] = set()
        self.stopped = False
        # Each generation of an earlier process counts as an interruption.
        self.presence = Presence(rules, now_s, interruptions=run.generation)
        for name, left in run.left.items():
            self.presence.note_report(name, left.report.free_from)
            self.presence.leave(name)
        if run.completed:
            self.presence.state = RunState.COMPLETED
        elif run.under_way:
            self.presence.take_up()

    def open(self, name: str, now_s: float) -> Member:
        """Opens a session for party ``name``. If this server has been stopped, the session ends at
        once.
        """
        member = Member(name)
        if self.stopped:
            member.end()
        else:
            self.members[name] = member
            self.presence.note_message(name, now_s)
        return member

    def lose(self, name: str, how: str, now_s: float, *, may_return: bool = False) -> None:
        """Handles the end of a session. ``may_return``: Whether only the connection may be lost."""
        if self._summary_json is not None and self.presence.has_joined(name):
            self._informed.add(name)
        self._carry_out(self.presence.lose(name, how, now_s, may_return=may_return), now_s)

    def note_refusal(self, name: str, error: VflError, now_s: float) -> None:
        """Reports to the waiting parties that party ``name`` was refused."""
        # With NAME_TAKEN, another process with the same name takes part in the run.
        is_irrelevant = name not in self._roster or error.code is Code.NAME_TAKEN
        # During a generation the refusal is kept for parties that wait later.
        if not (is_irrelevant or self.presence.has_joined(name)) and self._waiting.note_refusal(
            name, error.code
        ):
            self._decide(now_s, announce=True)

    def handle(self, member: Member, message: control_pb2.PartyMessage, now_s: float) -> None:
        """Handles one message of a party. Raises PeerError if the party must be refused."""
        name, presence = member.name, self.presence
        presence.note_message(name, now_s)
        body = message.WhichOneof("body")
        if body == "join":
            self._join(member, message.join, now_s)
        elif body == "plan":
            self._plan(member, message.plan)
        elif body == "progress":
            member.progress = message.progress
            presence.extend_planning(name, now_s)
            self._display.take(name, progress_of(self.members, self._roster), now_s)
        elif body == "report":
            self._report(member, message.report)
        elif body == "alone":
            presence.says_alone(name)
            self._settle()
        elif body == "lenient" and name == self._active:
            self._carry_out(presence.says_lenient(message.lenient.on, now_s), now_s)
        elif body == "stopping":
            # If the party is no longer in a generation, ``lose`` emits no event.
            if not presence.has_joined(name):
                self._emit("lost", party=name, how="was stopped")
            self.lose(name, "was stopped", now_s)
        elif body == "abort":
            error = get_stop_error(member, message.abort, self._active, self._roster)
            if error is not None and presence.can_do_without(name):
                self.lose(name, f"has ended: {clean(message.abort.message)}", now_s)
            elif error is not None:
                self.fail(error)

    def tick(self, now_s: float) -> None:
        """Finds silent parties and deadlines that have passed."""
        if still_s := self.presence.pardon(now_s):
            log.warning(
                "this process was suspended for %.0f s", still_s, extra={"event": "standstill"}
            )
        self._display.tick(progress_of(self.members, self._roster), now_s)
        self._carry_out(self.presence.tick(now_s), now_s)
        self._decide(now_s, announce=self._waiting.is_due(now_s))

    def stop(self, now_s: float) -> None:
        """Ends all sessions because this server was stopped."""
        self.stopped = True
        reason = f"{self.run.recipe.server} was stopped"
        self._carry_out(self.presence.stop(reason, now_s), now_s)
        for member in self.members.values():
            member.end()

    def fail(self, error: VflError) -> None:
        """Ends the run and sends ``error`` to every party, unless it has ended."""
        if self.presence.fail():
            self.failure = error
            self._hooks.on_end(error)
            for member in self.members.values():
                member.stop(error)
            self.finished.set()

    def get_joins_of_others(self, name: str) -> dict[str, control_pb2.Join]:
        """Returns {party: its Join message} for the joined parties except ``name``. If several
        messages have the same compared fields, only the first is returned.
        """
        alike: dict[bytes, str] = {}
        for other in self.presence.at(PartyState.IN):
            if other != name:
                alike.setdefault(self.members[other].compared, other)
        return {other: self.members[other].join for other in alike.values()}

    def _get_shown(self) -> dict[str, str]:
        """Returns {party: its policy and grant as JSON} for all parties that have joined."""
        joined = self.presence.at(PartyState.IN)
        return {name: self.members[name].join.shown_json for name in joined}

    def status(self, now_s: float) -> Status:
        """Returns the state and progress of the run at ``now_s``."""
        presence, slowest = self.presence, self._display.shown
        reported = progress_of(self.members, self._roster)
        return Status(
            state=presence.state,
            generation=self.generation,
            interruptions=presence.interruptions,
            at_work=presence.state is RunState.RUNNING and presence.agreed,
            wall_s=0.0 if self._started_s is None else now_s - self._started_s,
            joined=presence.at(PartyState.IN),
            left=presence.at(PartyState.GONE),
            silent_s=presence.silent_s(now_s),
            phase=clean(slowest.phase, MAX_TEXT),
            round=slowest.round,
            rounds=slowest.rounds,
            steps=self._display.steps,
            reported={
                name: (clean(progress.phase, MAX_TEXT), get_metrics(progress))
                for name, progress in reported.items()
            },
        )

    def parties(self) -> list[PartySummary]:
        """Returns the parties, in roster order, with the facts that they reported."""
        identities = (self._identities[name] for name in self._roster if name in self._identities)
        reports = self.reports
        return [
            identity.model_copy(update=get_report_facts(reports[identity.name]))
            if identity.name in reports
            else identity
            for identity in identities
        ]

    @property
    def all_informed(self) -> bool:
        """Whether every party knows that the run is complete."""
        return self._informed | self._left.keys() >= set(self._roster)

    def complete(self, summary_json: str) -> None:
        """Reports to every party that the run is complete."""
        self._summary_json = summary_json
        for member in self.members.values():
            self._dismiss(member)

    def _carry_out(self, actions: Iterable[Action], now_s: float) -> None:
        """Carries out the decisions of ``presence``."""
        for action in actions:
            if isinstance(action, decisions.Close):
                member = self.members.pop(action.party, None)
                if member is not None:
                    member.end()
            elif isinstance(action, decisions.Tell):
                self._emit(action.event, party=action.party, how=action.how)
            elif isinstance(action, decisions.Interrupt):
                self._hooks.on_end(InterruptedRun(action.reason))
                for member in self.members.values():
                    member.report = None
                    member.interrupt(self.generation, action.reason, action.lost, action.leaving)
                deadline_s = self.presence.deadline_s
                self._emit("interrupted", reason=action.reason, deadline_s=deadline_s)
            elif isinstance(action, decisions.Review):
                self._decide(now_s, announce=True)
            elif isinstance(action, decisions.Fail):
                self.fail(action.error)

    def _decide(self, now_s: float, *, announce: bool, joined: Member | None = None) -> None:
        """Begins the run if it may begin. If not, and ``announce`` is true, reports to the waiting
        parties why not.

        ``joined``: The member that has just joined, which always gets this report.
        """
        if self.stopped or self.presence.state is not RunState.WAITING:
            return
        decision, waiting = self.presence.decide(now_s), self._waiting
        if isinstance(decision, membership.Begin):
            self._begin(decision.checkpoint, now_s)
        elif isinstance(decision, membership.Refuse):
            for name in decision.lacking:
                # If this party took part, the other parties would have to start the run again.
                error = admission.make_lacking_error(
                    name, self.run.run_id, decision.label or "its beginning"
                )
                self.members[name].refuse(error)
                waiting.refused[name] = error.code
                how = "cannot resume at a checkpoint that the others hold"
                self._carry_out(self.presence.lose(name, how, now_s), now_s)
        elif isinstance(decision, membership.GiveUp):
            reasons = "; ".join([decision.reason, *waiting.explain_refusals(decision.missing)])
            self.fail(LostError(Code.PARTY_LOST, reasons, party=decision.missing[0]))
        elif announce:
            members = [joined] if joined is not None else []
            if waiting.should_report_to_all(now_s):
                members = [self.members[name] for name in self.presence.at(PartyState.IN)]
                self._emit("waiting", **waiting.make_facts(decision))
            for member in members:
                member.send(waiting.make_message(decision))

    def _begin(self, checkpoint: str, now_s: float) -> None:
        """Begins a generation with all parties that have joined, from ``checkpoint``."""
        self.generation += 1
        self._checkpoint = checkpoint
        self._protocol = admission.choose_protocol(self.get_joins_of_others("").values())
        self._display.begin()
        self._hooks.on_start(self.generation, checkpoint)
        self.presence.begin(now_s)
        self._started_s = now_s if self._started_s is None else self._started_s
        for name in self.presence.at(PartyState.IN):
            self._start(self.members[name])
        self._emit(
            "started", run_id=self.run.run_id, generation=self.generation, checkpoint=checkpoint
        )

    def _start(self, member: Member, *, returning: bool = False) -> None:
        """Sends a member a Start message. ``returning``: Whether the generation is already
        running.
        """
        active = self._active
        member.progress = member.plan = None
        active_address = "" if member.name == active else self.members[active].join.exchange_address
        member.start(
            run_id=self.run.run_id,
            generation=self.generation,
            checkpoint="" if returning else self._checkpoint,
            exchange_address=active_address,
            left=list(self._left),
            returning=returning,
            protocol=self._protocol
            or admission.choose_protocol(self.get_joins_of_others("").values()),
            anew=member.anew,
            shown=self._get_shown(),
        )

    def _join(self, member: Member, join: control_pb2.Join, now_s: float) -> None:
        """Handles a party's Join message: enters the party, or reports to it why it cannot join.
        Raises PeerError if the party is refused.
        """
        name, presence, run_id = member.name, self.presence, self.run.run_id
        joins = self.get_joins_of_others(name)
        admission.admit(name, join, self.run.recipe, self.run.job, joins, self.run.oldest)
        admission.require_small_tables(name, join, self._get_shown())
        # A party that joins after the run has failed gets the error.
        if self.failure is not None:
            member.stop(self.failure)
            return
        if presence.state is RunState.COMPLETED:
            member.join = join
            if name not in self._left:
                presence.enter(name, now_s)
            # If the summary is not ready yet, ``complete`` reports the end to the party later.
            if self._summary_json is not None:
                self._dismiss(member)
            return
        if join.generation:
            # A stopped server ends the session, and the party asks the next server.
            if not self.stopped:
                self._claim(member, join, now_s)
            return
        if self.run.job == "train" and join.run_id not in ("", run_id):
            member.anew = self._hooks.released(join.run_id)
            if not member.anew and any(join.checkpoints):
                begun = self.generation > 0
                error = admission.make_other_run_error(
                    name, join.run_id, run_id, self.run.recipe.server, begun=begun
                )
                if begun:
                    raise error
                self.fail(error)
                return
        entry = presence.entry(name, now_s)
        if entry is Admission.DONE:
            raise admission.make_already_left_error(name, run_id)
        if entry is Admission.RETURNS:
            spoken = self._protocol or admission.choose_protocol(joins.values())
            admission.require_return(name, join, run_id, spoken)
        elif entry is Admission.INTERRUPTS:
            if self._rejoin_rate.passes(name, now_s) is None:
                raise admission.make_too_often_error(name)
            self._carry_out([presence.interrupt(f"{name} joins again", now_s)], now_s)
        if join.unfit and join.run_id == run_id:
            why = admission.explain_unfit(name, join)
            if not self._hooks.expired():
                self.fail(
                    admission.make_unfit_error(name, why, self.run.recipe.run.resume_within_s)
                )
                return
            self.set_aside = why
            self.stop(now_s)
            self.finished.set()
            return
        self._enter(member, join, now_s)
        if entry is Admission.RETURNS:
            self._start(member, returning=True)
            self._emit("back", party=name)
        else:
            self._decide(now_s, announce=True, joined=member)

    def _claim(self, member: Member, join: control_pb2.Join, now_s: float) -> None:
        """Handles a party that continued without this server: takes the party back, or reports to
        it that its generation is over.
        """
        is_this_run, is_last_generation = (
            join.run_id == self.run.run_id,
            join.generation == self.generation,
        )
        claim = self.presence.claim(
            member.name, now_s, run=is_this_run, generation=is_last_generation
        )
        if claim is Claim.GOES_ON:
            self._enter(member, join, now_s)
            self.presence.note_plan(member.name)
            # A party continues without the server only if it sends no weights to the server.
            member.plan = ()
            member.start(run_id=self.run.run_id, generation=self.generation, goes_on=True)
            self._emit("back", party=member.name)
        elif claim is Claim.MAY_GO:
            member.complete()
        else:
            member.interrupt(join.generation, f"generation {join.generation} is over")

    def _enter(self, member: Member, join: control_pb2.Join, now_s: float) -> None:
        """Records that a party has joined."""
        name = member.name
        member.join, member.report = join, None
        offers = admission.offers_of(join, self.run.run_id)
        self.presence.enter(name, now_s, offers, join.held)
        self._left.pop(name, None)
        self._waiting.refused.pop(name, None)
        self._identities[name] = admission.identity_of(name, join)
        self._emit("joined", party=name, **admission.facts_of(join))

    def _plan(self, member: Member, plan: control_pb2.Plan) -> None:
        """Handles a party's plan. Once all plans have arrived, compares them and begins the
        aggregation.
        """
        name, presence = member.name, self.presence
        if not presence.takes_part(name):
            return
        if member.plan is not None:
            raise PeerError(
                Code.MALFORMED_MESSAGE, f"{name} sent two plans in one generation", party=name
            )
        phases = self._phases if self.run.job == "train" else ()
        member.plan = admission.parse_declarations(plan, phases, name)
        presence.note_plan(name)
        if not presence.everybody_planned():
            return
        plans = {other: self.members[other].plan or () for other in presence.at(PartyState.IN)}
        # In an agreed generation only a returning party sends a plan. It must fit the others'
        # plans.
        if presence.agreed:
            admission.agree_on_plans(plans, self._phases)
            return
        try:
            agreed = admission.agree_on_plans(plans, self._phases)
            presence.agree(averages=bool(agreed))
            self._hooks.on_plan(self.generation, self._checkpoint, agreed)
        except VflError as error:
            self.fail(error)

    def _report(self, member: Member, report: control_pb2.Report) -> None:
        """Handles the report of a party that has finished."""
        if not self.presence.takes_part(member.name):
            return
        if not is_sound(report, len(self._roster)):
            self.fail(
                PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{member.name} sent a report that cannot be read",
                    party=member.name,
                )
            )
            return
        member.report = report
        self.presence.note_report(member.name, report.free_from)
        self._settle()

    def _settle(self) -> None:
        """Dismisses the parties that are not needed any more, and ends the run if all have
        reported.
        """
        for name in self.presence.may_go():
            member = self.members.pop(name)
            left = Left(self._identities[name], member.report or control_pb2.Report())
            self._left[name] = left
            self._hooks.on_leave(left)
            self.presence.leave(name)
            member.complete()
            self._emit("left", party=name)
        if self.presence.complete():
            self.reports = {name: left_.report for name, left_ in self._left.items()}
            for name, member in self.members.items():
                if member.report is not None:
                    self.reports[name] = member.report
            self._display.flush(progress_of(self.members, self._roster))
            self._hooks.on_end(InterruptedRun("the run is complete"))
            self.finished.set()

    def _dismiss(self, member: Member) -> None:
        """Reports to a party that the run is complete."""
        summary = self._summary_json if member.name == self._active else ""
        member.complete(self.run.run_id, summary or "")

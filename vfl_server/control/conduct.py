"""What follows from the parties' messages and from what ``presence`` decides: messages, hooks,
generations.

Not thread-safe: the coordinator calls it under its lock, and says what time it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from vfl_common.errors import Code, InterruptedRun, LostError, PeerError, VflError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.guard.rate import Rate
from vfl_common.summary import PartySummary
from vfl_common.text import clean
from vfl_server.control import admission, decisions, declarations, membership
from vfl_server.control.decisions import Action, Admission, Claim
from vfl_server.control.departures import Left
from vfl_server.control.display import Display, metrics
from vfl_server.control.members import Member, progress_of
from vfl_server.control.presence import PartyState, Presence
from vfl_server.control.reports import get_report_facts, get_stop_error, is_sound
from vfl_server.control.run import PresenceRules, RunHooks, RunState, ServedRun, Status
from vfl_server.control.waiting import WaitingNews

# Characters of a text in a party's messages.
MAX_TEXT = 200

log = logging.getLogger(__name__)


class Conduct:
    """The sessions and the generations of one run.

    ``members``: {party: its open session}. ``reports``: {party: its report}, once the run is
    complete. ``failure``: why it has failed. ``set_aside``: why it is to be set aside.
    ``finished``: it has ended.
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
        # Each return of a party ends a generation for all.
        self._again = Rate(admission.AGAIN_S, admission.AGAIN)
        # The protocol of this generation; 0: an earlier process of this server knew it.
        self._protocol = 0
        # The checkpoint from which the generation started.
        self._checkpoint = ""
        self._started_s = now_s - run.ran_s if run.ran_s else None
        # Once the run is complete.
        self._summary_json: str | None = None
        # Parties that have heard of it.
        self._told: set[str] = set()
        self.stopped = False
        # An earlier process of this server ended each of its generations.
        self.presence = Presence(rules, now_s, interruptions=run.generation)
        for name, left in run.left.items():
            self.presence.note_report(name, left.report.free_from)
            self.presence.leave(name)
        if run.completed:
            self.presence.state = RunState.COMPLETED
        elif run.under_way:
            self.presence.take_up()

    def open(self, name: str, now_s: float) -> Member:
        """Opens a session; once this server has been stopped, it ends at once."""
        member = Member(name)
        if self.stopped:
            member.end()
        else:
            self.members[name] = member
            self.presence.note_message(name, now_s)
        return member

    def lose(self, name: str, how: str, now_s: float, *, may_return: bool = False) -> None:
        """Handles the end of a session; ``may_return``: only its connection may be lost."""
        if self._summary_json is not None and self.presence.has_joined(name):
            self._told.add(name)
        self._carry_out(self.presence.lose(name, how, now_s, may_return=may_return), now_s)

    def note_refusal(self, name: str, error: VflError, now_s: float) -> None:
        """Tells those who wait for a party that it was refused."""
        # If its name is taken, another process of that name takes part.
        other = name not in self._roster or error.code is Code.NAME_TAKEN
        # While a generation runs, for those who wait after it.
        if not (other or self.presence.has_joined(name)) and self._waiting.refuse(name, error.code):
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
            # Another party noticed it first, and has interrupted the generation.
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
        self._decide(now_s, announce=self._waiting.due(now_s))

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

    def others(self, name: str) -> dict[str, control_pb2.Join]:
        """Returns {party: what it said} of those beside ``name`` that have joined; of those that
        said the same, only the first.
        """
        alike: dict[bytes, str] = {}
        for other in self.presence.at(PartyState.IN):
            if other != name:
                alike.setdefault(self.members[other].compared, other)
        return {other: self.members[other].join for other in alike.values()}

    def _get_shown(self) -> dict[str, str]:
        """Returns {party: what it shows to all} of all that have joined."""
        joined = self.presence.at(PartyState.IN)
        return {name: self.members[name].join.shown_json for name in joined}

    def status(self, now_s: float) -> Status:
        """Returns the run at this moment."""
        presence, slowest = self.presence, self._display.shown
        progress = progress_of(self.members, self._roster)
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
            told={
                name: (clean(news.phase, MAX_TEXT), metrics(news))
                for name, news in progress.items()
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
    def all_told(self) -> bool:
        """Whether every party has heard that the run is complete."""
        return self._told | self._left.keys() >= set(self._roster)

    def complete(self, summary_json: str) -> None:
        """Tells every party that the run is complete."""
        self._summary_json = summary_json
        for member in self.members.values():
            self._dismiss(member)

    def _carry_out(self, actions: Iterable[Action], now_s: float) -> None:
        """Does what ``presence`` has decided."""
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
        """Begins the run if it may begin; else tells those who wait, if ``announce``.

        ``joined``: who has joined just now, and hears it in any case.
        """
        if self.stopped or self.presence.state is not RunState.WAITING:
            return
        decision, waiting = self.presence.decide(now_s), self._waiting
        if isinstance(decision, membership.Begin):
            self._begin(decision.checkpoint, now_s)
        elif isinstance(decision, membership.Refuse):
            for name in decision.lacking:
                # The others would have to begin again.
                error = admission.lacking(name, self.run.run_id, decision.label or "its beginning")
                self.members[name].refuse(error)
                waiting.refused[name] = error.code
                how = "cannot resume at a checkpoint that the others hold"
                self._carry_out(self.presence.lose(name, how, now_s), now_s)
        elif isinstance(decision, membership.GiveUp):
            reasons = "; ".join([decision.reason, *waiting.why(decision.missing)])
            self.fail(LostError(Code.PARTY_LOST, reasons, party=decision.missing[0]))
        elif announce:
            members = [joined] if joined is not None else []
            if waiting.tells_all(now_s):
                members = [self.members[name] for name in self.presence.at(PartyState.IN)]
                self._emit("waiting", **waiting.facts(decision))
            for member in members:
                member.tell(waiting.message(decision))

    def _begin(self, checkpoint: str, now_s: float) -> None:
        """Begins a generation of all that have joined."""
        self.generation += 1
        self._checkpoint = checkpoint
        self._protocol = admission.choose_protocol(self.others("").values())
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
        """Tells a member that its generation begins, or is under way."""
        active = self._active
        member.progress = member.plan = None
        at = "" if member.name == active else self.members[active].join.exchange_address
        member.start(
            run_id=self.run.run_id,
            generation=self.generation,
            checkpoint="" if returning else self._checkpoint,
            exchange_address=at,
            left=list(self._left),
            returning=returning,
            protocol=self._protocol or admission.choose_protocol(self.others("").values()),
            anew=member.anew,
            shown=self._get_shown(),
        )

    def _join(self, member: Member, join: control_pb2.Join, now_s: float) -> None:
        """Takes a party as one that has joined, or tells it why not. Raises PeerError if it is
        refused.
        """
        name, presence, run_id = member.name, self.presence, self.run.run_id
        others = self.others(name)
        admission.admit(name, join, self.run.recipe, self.run.job, others, self.run.oldest)
        admission.require_shown(name, join, self._get_shown())
        # It comes too late, and hears why.
        if self.failure is not None:
            member.stop(self.failure)
            return
        if presence.state is RunState.COMPLETED:
            member.join = join
            if name not in self._left:
                presence.enter(name, now_s)
            # Otherwise ``complete`` tells it.
            if self._summary_json is not None:
                self._dismiss(member)
            return
        if join.generation:
            # Otherwise its session ends, and it asks the next server.
            if not self.stopped:
                self._claim(member, join, now_s)
            return
        if self.run.job == "train" and join.run_id not in ("", run_id):
            member.anew = self._hooks.released(join.run_id)
            if not member.anew and any(join.checkpoints):
                begun = self.generation > 0
                error = admission.other_run_error(
                    name, join.run_id, run_id, self.run.recipe.server, begun=begun
                )
                if begun:
                    raise error
                self.fail(error)
                return
        entry = presence.entry(name, now_s)
        if entry is Admission.DONE:
            raise admission.already_left_error(name, run_id)
        if entry is Admission.RETURNS:
            spoken = self._protocol or admission.choose_protocol(others.values())
            admission.require_return(name, join, run_id, spoken)
        elif entry is Admission.INTERRUPTS:
            if self._again.passes(name, now_s) is None:
                raise admission.too_often(name)
            self._carry_out([presence.interrupt(f"{name} joins again", now_s)], now_s)
        if join.unfit and join.run_id == run_id:
            why = admission.why_unfit(name, join)
            if not self._hooks.expired():
                self.fail(admission.unfit(name, why, self.run.recipe.run.resume_within_s))
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
        """Takes back a party that went on without this server, or tells it that its generation is
        over.
        """
        ours, last = join.run_id == self.run.run_id, join.generation == self.generation
        claim = self.presence.claim(member.name, now_s, run=ours, generation=last)
        if claim is Claim.GOES_ON:
            self._enter(member, join, now_s)
            self.presence.note_plan(member.name)
            # It goes on because it swaps nothing with this server.
            member.plan = ()
            member.start(run_id=self.run.run_id, generation=self.generation, goes_on=True)
            self._emit("back", party=member.name)
        elif claim is Claim.MAY_GO:
            member.complete()
        else:
            member.interrupt(join.generation, f"generation {join.generation} is over")

    def _enter(self, member: Member, join: control_pb2.Join, now_s: float) -> None:
        """Notes that a party has joined."""
        name = member.name
        member.join, member.report = join, None
        offers = admission.offers_of(join, self.run.run_id)
        self.presence.enter(name, now_s, offers, join.held)
        self._left.pop(name, None)
        self._waiting.refused.pop(name, None)
        self._identities[name] = admission.identity_of(name, join)
        self._emit("joined", party=name, **admission.facts_of(join))

    def _plan(self, member: Member, plan: control_pb2.Plan) -> None:
        """Takes a party's plan; once all plans are there, compares them and begins the
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
        member.plan = declarations.parse_declarations(plan, phases, name)
        presence.note_plan(name)
        if not presence.everybody_planned():
            return
        plans = {other: self.members[other].plan or () for other in presence.at(PartyState.IN)}
        # The party has come back; the others have gone on.
        if presence.agreed:
            declarations.agree_on_plans(plans, self._phases)
            return
        try:
            agreed = declarations.agree_on_plans(plans, self._phases)
            presence.agree(averages=bool(agreed))
            self._hooks.on_plan(self.generation, self._checkpoint, agreed)
        except VflError as error:
            self.fail(error)

    def _report(self, member: Member, report: control_pb2.Report) -> None:
        """Takes the report of a party that has finished."""
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
        """Lets those go that are not needed any more, and ends the run if all have reported."""
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
        """Tells a party that the run is complete."""
        summary = self._summary_json if member.name == self._active else ""
        member.complete(self.run.run_id, summary or "")

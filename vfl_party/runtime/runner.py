"""Runs a party's side: joins, resumes at the newest checkpoint that all hold, runs the phases,
reports; or rejoins.

Positions. The rounds of all phases are numbered through: a checkpoint's label is
``<position>.<phase>.<round>`` with the position zero-padded, so that labels sort, and parties
compare labels without knowing each other's phases.

A party keeps the rounds that it did alone (``Phase.alone_from``): it offers their labels as resume
points too, without checkpoints of its own there. For example, A and B are both alone from position
2, and the run resumes at 3:

    A    has a checkpoint at 5    offers 5 4 3 2    resumes at 5
    B    has a checkpoint at 3    offers 3 2        resumes at 3, and repeats 3 and 4

A party that is alone to the end of the run is not needed if the run resumes at such a label, so it
may leave.

A party offers '', the run's beginning, only if it has written at most ``MOST_LOST`` checkpoints:
until then a party that is killed may hold none (``vfl_party.base.checkpoint`` says why). So a party
that offers nothing, by accident or on purpose, cannot have the others begin again.

A party that comes back while the others go on (``Phase.lenient``) joins the generation that is
under way. It resumes at its own newest checkpoint, shows the active party that its rows are still
the same, and is told the step to catch up to. If a generation begins in such a phase, a passive
party may lack the rounds that the active party has: it offers their labels, too, and says which of
its labels it holds. The run resumes at a label that as many as possible hold.

A party that is in a run takes no other one unless the server says why: because somebody began anew,
or the run is over. It says so, and sets its own run aside. A party whose rows or columns have
changed tells the server that it cannot resume; the server decides whether the run is set aside
(``run.resume_within_s``), or the party must restore its data.

A party may skip rounds that leave it unchanged (``Phase.skippable``: an upload). It offers the
labels after them too; the run begins at one only if the peers' checkpoints hold the round's result.

A checkpoint between two rounds of a phase is written while the next round runs: nobody else has to
wait for this party's disk. A party that is killed may then hold one checkpoint less;
``vfl_party.base.checkpoint`` says why all still hold a common one. The runner waits for the disk
wherever others rely on a checkpoint: at the end of a phase, when the round says so
(``RoundReport.checkpoint``), and before it says that it needs nobody, that the run is trained, or
its results.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from vfl_common.errors import ChangedError, Code, InputError, InterruptedRun, PeerError, VflError
from vfl_common.ledger import Ledger, load_entries
from vfl_common.rpc.messages import Done, Joining, Membership, PartyReport, Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import (
    AggregationPlan,
    Planned,
    ahead,
    alone_after,
    label_of,
    position_of,
    reachable,
)
from vfl_common.summary import Absence, PhaseTimes
from vfl_common.text import to_json
from vfl_party.base.phase import Phase, Predictions, RoundReport, Tree
from vfl_party.base.plugins import blaming

# Checkpoints that a death may cost a party.
MOST_LOST = 2

log = logging.getLogger(__name__)


class Job(ABC):
    """Holds what one generation of a run works with: models in their initial state, phases, the
    exchange.
    """

    @property
    @abstractmethod
    def phases(self) -> Sequence[Phase]:
        """The phases to run, once the job is open."""

    @abstractmethod
    def open(self, *, returning: bool) -> None:
        """Opens the exchange, aligns the rows with the peers', and makes models and phases.

        ``returning``: the others have aligned, and go on; this party takes the rows that it had.
        """

    @abstractmethod
    def show_rows(self) -> None:
        """Shows the active party, which goes on, that the rows of this party, which returns, are
        those that it had.
        """

    @property
    @abstractmethod
    def statement(self) -> Statement:
        """This party's plan, for the server and the summary, once the job is open."""

    @abstractmethod
    def unhurried(self) -> None:
        """Lets the next exchange wait as long as the peers live: they may be at work on their
        own.
        """

    @abstractmethod
    def settle(self) -> None:
        """Waits until the parties that were away in the last phase know that it is over. See
        ``Hub.settle``.
        """

    @abstractmethod
    def state(self) -> Tree:
        """Returns models, preprocessing, torch's generators."""

    @abstractmethod
    def load_state(self, tree: Tree) -> None:
        """Restores what ``state`` returned."""

    @abstractmethod
    def keep(self, folder: Path, phase: str, predictions: Predictions) -> None:
        """Writes a phase's predictions into the folder of the run, with ids and labels. Raises
        InputError.
        """

    @abstractmethod
    def end(self, error: VflError) -> None:
        """Wakes the main thread with ``error`` if it waits for a peer; any thread may call this."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Closes the exchange and sends ``error``, if any, to the peers."""


@dataclass
class Outcome:
    """The result of a run, for this party. ``metrics``: {split: {name: value}}."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    summary_json: str = ""
    # Of the last checkpoint.
    label: str = ""
    # Parties that the model was trained without.
    without: tuple[str, ...] = ()
    # Of each phase.
    absences: dict[str, tuple[Absence, ...]] = field(default_factory=dict)
    # Rounds whose updates this party has lost, or missed while it was away.
    skipped: int = 0
    # See PartyReport.
    rows: int = 0
    common_rows: int = 0
    # This party has returned, and not yet come to the step that is under way.
    catches_up: bool = False


@dataclass(frozen=True)
class Statement:
    """The facts that follow from rows, models and phases.

    ``plan``: the phases, in order. ``aggregations``: the weights that are swapped with the server.
    ``privacy_json``, ``exchanges_json``: the summary's parts about differential privacy and
    exchanges, from the active party. ``data``: a digest of this party's aligned rows. ``rows``,
    ``common_rows``: see ``PartyReport``.
    """

    plan: Sequence[Planned]
    aggregations: Sequence[AggregationPlan] = ()
    privacy_json: str = ""
    exchanges_json: str = ""
    data: str = ""
    rows: int = 0
    common_rows: int = 0


# Phase, rounds done, rounds.
BeginRound = Callable[[str, int, int], None]
# Phase, round, rounds, steps so far, report.
Observer = Callable[[str, int, int, int, RoundReport], None]


@dataclass
class Runner:
    """Runs one party's side of a run to its end.

    Args:
        session: the connection to the server.
        joining: this party's facts for the server.
        make_job: makes everything that a generation works with afresh, so that nothing survives a
            rollback by accident.
        open_folder: opens the folder of the run that the server names.
        resume: the folder of an unfinished run of the same recipe, offered to the server.
        finished: finds the folder of a run by its id, if it is finished and has the same recipe.
        observe: called after each round, with the party's own report; begin_round: before it.
        plan: the phases, in order, as far as they are known before alignment.
        show: reports an event to the person at the terminal.
        peak_memory: returns this party's peak of GPU memory for the summary, in bytes; None without
            a GPU.
        times: returns what its steps took their time for, for the summary.
    """

    session: Membership
    joining: Joining
    make_job: Callable[[Start, RunFolder], Job]
    open_folder: Callable[[str], RunFolder]
    ledger: Ledger
    checkpoint_every: int
    observe: Observer
    begin_round: BeginRound = lambda _phase, _done, _rounds: None
    plan: Sequence[Planned] = ()
    resume: RunFolder | None = None
    finished: Callable[[str], RunFolder | None] = lambda _run_id: None
    show: Callable[..., None] = lambda _event, **_facts: None
    peak_memory: Callable[[], int | None] = lambda: None
    times: Callable[[], Sequence[PhaseTimes]] = tuple

    def run(self) -> tuple[Outcome, RunFolder]:
        """Runs to the end. Raises VflError, after the server was informed of it."""
        folder = self.resume
        started_s: float | None = None
        changed: ChangedError | None = None
        try:
            while True:
                offer = self._offer(folder) if changed is None else self._unfit(folder)
                try:
                    start = self._join(offer, folder)
                except VflError:
                    # The server keeps the run: this party's own words say more.
                    if changed is not None:
                        raise changed from None
                    raise
                if isinstance(start, Done):
                    return self._done(start, folder)
                self._check(start, offer, folder)
                started_s = started_s or time.monotonic()
                if folder is None or folder.run_id != start.run_id:
                    if folder is not None:
                        self._leave(folder, start)
                    folder, changed = self.open_folder(start.run_id), None
                elif folder is self.resume:
                    self.ledger.carry(load_entries(folder.path / "ledger.json"))
                    self.resume = None
                outcome: Outcome | None = None
                try:
                    outcome = self._generation(start, folder, started_s)
                except ChangedError as error:
                    if changed is not None or start.returning:
                        raise
                    changed = error
                    log.warning("%s", error, extra={"event": "changed"})
                except InterruptedRun as reason:
                    log.warning("interrupted: %s", reason, extra={"event": "interrupted"})
                    self.show("interrupted", reason=str(reason))
                except BaseException:
                    # The first error is the one to report.
                    with contextlib.suppress(VflError):
                        self._flush(folder)
                    with contextlib.suppress(VflError):
                        self._save_ledger(folder)
                    raise
                self._save_ledger(folder)
                if outcome is not None:
                    return outcome, folder
        except BaseException as error:
            self._tell(error)
            raise

    def _tell(self, error: BaseException) -> None:
        """Tells the server why this party ends; one that a person or a supervisor stopped does not
        end the run.
        """
        if isinstance(error, Exception):
            self.session.abort(error)
        else:
            self.session.stopping()

    def _join(self, offer: Joining, folder: RunFolder | None) -> Start | Done:
        """Joins. If this party has reported, and the server has gone, the run is taken to be
        complete.
        """
        try:
            return self.session.join(offer)
        except InputError as error:
            if (
                error.code is not Code.UNREACHABLE
                or folder is None
                or not folder.facts().get("trained")
            ):
                raise
            text = (
                "run %s was trained to its end, and the server has gone since: nothing is left "
                "to do"
            )
            log.warning(text, folder.run_id, extra={"event": "trained"})
            return Done(folder.run_id, "")

    def _done(self, done: Done, folder: RunFolder | None) -> tuple[Outcome, RunFolder]:
        """Returns what is known of a complete run. Raises PeerError if this party has not trained
        in it to the end.
        """
        # This party may have been killed after its last note, before its exit.
        if folder is None:
            folder = self.finished(done.run_id)
        if folder is None or folder.run_id != done.run_id or not folder.facts().get("trained"):
            text = f"run {done.run_id} is complete; for a new run, start the server again"
            raise PeerError(Code.NAME_TAKEN, text, party=self.session.server)
        return Outcome(summary_json=done.summary_json), folder

    def _check(self, start: Start, offer: Joining, folder: RunFolder | None) -> None:
        """Raises PeerError if the run would resume at a label that this party has not offered, or
        is another run.

        Also if the server has this party return although the others cannot be in the middle of this
        run: then nobody would compare the rows.
        """
        same = start.run_id == offer.run_id and offer.job == "train"
        if start.returning:
            if not (same and folder is not None and self._may_return(folder)):
                text = (
                    f"the server has {self.session.me} return to run {start.run_id}, which "
                    "cannot go on without it"
                )
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.session.server)
            return
        if (
            folder is not None
            and not same
            and offer.job == "train"
            and not start.anew
            and self._holds(folder)
        ):
            text = (
                f"the server begins run {start.run_id}, but {self.session.me} is in run "
                f"{folder.run_id}, which has not "
                "ended; start the server with the folder of runs that it had before, or "
                "begin a new run with "
                "vfl-server serve --fresh"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.session.server)
        if start.checkpoint not in (offer.checkpoints if same else ("",)):
            text = f"the server starts run {start.run_id} at {start.checkpoint or 'its beginning'}"
            text = f"{text}, which {self.session.me} has not offered"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.session.server)

    def _holds(self, folder: RunFolder) -> bool:
        """Whether this party would lose anything with a run: it is in it, or has written a
        checkpoint.
        """
        return folder is not self.resume or (
            folder.checkpoints is not None and folder.checkpoints.saved() > 0
        )

    def _may_return(self, folder: RunFolder) -> bool:
        """Whether the others may be in the middle of a run that this party has been in: in a phase
        that is lenient.
        """
        if self.joining.role != "passive" or "data" not in folder.facts():
            return False
        own = self._newest(folder) or self._beginning()
        first, begin = position_of(own), 0
        last = max([first, *map(position_of, ahead(own, self.plan))])
        for phase in self.plan:
            end = begin + phase.rounds
            if phase.lenient and begin <= last and first <= end:
                return True
            begin = end
        return False

    def _leave(self, folder: RunFolder, start: Start) -> None:
        """Leaves a run for another one, because the server has said why; it is set aside, or over
        for this party.
        """
        if not (start.anew and self._holds(folder)):
            return
        text = "run %s is not resumed, and run %s begins: %s"
        log.warning(text, folder.run_id, start.run_id, start.anew, extra={"event": "set_aside"})
        self.show("set_aside", run=folder.run_id, why=start.anew)
        self._flush(folder)
        if folder.facts().get("trained"):
            folder.note(finished=True)
        else:
            folder.set_aside(start.anew)

    def _unfit(self, folder: RunFolder | None) -> Joining:
        """Returns what this party says if its data have changed since the run began."""
        run_id = folder.run_id if folder is not None else ""
        why = "its rows or columns are not those that the run began with"
        return replace(self.joining, run_id=run_id, checkpoints=(), unfit=why)

    def _offer(self, folder: RunFolder | None) -> Joining:
        if folder is None or folder.checkpoints is None or self.joining.job != "train":
            # A prediction names the trained run, and never resumes.
            return replace(self.joining, checkpoints=("",))
        store = folder.checkpoints
        whole = store.whole()
        # Skips only what leaves this party unchanged.
        strict = [replace(phase, lenient=False) for phase in self.plan]
        held = [label for each in whole for label in (*reachable(each, self.plan), each)]
        held += [label for each in whole or [self._beginning()] for label in ahead(each, strict)]
        held += [""] if store.saved() <= MOST_LOST else []
        skips = [label for each in whole or [self._beginning()] for label in ahead(each, self.plan)]
        offered = tuple(dict.fromkeys([*held, *skips]))
        return replace(
            self.joining, run_id=folder.run_id, checkpoints=offered, held=tuple(dict.fromkeys(held))
        )

    def _generation(self, start: Start, folder: RunFolder, started_s: float) -> Outcome:
        """Runs one generation, from the checkpoint that the server names to the end of the last
        phase.
        """
        job = self.make_job(start, folder)
        error: BaseException | None = None
        try:
            self.session.watch(job.end)
            tree: Tree = None
            if start.returning:
                start = replace(start, checkpoint=self._newest(folder))
            label = self._own(folder, start.checkpoint)
            if start.left and not alone_after(start.checkpoint, self.plan):
                text = (
                    f"the server starts without {', '.join(start.left)}, who are needed from "
                    f"{start.checkpoint!r} on"
                )
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.session.server)
            job.open(returning=start.returning)
            said = job.statement
            self.plan = said.plan
            if start.returning:
                if folder.facts().get("data") != said.data:
                    text = (
                        f"{folder.path}: the rows or columns are not those that the run began "
                        "with; restore them"
                    )
                    raise InputError(Code.DATA_INVALID, text)
                job.show_rows()
                folder.note(returns=_returns(folder) + 1)
            # The plan gives the labels of checkpoints a meaning.
            folder.note(plan=[asdict(phase) for phase in said.plan], data=said.data)
            if label:
                tree = self._load(folder, label)
                job.load_state(tree["job"])
                log.info("resuming from %s", label, extra={"event": "resumed"})
                self.show("resumed", checkpoint=label)
            elif folder.checkpoints is not None:
                folder.checkpoints.discard_after("")
            # Once nothing is left here of a course that was given up.
            self.session.plan(said.aggregations)
            outcome = self._phases(job, folder, label, tree, start)
            outcome.rows, outcome.common_rows = said.rows, said.common_rows
            self.session.check()
            self._flush(folder)
            job.close(None)
            # Only the report to the server is left.
            folder.note(trained=True)
            self._save_ledger(folder)
            wall_s = time.monotonic() - started_s
            free = (outcome.label, *reachable(outcome.label, self.plan)) if outcome.label else ()
            outcome.summary_json = self.session.report(
                PartyReport(
                    outcome.metrics,
                    outcome.steps,
                    wall_s,
                    privacy_json=said.privacy_json,
                    exchanges_json=said.exchanges_json,
                    free_from=free,
                    without=outcome.without,
                    absences_json=to_json(
                        [each.model_dump() for phase in outcome.absences.values() for each in phase]
                    ),
                    peak_memory_bytes=self.peak_memory(),
                    skipped_rounds=outcome.skipped,
                    rows=said.rows,
                    common_rows=said.common_rows,
                    times_json=to_json([each.model_dump() for each in self.times()]),
                    returns=_returns(folder),
                )
            )
            return outcome
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.session.watch(None)
            if error is not None:
                if not isinstance(error, Exception):
                    # First, so that the others read that this party was stopped.
                    self.session.stopping()
                # The server decides what follows.
                if isinstance(error, ChangedError) and not start.returning:
                    error = InterruptedRun(f"{self.session.me} cannot resume the run")
                job.close(error)

    def _phases(self, job: Job, folder: RunFolder, label: str, tree: Tree, start: Start) -> Outcome:
        """Runs what is left after this party's checkpoint ``tree`` with ``label``; both are empty
        at the beginning.

        ``start``: has the label at which the run resumes; this party skips the rounds between.
        """
        outcome, begun = Outcome(catches_up=start.returning), start.checkpoint
        if tree:
            outcome.metrics, outcome.steps, outcome.label = (
                dict(tree["metrics"]),
                tree["steps"],
                label,
            )
            outcome.without, outcome.skipped = (
                tuple(tree.get("without", ())),
                tree.get("skipped", 0),
            )
            outcome.absences = {
                phase: tuple(Absence(**each) for each in found)
                for phase, found in tree.get("absences", {}).items()
            }
        begin, own = 0, position_of(label) if tree else 0
        first = max(own, position_of(begun) if begun else 0)
        self._vouch(folder, label)
        for phase in job.phases:
            end = begin + phase.rounds
            if phase.lenient and (lost := min(first, end) - max(own, begin)) > 0:
                outcome.skipped += lost
                text = (
                    "the others resume at %s: this party skips %d rounds of %s, and their "
                    "updates of its encoder"
                )
                log.warning(
                    text, begun, lost, phase.name, extra={"event": "skipped", "rounds": lost}
                )
                self.show("skipped", phase=phase.name, rounds=lost, to=begun)
            # A position names the next round to run.
            if first < end:
                if own > begin:
                    with blaming():
                        phase.load_state(tree["phase"])
                # Others may have to repeat what this party did alone.
                if first >= begin and tree:
                    job.unhurried()
                self._rounds(phase, job, folder, outcome, begin, max(first, begin))
                if phase.lenient and self.joining.role == "active":
                    # The server ends the generation if it lacks a party.
                    self.session.lenient(False)
                    job.settle()
                if phase.alone_from is not None:
                    job.unhurried()
            begin = end
        return outcome

    def _rounds(
        self, phase: Phase, job: Job, folder: RunFolder, outcome: Outcome, begin: int, first: int
    ) -> None:
        """Runs the rounds of one phase from position ``first``; the phase's round 0 is at position
        ``begin``.
        """
        for round_ in range(first - begin, phase.rounds):
            self.begin_round(phase.name, round_, phase.rounds)
            with blaming():
                report = phase.run_round(round_)
            self.session.check()
            outcome.steps += report.steps
            if outcome.catches_up:
                outcome.skipped += bool(report.passed)
                outcome.catches_up = not report.steps
            outcome.metrics |= report.kept or report.metrics
            outcome.without = tuple(dict.fromkeys((*outcome.without, *report.without)))
            if report.absences:
                outcome.absences[phase.name] = report.absences
            # Before a checkpoint says that the round is done.
            if report.predictions:
                job.keep(folder.path, phase.name, report.predictions)
            done = report.done or round_ + 1 == phase.rounds
            self.observe(phase.name, round_ + 1, phase.rounds, outcome.steps, report)
            if done:
                with blaming():
                    phase.finish()
            due = done or report.checkpoint or (round_ + 1) % self.checkpoint_every == 0
            if phase.lenient and not (done or report.steps):
                # A party that catches up has nothing new to keep.
                due = False
            if folder.checkpoints is not None and due:
                outcome.label = label_of(
                    begin + (phase.rounds if done else round_ + 1), phase.name, round_ + 1
                )
                with blaming():
                    state = {"job": job.state(), "phase": {} if done else phase.state()}
                tree = state | {"steps": outcome.steps, "metrics": outcome.metrics}
                tree |= {"without": outcome.without, "skipped": outcome.skipped}
                tree["absences"] = {
                    name: [each.model_dump() for each in found]
                    for name, found in outcome.absences.items()
                }
                # Before the checkpoint's thread competes for the interpreter.
                self._save_ledger(folder)
                folder.checkpoints.save_later(outcome.label, tree)
                # What this party does next tells others that it is on the disk.
                if done or report.checkpoint:
                    folder.checkpoints.flush()
                self._vouch(folder, outcome.label)
            if done:
                return

    def _vouch(self, folder: RunFolder, label: str) -> None:
        """Reports, at the active party, that it needs nobody any more: all that the others owe it
        is on its disk.
        """
        if (
            self.joining.role == "active"
            and self.joining.job == "train"
            and alone_after(label, self.plan)
        ):
            self._flush(folder)
            self.session.alone()

    @staticmethod
    def _flush(folder: RunFolder) -> None:
        if folder.checkpoints is not None:
            folder.checkpoints.flush()

    @staticmethod
    def _newest(folder: RunFolder) -> str:
        """Returns the label of the newest whole checkpoint; '' if there is none."""
        return max(folder.checkpoints.whole(), default="") if folder.checkpoints is not None else ""

    def _beginning(self) -> str:
        """Returns a label for the beginning of the first phase."""
        return label_of(0, self.plan[0].name if self.plan else "", 0)

    def _own(self, folder: RunFolder, label: str) -> str:
        """Returns the label of this party's own checkpoint to load when the run resumes at
        ``label``.

        '' if it has none, and may skip to ``label`` from the run's beginning.
        """
        held = folder.checkpoints.labels() if folder.checkpoints is not None else []
        if label in held:
            return label
        near = (
            each for each in held if label in (*reachable(each, self.plan), *ahead(each, self.plan))
        )
        return max(near, default="" if label in ahead(self._beginning(), self.plan) else label)

    def _load(self, folder: RunFolder, label: str) -> Tree:
        if folder.checkpoints is None or label not in folder.checkpoints.labels():
            raise InputError(
                Code.CHECKPOINT_INVALID,
                f"{folder.path}: the run resumes from checkpoint {label}, which is not here",
            )
        tree = folder.checkpoints.load(label)
        folder.checkpoints.discard_after(label)
        return tree

    def _save_ledger(self, folder: RunFolder) -> None:
        self.ledger.save(folder.path / "ledger.json", self.session.meter.counts())


def _returns(folder: RunFolder) -> int:
    """How often this party has come back to others that had gone on."""
    return int(folder.facts().get("returns", 0))

"""Runs a party's part in a run: joins, resumes at the newest common checkpoint, runs the phases and
reports. Rejoins after an interruption.

A party with an unfinished run starts another run only if the server gives a reason: a new run was
asked for, or the old run is over. The party then reports the reason and sets its old run aside. A
party whose rows or columns have changed reports to the server that it cannot resume. The server
then decides whether the run is set aside (``run.resume_within_s``) or the party must restore its
data.

A checkpoint between two rounds of a phase is written while the next round runs, so that the other
parties need not wait for this party's disk. A killed party may then lack its last checkpoint.
``vfl_party.base.checkpoint`` explains why all parties still have a common checkpoint. The runner
waits for the disk wherever other parties rely on a checkpoint: at the end of a phase, when a round
asks for it (``RoundReport.checkpoint``), before a phase lets the others continue without this party
(``Hooks.settled``), and before the party reports its results or that it needs no other party.
``vfl_party.runtime.rounds`` describes rounds without checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

from vfl_common.bundle import load_entries
from vfl_common.errors import (
    ChangedError,
    Code,
    InputError,
    InterruptedRun,
    PeerError,
    VflError,
    is_stop,
)
from vfl_common.files import write_atomic
from vfl_common.process.logs import format_arithmetic
from vfl_common.rpc.messages import Done, Joining, Membership, Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import Planned, alone_after, list_earlier_labels, parse_position
from vfl_common.text import to_json
from vfl_party.base.arithmetic import compare_resumed, describe_arithmetic
from vfl_party.base.devices import get_peak_memory
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.plugins import name_plugin_errors
from vfl_party.base.step_timing import Clock
from vfl_party.phases.context import Hooks
from vfl_party.policy.guards import InstalledGuard
from vfl_party.policy.meeting import SHOWN
from vfl_party.runtime import resume
from vfl_party.runtime.folders import Folders
from vfl_party.runtime.generation import Generation, Preparation, Transport
from vfl_party.runtime.outcome import RunOutcome
from vfl_party.runtime.progress import Progress
from vfl_party.runtime.rounds import PhaseRounds

log = logging.getLogger(__name__)


def _nothing(_report: RoundReport) -> None:
    """Does nothing: between phases, no checkpoint can be written early."""


class PartyRun:
    """Runs one party's part in a run, to its end.

    Args:
        prepared: The prepared party, which makes each generation new, so that no state survives a
            rollback by accident.
        folders: The party's run folders. An unfinished run of the same recipe is offered to the
            server.
        session: The session with the server.
        connect: Makes a generation's transport. The ``Clock`` measures the time that steps wait for
            peers.
        progress: Receives every round and step.
        address: The address at which passive parties reach this party; '' if it does not listen.
        guards: The guards of installed packages. A trial run has none.
    """

    def __init__(
        self,
        prepared: Preparation,
        folders: Folders,
        session: Membership,
        connect: Callable[[Start, Clock], Transport],
        progress: Progress,
        *,
        address: str = "",
        guards: Sequence[InstalledGuard] = (),
    ) -> None:
        self._guards = guards
        self._prepared, self._folders, self._session = prepared, folders, session
        self._connect, self._progress, self._ledger = connect, progress, session.ledger
        self._joining = prepared.joining(address)
        # The callback that a phase calls within a round; see ``Hooks.settled``.
        self._settled: Callable[[RoundReport], None] = _nothing
        # The plan, as far as it is known before the alignment.
        self._plan: Sequence[Planned] = prepared.plan

    def run(self) -> tuple[RunOutcome, RunFolder]:
        """Runs to the end. If the run fails, reports the error to the server and raises
        VflError.
        """
        try:
            return self._run()
        finally:
            self._session.close()

    def _run(self) -> tuple[RunOutcome, RunFolder]:
        folder = self._folders.resume
        started_s: float | None = None
        changed: ChangedError | None = None
        try:
            while True:
                offer = (
                    self._make_offer(folder)
                    if changed is None
                    else self._make_unfit_joining(folder)
                )
                try:
                    start = self._join(offer, folder)
                except VflError:
                    # The server does not set the run aside. This party's own error explains more.
                    if changed is not None:
                        raise changed from None
                    raise
                if isinstance(start, Done):
                    return self._get_complete(start, folder)
                self._check(start, offer, folder)
                tables = self._prepared.meet(start)
                started_s = started_s or time.monotonic()
                if folder is None or folder.run_id != start.run_id:
                    if folder is not None:
                        self._leave_run(folder, start)
                    folder, changed = self._folders.open(start.run_id), None
                elif folder is self._folders.resume:
                    self._ledger.carry(load_entries(folder.path / "ledger.json"))
                    self._folders.resume = None
                write_atomic(folder.path / SHOWN, to_json(tables))
                self._begin_allowed(folder)
                outcome: RunOutcome | None = None
                try:
                    outcome = self._run_generation(start, folder, started_s)
                except ChangedError as error:
                    if changed is not None or start.returning:
                        raise
                    changed = error
                    log.warning("%s", error, extra={"event": "changed"})
                except InterruptedRun as reason:
                    log.warning("interrupted: %s", reason, extra={"event": "interrupted"})
                    self._progress.console.show("interrupted", reason=str(reason))
                except BaseException:
                    # Errors while saving must not replace the first error.
                    with contextlib.suppress(VflError):
                        self._flush(folder)
                    with contextlib.suppress(VflError):
                        self._save_ledger(folder)
                    raise
                if outcome is not None:
                    # Heartbeats, which the ledger counts, continue until the session is closed.
                    self._session.close()
                self._save_ledger(folder)
                if outcome is not None:
                    return outcome, folder
        except BaseException as error:
            self._report_end(error)
            raise

    def _report_end(self, error: BaseException) -> None:
        """Reports to the server why this party ends. A signal or a full disk does not end the run
        for the other parties.
        """
        if is_stop(error):
            self._session.stopping()
        else:
            self._session.abort(error)

    def _join(self, offer: Joining, folder: RunFolder | None) -> Start | Done:
        """Joins the run. If this party has finished training and the server does not answer,
        returns ``Done``, because the run must be complete.
        """
        try:
            return self._session.join(offer)
        except InputError as error:
            if (
                error.code is not Code.UNREACHABLE
                or folder is None
                or not folder.facts().get("trained")
            ):
                raise
            log.warning(
                "run %s was trained to its end and the server has ended since, so nothing is "
                "left to "
                "do",
                folder.run_id,
                extra={"event": "trained"},
            )
            return Done(folder.run_id, "")

    def _get_complete(self, done: Done, folder: RunFolder | None) -> tuple[RunOutcome, RunFolder]:
        """Returns the outcome and the folder of a complete run. Raises PeerError if this party has
        not trained in it to the end.
        """
        # An earlier process may have been killed after it marked the run as finished.
        if folder is None:
            folder = self._folders.find_finished(done.run_id)
        if folder is None or folder.run_id != done.run_id or not folder.facts().get("trained"):
            raise PeerError(
                Code.NAME_TAKEN,
                f"run {done.run_id} is complete. Start the server again for a new run.",
                party=self._session.server,
            )
        return RunOutcome(summary_json=done.summary_json), folder

    def _check(self, start: Start, offer: Joining, folder: RunFolder | None) -> None:
        """Checks the server's Start message. Raises PeerError if the run would resume at a label
        that this party has not offered, or if it is another run than the party's unfinished run.

        Also raises PeerError if the server lets this party return although the other parties cannot
        have continued this run. Then no party would compare the rows.
        """
        is_same_run = start.run_id == offer.run_id and offer.job == "train"
        if start.returning:
            if not (is_same_run and folder is not None and self._may_return(folder)):
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"the server has {self._session.me} return to run {start.run_id}, which "
                    "cannot go on without it",
                    party=self._session.server,
                )
            return
        if (
            folder is not None
            and not is_same_run
            and offer.job == "train"
            and not start.anew
            and self._has_work_in(folder)
        ):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"the server begins run {start.run_id}, but {self._session.me} is in run "
                f"{folder.run_id}, which has not ended. Start the server with the folder of runs "
                "that it had before, or begin a new run with vfl-server run --fresh.",
                party=self._session.server,
            )
        if start.checkpoint not in (offer.checkpoints if is_same_run else ("",)):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"the server starts run {start.run_id} at {start.checkpoint or 'its beginning'}, "
                f"which {self._session.me} has not offered",
                party=self._session.server,
            )

    def _begin_allowed(self, folder: RunFolder) -> None:
        """Lets each guard allow the run, and reports what they say. Raises InputError."""
        for guard in self._guards:
            for text in guard.begins(folder):
                log.info("%s", text, extra={"event": "allowed"})
                self._progress.console.show("allowed", said=text)

    def _has_work_in(self, folder: RunFolder) -> bool:
        """Returns whether this party would lose work without the run: it takes part in the run, or
        has written a checkpoint.
        """
        return folder is not self._folders.resume or (
            folder.checkpoints is not None and folder.checkpoints.count_saved() > 0
        )

    def _may_return(self, folder: RunFolder) -> bool:
        return self._joining.role == "passive" and resume.may_return(folder, self._plan)

    def _leave_run(self, folder: RunFolder, start: Start) -> None:
        """Leaves the run in ``folder`` for another run, if the server has given a reason. Sets the
        old run aside, or marks it as finished if this party has trained it.
        """
        if not (start.anew and self._has_work_in(folder)):
            return
        log.warning(
            "run %s is not resumed, and run %s begins: %s",
            folder.run_id,
            start.run_id,
            start.anew,
            extra={"event": "set_aside"},
        )
        self._progress.console.show("set_aside", run=folder.run_id, why=start.anew)
        self._flush(folder)
        if folder.facts().get("trained"):
            folder.note(finished=True)
        else:
            folder.set_aside(start.anew)

    def _make_unfit_joining(self, folder: RunFolder | None) -> Joining:
        """Returns the Join message of a party whose data have changed since the run began."""
        run_id = folder.run_id if folder is not None else ""
        why = "its rows or columns have changed since the run began"
        return replace(self._joining, run_id=run_id, checkpoints=(), unfit=why)

    def _make_offer(self, folder: RunFolder | None) -> Joining:
        if folder is None or folder.checkpoints is None or self._joining.job != "train":
            # A prediction is never resumed, and its run id is the id of the trained run.
            return replace(self._joining, checkpoints=("",))
        labels, held = resume.offer_labels(folder.checkpoints, self._plan)
        return replace(self._joining, run_id=folder.run_id, checkpoints=labels, held=held)

    def _make_generation(self, start: Start, folder: RunFolder) -> Generation:
        """Makes the next generation, with its hooks and its transport."""
        progress = self._progress
        self._folders.log(folder)
        progress.begin(folder.path / "metrics.jsonl", start)
        hooks = Hooks(
            self._tick,
            self._session.lenient,
            progress.console.show,
            lambda report: self._settled(report),
        )
        transport = self._connect(start, progress.clock)
        return self._prepared.generation(folder, transport, hooks)

    def _tick(self, phase: str, round_: int, rounds: int, batch: int, batches: int) -> None:
        # With this check, a party that computes alone notices an interruption too.
        self._session.check()
        for guard in self._guards:
            guard.goes_on()
        self._progress.tick(phase, round_, rounds, batch, batches)

    def _run_generation(self, start: Start, folder: RunFolder, started_s: float) -> RunOutcome:
        """Runs one generation, from the server's checkpoint to the end of the last phase."""
        generation = self._make_generation(start, folder)
        error: BaseException | None = None
        try:
            self._session.watch(generation.end)
            tree: Tree = None
            if start.returning:
                start = replace(start, checkpoint=resume.find_newest(folder))
            label = resume.choose_own_label(folder, start.checkpoint, self._plan)
            if start.left and not alone_after(start.checkpoint, self._plan):
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"the server starts without {', '.join(start.left)}, who are needed from "
                    f"{start.checkpoint!r} on",
                    party=self._session.server,
                )
            generation.open(returning=start.returning)
            statement = generation.statement
            self._plan = statement.plan
            if start.returning:
                if folder.facts().get("data") != statement.data:
                    raise InputError(
                        Code.DATA_INVALID,
                        f"{folder.path}: the rows or columns have changed since the run "
                        "began. Restore them.",
                    )
                generation.show_rows()
                folder.note(returns=resume.count_returns(folder) + 1)
            # The labels of checkpoints can only be interpreted with the plan.
            plan = [asdict(phase) for phase in statement.plan]
            folder.note(plan=plan, data=statement.data, **generation.label_noted)
            generation.keep_profile(folder.path)
            if label:
                tree = resume.load(folder, label)
                generation.load_state(tree["job"])
                log.info("resuming from %s", label, extra={"event": "resumed"})
                self._progress.console.show("resumed", checkpoint=label)
            elif folder.checkpoints is not None:
                folder.checkpoints.discard_after("")
            # The plan is sent after checkpoints of an abandoned course were discarded.
            self._session.plan(statement.aggregations)
            outcome = self._run_phases(generation, folder, label, tree, start)
            outcome.rows, outcome.common_rows = statement.rows, statement.common_rows
            self._session.check()
            self._flush(folder)
            generation.close(None)
            # From here on, only the report to the server is missing.
            arithmetic_facts = (
                outcome.arithmetic.model_dump() if outcome.arithmetic is not None else None
            )
            folder.note(trained=True, arithmetic=arithmetic_facts)
            self._save_ledger(folder)
            wall_s = time.monotonic() - started_s
            free_from = (
                (outcome.label, *list_earlier_labels(outcome.label, self._plan))
                if outcome.label
                else ()
            )
            outcome.summary_json = self._session.report(
                replace(
                    outcome.report(statement, wall_s, self._progress.clock.times()),
                    free_from=free_from,
                    peak_memory_bytes=get_peak_memory(self._prepared.device),
                    returns=resume.count_returns(folder),
                )
            )
            return outcome
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._session.watch(None)
            if error is not None:
                if is_stop(error):
                    # The message is sent first, so that the other parties learn that this party was
                    # stopped.
                    self._session.stopping()
                # The peers see an interruption, because the server decides how the run continues.
                if isinstance(error, ChangedError) and not start.returning:
                    error = InterruptedRun(f"{self._session.me} cannot resume the run")
                generation.close(error)

    def _run_phases(
        self, generation: Generation, folder: RunFolder, label: str, tree: Tree, start: Start
    ) -> RunOutcome:
        """Runs the remaining phases after this party's checkpoint ``tree`` with ``label``. Both are
        empty at the run's beginning.

        ``start``: The Start message, with the label at which the run resumes. This party skips the
        rounds between its checkpoint and that label.
        """
        outcome = RunOutcome.restore(tree, label) if tree else RunOutcome()
        self._compare_arithmetic(outcome, label)
        outcome.catches_up, begun = start.returning, start.checkpoint
        begin, own = 0, parse_position(label) if tree else 0
        first = max(own, parse_position(begun) if begun else 0)
        self._report_alone(folder, label)
        for phase in generation.phases:
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
                self._progress.console.show("skipped", phase=phase.name, rounds=lost, to=begun)
            # A position names the next round to run.
            if first < end:
                if own > begin:
                    with name_plugin_errors():
                        phase.load_state(tree["phase"])
                # The other parties may have to repeat rounds that this party computed alone.
                if first >= begin and tree:
                    generation.unhurried()
                self._run_rounds(phase, generation, folder, outcome, begin, max(first, begin))
                if phase.lenient and self._joining.role == "active":
                    # The server ends the generation if it lacks a party.
                    self._session.lenient(False)
                    generation.settle()
                if phase.alone_from is not None:
                    generation.unhurried()
            begin = end
        generation.confer()
        return outcome

    def _compare_arithmetic(self, outcome: RunOutcome, label: str) -> None:
        """Warns if this process has other arithmetic than the process that wrote the checkpoint
        ``label``, and records it in the outcome. The run continues, because results differ only by
        rounding.
        """
        now = describe_arithmetic(self._prepared.device)
        outcome.arithmetic, change = compare_resumed(outcome.arithmetic, now, label)
        if change is not None:
            facts = {"checkpoint": label, "differs": change.differs}
            text = format_arithmetic(label, change.differs)
            log.warning("%s", text, extra={"event": "arithmetic", **facts})
            self._progress.console.show("arithmetic", **facts)

    def _run_rounds(
        self,
        phase: Phase,
        generation: Generation,
        folder: RunFolder,
        outcome: RunOutcome,
        begin: int,
        first: int,
    ) -> None:
        """Runs the rounds of one phase from position ``first``. ``begin``: The position of the
        phase's round 0.
        """
        every = self._folders.checkpoint_every
        save_ledger = partial(self._save_ledger, folder)
        rounds = PhaseRounds(phase, generation, folder, outcome, begin, every, save_ledger)
        self._settled = rounds.save_early
        try:
            for round_ in range(first - begin, phase.rounds):
                self._progress.begin_round(phase.name, round_, phase.rounds)
                rounds.begin_round(round_)
                with name_plugin_errors():
                    report = phase.run_round(round_)
                self._session.check()
                rounds.count(report)
                # Predictions must be on the disk before a checkpoint counts the round as done.
                if report.predictions:
                    generation.keep(folder.path, phase.name, report.predictions)
                done = report.done or round_ + 1 == phase.rounds
                self._progress.observe(phase.name, round_ + 1, phase.rounds, outcome.steps, report)
                if done:
                    with name_plugin_errors():
                        phase.finish()
                if label := rounds.end_round(report, done=done):
                    self._report_alone(folder, label)
                if done:
                    return
        finally:
            phase.close()
            # The callback refers to the folder, whose lock is held as long as a reference exists.
            self._settled = _nothing

    def _report_alone(self, folder: RunFolder, label: str) -> None:
        """Reports, at the active party, that it needs no other party any more, because all data
        from the other parties are on its disk.
        """
        if (
            self._joining.role == "active"
            and self._joining.job == "train"
            and alone_after(label, self._plan)
        ):
            self._flush(folder)
            self._session.alone()

    @staticmethod
    def _flush(folder: RunFolder) -> None:
        if folder.checkpoints is not None:
            folder.checkpoints.flush()

    def _save_ledger(self, folder: RunFolder) -> None:
        self._ledger.save(folder.path / "ledger.json", self._session.meter.counts())

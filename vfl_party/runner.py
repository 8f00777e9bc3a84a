"""The runner: join, go on from the newest checkpoint that all parties hold, run the phases, report; rejoin when lost.

Positions. The rounds of all phases are numbered through: a checkpoint's label is ``<position>.<phase>.<round>`` with
the position zero-padded, so that labels sort, and parties compare labels without knowing each other's phases.

A party that is ahead by rounds in which it was alone (``Phase.alone_from``) need not go back with the others: it offers
the labels of those rounds too, though it has no checkpoint there, and goes on from the one that it has. For the same
reason a party that was alone at the end is not needed by a run that goes on from one of them: it may leave.

A party that is behind by rounds which leave it as it was (``Phase.skippable``: an upload) may catch up without them. It
offers the labels after those rounds too; the run begins at one only where the peers hold what came of the round.

A checkpoint between two rounds of a phase is written while the next round runs: nobody else has to wait for this
party's disk. A party that is killed may then hold one checkpoint less; ``vfl_party.checkpoint`` says why all still hold
a common one. The runner waits for the disk wherever others rely on a checkpoint: at the end of a phase, when the round
says so (``RoundReport.checkpoint``), and before it says that it needs nobody, that the run is trained, or its results.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from vfl_common.errors import Code, InputError, InterruptedRun, PeerError, VflError
from vfl_common.ledger import Ledger, load_entries
from vfl_common.rpc.session import Joining, Session, Start
from vfl_common.run_folder import RunFolder
from vfl_common.stages import AggregationPlan, Planned, ahead, alone_after, label_of, position_of, reachable
from vfl_party.phase import Phase, RoundReport, Tree

log = logging.getLogger(__name__)


class Job(ABC):
    """What one generation of a run works with: models as they are at the start, phases, the exchange."""

    @property
    @abstractmethod
    def phases(self) -> Sequence[Phase]:
        """What is to be run, once the job is open."""

    @abstractmethod
    def open(self) -> None:
        """Opens the exchange, aligns the rows with the peers', and makes models and phases."""

    @property
    @abstractmethod
    def statement(self) -> Statement:
        """What this party plans and states, once the job is open."""

    @abstractmethod
    def unhurried(self) -> None:
        """The next exchange waits as long as the peers live: they may be at work on their own."""

    @abstractmethod
    def state(self) -> Tree:
        """Models, preprocessing, torch's generators."""

    @abstractmethod
    def load_state(self, tree: Tree) -> None:
        """Takes what ``state`` gave."""

    @abstractmethod
    def end(self, error: VflError) -> None:
        """From any thread: wakes the main thread with ``error`` wherever it waits for a peer."""

    @abstractmethod
    def close(self, error: BaseException | None) -> None:
        """Closes the exchange; peers are told ``error``, if any."""


@dataclass
class Outcome:
    """What a run came to, for this party. ``metrics``: {split: {name: value}}."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    steps: int = 0
    summary_json: str = ""
    label: str = ""  # of the last checkpoint
    without: tuple[str, ...] = ()  # parties that the model was trained without


@dataclass(frozen=True)
class Statement:
    """What follows from rows, models and phases.

    ``plan``: the phases, in order. ``aggregations``: what is swapped with the server. ``privacy_json``,
    ``exchanges_json``: what the summary is to say of differential privacy and of the exchanges, from the active party.
    """

    plan: Sequence[Planned]
    aggregations: Sequence[AggregationPlan] = ()
    privacy_json: str = ""
    exchanges_json: str = ""


BeginRound = Callable[[str, int, int], None]  # phase, rounds done, rounds
Observer = Callable[[str, int, int, int, RoundReport], None]  # phase, round, rounds, steps so far, report


@dataclass
class Runner:
    """Runs one party's side of a run to its end.

    Args:
        session: the way to the server.
        joining: what this party says of itself.
        make_job: everything that a generation works with, made afresh: nothing survives a rollback by accident.
        open_folder: the folder of the run that the server names.
        resume: the folder of an unfinished run of the same recipe, offered to the server.
        observe: called after each round, with the party's own report; begin_round: before it.
        plan: the phases, in order, as far as they are known before the rows are.
        peak_memory: what the summary is to say of this party's GPU memory, in bytes; None without a GPU.
    """

    session: Session
    joining: Joining
    make_job: Callable[[Start, RunFolder], Job]
    open_folder: Callable[[str], RunFolder]
    ledger: Ledger
    checkpoint_every: int
    observe: Observer
    begin_round: BeginRound = lambda _phase, _done, _rounds: None
    plan: Sequence[Planned] = ()
    resume: RunFolder | None = None
    peak_memory: Callable[[], int | None] = lambda: None

    def run(self) -> tuple[Outcome, RunFolder]:
        """Raises VflError; the server has been told then."""
        folder = self.resume
        started_s: float | None = None
        try:
            while True:
                start = self.session.join(self._offer(folder))
                started_s = started_s or time.monotonic()
                if folder is None or folder.run_id != start.run_id:
                    folder = self.open_folder(start.run_id)
                elif folder is self.resume:
                    self.ledger.carry(load_entries(folder.path / "ledger.json"))
                    self.resume = None
                outcome: Outcome | None = None
                try:
                    outcome = self._generation(start, folder, started_s)
                except InterruptedRun as reason:
                    log.warning("interrupted: %s", reason, extra={"event": "interrupted"})
                except BaseException:
                    with contextlib.suppress(VflError):  # what went wrong first is told
                        self._flush(folder)
                    with contextlib.suppress(VflError):
                        self._save_ledger(folder)
                    raise
                self._save_ledger(folder)
                if outcome is not None:
                    return outcome, folder
        except Exception as error:
            self.session.abort(error)
            raise

    def _offer(self, folder: RunFolder | None) -> Joining:
        if folder is None or self.joining.job != "train":
            return self.joining  # a prediction names the trained run, and begins again
        held = folder.checkpoints.labels() if folder.checkpoints is not None else []
        offered = ((*reachable(each, self.plan), each, *ahead(each, self.plan)) for each in held)
        labels = dict.fromkeys(label for each in offered for label in each if label)
        return replace(self.joining, run_id=folder.run_id, checkpoints=tuple(labels))

    def _generation(self, start: Start, folder: RunFolder, started_s: float) -> Outcome:
        """One generation, from the checkpoint that the server names to the end of the last phase."""
        job = self.make_job(start, folder)
        error: BaseException | None = None
        try:
            self.session.watch(job.end)
            tree: Tree = None
            label = self._own(folder, start.checkpoint)
            if start.left and not alone_after(start.checkpoint, self.plan):
                text = f"the server starts without {', '.join(start.left)}, who are needed from {start.checkpoint!r} on"
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.session.server)
            job.open()
            said = job.statement
            self.plan = said.plan
            folder.note(plan=[asdict(phase) for phase in said.plan])  # what the labels of its checkpoints mean
            self.session.plan(said.aggregations)
            if label:
                tree = self._load(folder, label)
                job.load_state(tree["job"])
                log.info("going on from %s", label, extra={"event": "resumed"})
            elif folder.checkpoints is not None:
                folder.checkpoints.discard_after("")
            outcome = self._phases(job, folder, label, tree, start.checkpoint)
            self.session.check()
            self._flush(folder)
            job.close(None)
            folder.note(trained=True)  # what is left is to tell the server
            self._save_ledger(folder)
            wall_s = time.monotonic() - started_s
            free = (outcome.label, *reachable(outcome.label, self.plan)) if outcome.label else ()
            outcome.summary_json = self.session.report(
                outcome.metrics,
                outcome.steps,
                wall_s,
                privacy_json=said.privacy_json,
                exchanges_json=said.exchanges_json,
                free_from=free,
                without=outcome.without,
                peak_memory_bytes=self.peak_memory(),
            )
            return outcome
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.session.watch(None)
            if error is not None:
                job.close(error)

    def _phases(self, job: Job, folder: RunFolder, label: str, tree: Tree, begun: str) -> Outcome:
        """What is left after the checkpoint ``tree`` with that label; both empty at the beginning.

        ``begun``: the label from which the run goes on; this party skips what lies between.
        """
        outcome = Outcome()
        if tree:
            outcome = Outcome(dict(tree["metrics"]), tree["steps"], label=label, without=tuple(tree.get("without", ())))
        begin, own = 0, position_of(label) if tree else 0
        first = max(own, position_of(begun) if begun else 0)
        self._vouch(folder, label)
        for phase in job.phases:
            end = begin + phase.rounds
            if first < end:  # a position names the next round to run
                if own > begin:
                    phase.load_state(tree["phase"])
                if first >= begin and tree:  # others may have to repeat what this party did alone
                    job.unhurried()
                self._rounds(phase, job, folder, outcome, begin, max(first, begin))
                if phase.alone_from is not None:
                    job.unhurried()
            begin = end
        return outcome

    def _rounds(self, phase: Phase, job: Job, folder: RunFolder, outcome: Outcome, begin: int, first: int) -> None:
        """The rounds of one phase from position ``first``; the phase's round 0 is at position ``begin``."""
        for round_ in range(first - begin, phase.rounds):
            self.begin_round(phase.name, round_, phase.rounds)
            report = phase.run_round(round_)
            self.session.check()
            outcome.steps += report.steps
            outcome.metrics |= report.kept or report.metrics
            outcome.without = tuple(dict.fromkeys((*outcome.without, *report.without)))
            done = report.done or round_ + 1 == phase.rounds
            self.observe(phase.name, round_ + 1, phase.rounds, outcome.steps, report)
            if done:
                phase.finish()
            due = done or report.checkpoint or (round_ + 1) % self.checkpoint_every == 0
            if folder.checkpoints is not None and due:
                outcome.label = label_of(begin + (phase.rounds if done else round_ + 1), phase.name, round_ + 1)
                state = {} if done else phase.state()
                tree = {"job": job.state(), "phase": state, "steps": outcome.steps, "metrics": outcome.metrics}
                tree["without"] = outcome.without
                folder.checkpoints.save_later(outcome.label, tree)
                if done or report.checkpoint:  # what this party does next tells others that it is on the disk
                    folder.checkpoints.flush()
                self._vouch(folder, outcome.label)
                self._save_ledger(folder)
            if done:
                return

    def _vouch(self, folder: RunFolder, label: str) -> None:
        """The active party says when it needs nobody any more: all that the others owe it is on its disk."""
        if self.joining.role == "active" and self.joining.job == "train" and alone_after(label, self.plan):
            self._flush(folder)
            self.session.alone()

    @staticmethod
    def _flush(folder: RunFolder) -> None:
        if folder.checkpoints is not None:
            folder.checkpoints.flush()

    def _own(self, folder: RunFolder, label: str) -> str:
        """The label of the own checkpoint from which this party goes on where the run does from ``label``."""
        held = folder.checkpoints.labels() if folder.checkpoints is not None else []
        if label in held:
            return label
        near = (each for each in held if label in (*reachable(each, self.plan), *ahead(each, self.plan)))
        return max(near, default=label)

    def _load(self, folder: RunFolder, label: str) -> Tree:
        if folder.checkpoints is None or label not in folder.checkpoints.labels():
            raise InputError(
                Code.CHECKPOINT_INVALID, f"{folder.path}: the checkpoint {label} that the run goes on from is not here"
            )
        tree = folder.checkpoints.load(label)
        folder.checkpoints.discard_after(label)
        return tree

    def _save_ledger(self, folder: RunFolder) -> None:
        self.ledger.save(folder.path / "ledger.json", self.session.meter.counts())

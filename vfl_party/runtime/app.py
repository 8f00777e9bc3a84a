"""Wires a party's program together: files, data, network, progress, runner. Decides nothing."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.ledger import Ledger
from vfl_common.process import garbage
from vfl_common.process.logs import Console, log_to, version
from vfl_common.process.program import resumable
from vfl_common.rpc.counters.tcp import TcpMeter
from vfl_common.rpc.messages import Start
from vfl_common.rpc.service import ExchangeService
from vfl_common.rpc.session import Session
from vfl_common.run_folder import RunFolder, create, find_finished, find_unfinished
from vfl_party.align import Aligned, Aligning, alignment_of, quota
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import (
    Assembled,
    Opened,
    Spread,
    Work,
    assemble,
    check_ranks,
    open_party,
)
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.base.devices import float32_in_full, keep_freed_memory, set_threads
from vfl_party.methods import handed_on
from vfl_party.models import InputSpec
from vfl_party.phases.context import MakeEncoder
from vfl_party.predict.prediction import Prediction, TrainedRun, unseen
from vfl_party.predict.results import Output, Predicted, id_names
from vfl_party.ranks import Guarded, Ranks, SpreadEncoder, follow
from vfl_party.runtime import versions
from vfl_party.runtime.job import Jobs, new_secret
from vfl_party.runtime.participation import JobName, Part, joining_of, training
from vfl_party.runtime.progress import Progress
from vfl_party.runtime.runner import Outcome
from vfl_party.runtime.transport import Transports

log = logging.getLogger(__name__)


@dataclass
class PartyApp:
    """One party's program.

    Args:
        files: the party file and all that it names.
        console: receives events.
        wait_s: how long to wait for a server that does not answer.
        metrics: the address where Prometheus reads: host:port, or only a port; '' for none.
        ranks: this process, the first, among several of this party; None if it is alone.
    """

    files: PartyFiles
    console: Console
    wait_s: float
    metrics: str = ""
    ranks: Ranks | None = None

    def train(self, *, fresh: bool) -> tuple[Outcome, RunFolder]:
        """Takes part in a training run to its end; ``fresh``: does not offer to resume an
        unfinished one.

        The caller notes in the folder that the run is finished, as the last thing that the process
        does.
        """
        files = self.files
        # Refuses a bad address before the data are read.
        self._metrics_address()
        opened = files.open()
        plugins = versions.shared(opened) | versions.modelling(opened)
        out = Path(files.file.out)
        resume = None if fresh else find_unfinished(out, files.name, files.recipe)
        if resume is not None:
            resume.lock()
            # For what is damaged there.
            log_to(resume.path / "log.jsonl", run=resume.run_id, party=files.name)
            resume.checkpoints = self._store(resume)
            versions.require_same(resume.path, resume.facts().get("plugins", {}), plugins)

        def open_folder(run_id: str) -> RunFolder:
            folder = create(out, run_id, files.name, files.recipe)
            folder.note(job="train", encoder=files.encoder.model_dump(mode="json"), plugins=plugins)
            folder.checkpoints = self._store(folder)
            return folder

        with resumable(fresh=fresh):
            return self._run(
                "train", opened, training(files.recipe, files.name, out), open_folder, resume
            )

    def predict(
        self, trained: TrainedRun, data: DataSettings, output: Output
    ) -> tuple[Predicted, RunFolder]:
        """Takes part in a joint prediction for the rows of ``data``; the active party writes
        ``output``.

        Returns how many rows of this party's are predicted, too.
        """
        files = self.files
        opened = open_party(files.recipe, files.name, data, files.encoder, labels=False)
        if len(opened.table) < (least := files.file.predict.at_least):
            text = (
                f"{opened.table.source}: has {len(opened.table):,} rows to predict; "
                f"predict.at_least is {least:,}"
            )
            raise InputError(
                Code.DATA_INVALID, f"{text} in the party file: give more rows, or lower it"
            )
        versions.require_same(trained.path, trained.plugins, versions.modelling(opened))
        for text in unseen(trained, opened.table) if files.settings.features else ():
            said = f"{opened.table.source}: {text}"
            log.warning("%s", said, extra={"event": "unseen"})
            self.console.show("unseen", said=said)

        def open_folder(run_id: str) -> RunFolder:
            folder = create(Path(files.file.out), run_id, files.name, files.recipe)
            folder.note(job="predict", trained_run=trained.run_id)
            return folder

        work = Prediction(trained, files.settings, id_names(data), (output,))
        outcome, folder = self._run("predict", opened, work, open_folder, None)
        return Predicted.of(
            opened.table, outcome.common_rows if outcome.rows else len(opened.table)
        ), folder

    def _finished(self, job: JobName, run_id: str) -> RunFolder | None:
        files = self.files
        return (
            find_finished(Path(files.file.out), run_id, files.name, files.recipe)
            if job == "train"
            else None
        )

    def _store(self, folder: RunFolder) -> CheckpointStore:
        return CheckpointStore(folder.path / "checkpoints", self.files.recipe.run.kept_checkpoints)

    def _run(
        self,
        job: JobName,
        opened: Opened,
        work: Work,
        open_folder: Callable[[str], RunFolder],
        resume: RunFolder | None,
    ) -> tuple[Outcome, RunFolder]:
        files, recipe = self.files, self.files.recipe
        set_threads(files.file.threads)
        float32_in_full()
        keep_freed_memory()
        garbage.seldom()
        opened.tell(self.console.show)

        def make(aligned: Aligned, secret: int | None, spread: Spread | None = None) -> Assembled:
            of, policy, trees = (opened, aligned, work), files.policy(), files.file.trees
            return assemble(
                *of, device=files.device, policy=policy, spread=spread, trees=trees, secret=secret
            )

        spread = partial(self._spread, make, self.ranks) if self.ranks is not None else None
        alignment = alignment_of(recipe, files.policy(), divides=opened.divides)
        secret = new_secret() if job == "train" and files.file.init == "secret" else None
        jobs = Jobs(opened, alignment, make, spread, resume, partial(self._aligning, job), secret)
        if self.ranks is not None:
            check_ranks(jobs.expected.party, trains=job == "train")
        plan = jobs.expected.plan
        ledger, meter = Ledger(), TcpMeter()
        plugins = versions.shared(opened)
        joining = joining_of(recipe, files.settings.role, plugins)
        transports = Transports(files, self.console, ledger, meter, joining)
        session = Session(
            files.file.server,
            files.keyring,
            recipe.server,
            ledger,
            meter,
            heartbeat_s=recipe.run.heartbeat_s,
            wait_s=self.wait_s,
            on_waiting=transports.waiting,
            absent_s=recipe.run.server_absent_s if job == "train" else 0.0,
            back_s=recipe.run.rejoin_deadline_s,
            emit=self.console.emit,
        )
        progress = Progress(self.console, session, ledger, files.is_active)
        with (
            transports.listening() as (service, address),
            self._exposed(session, progress, service),
        ):

            def begun(start: Start, folder: RunFolder) -> None:
                log_to(folder.path / "log.jsonl", run=start.run_id, party=files.name)
                files.keyring.tell()

            outcome, folder = Part(
                recipe,
                files.name,
                job,
                session,
                jobs,
                progress,
                self.console,
                files.device,
                transport=lambda start: transports.transport(start, service),
                open_folder=open_folder,
                plugins=plugins,
                trained=work.run_id,
                devices="" if self.ranks is None else f"{self.ranks.size} x {files.device.type}",
                address=files.file.advertise or address,
                begun=begun,
                plan=plan,
                resume=resume,
                finished=partial(self._finished, job),
                checkpoint_every=recipe.run.checkpoint_every,
            ).run()
        # Only the active party has it; on one machine the server writes the same file.
        if outcome.summary_json:
            write_atomic(folder.path.parent / "summary.json", outcome.summary_json)
        return outcome, folder

    def _aligning(self, job: JobName, at: Aligning) -> Aligning:
        """Adds what this party computes with, who it is, and what it asks of the others."""
        file = self.files.file

        def begins() -> None:
            path = Path(file.out) / f"alignments-{file.name}.json"
            quota.count(path, at.table.source, file.alignments_a_day, time.time())

        return replace(
            at,
            workers=file.threads,
            credentials=self.files.keyring.current(),
            begins=begins,
            at_least=file.predict.at_least if job == "predict" else 1,
            peer_rows_at_most=file.peer_rows_at_most,
        )

    def _spread(
        self, make: Callable[..., Assembled], ranks: Ranks, aligned: Aligned, secret: int | None
    ) -> Assembled:
        """Returns the party with its encoder on all ranks; a lost rank ends the process, and not
        the run.
        """
        precision = self.files.recipe.model.precision
        found = make(
            aligned,
            secret,
            spread=lambda encoder, spec: SpreadEncoder(ranks, encoder, spec, precision),
        )
        found.phases = [Guarded(phase) for phase in found.phases]
        return found

    def _metrics_address(self) -> str:
        """Returns host:port for Prometheus, '' for none. Raises InputError if this machine cannot
        listen there.
        """
        if not self.metrics:
            return ""
        from vfl_common.prometheus import listen_address

        return listen_address(self.metrics)

    @contextlib.contextmanager
    def _exposed(
        self, session: Session, progress: Progress, service: ExchangeService | None
    ) -> Iterator[None]:
        """Serves metrics to Prometheus while the run lasts, if they were asked for."""
        address = self._metrics_address()
        if not address:
            yield
            return
        from vfl_common.prometheus import exposed
        from vfl_party.runtime.prometheus import PartyMetrics

        files = self.files
        metrics = PartyMetrics(
            {
                "party": files.name,
                "role": files.settings.role,
                "recipe": files.recipe.name,
                "device": str(files.device),
                "version": version(),
            },
            progress.standing,
            session.ledger,
            session.meter,
            lambda: session.state,
            files.keyring.ends,
            peers=[party.name for party in files.recipe.passives] if service is not None else [],
            waits_for=lambda: service.awaited if service is not None else [],
        )
        with exposed(address, metrics.families) as bound:
            self.console.emit("metrics", name=files.name, address=bound)
            yield


def lend(files: PartyFiles, ranks: Ranks) -> None:
    """Runs a process of the party other than its first: its GPU computes for the first, until that
    one ends.
    """
    set_threads(files.file.threads)
    float32_in_full()

    def make_encoder(spec: InputSpec) -> nn.Module:
        return handed_on(files.recipe, MakeEncoder(files.recipe, files.name, files.encoder, spec))

    follow(ranks, make_encoder, files.recipe.model.precision)

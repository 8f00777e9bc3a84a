"""Wires a party's program together: files, data, network, progress, runner. Decides nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from torch import nn

from vfl_common.config.data import DataSettings
from vfl_common.files import write_atomic
from vfl_common.ledger import Ledger
from vfl_common.logs import Console, log_to
from vfl_common.program import resumable
from vfl_common.rpc.said import Joining, Start
from vfl_common.rpc.service import ExchangeService
from vfl_common.rpc.session import Session
from vfl_common.rpc.tcp import TcpMeter
from vfl_common.run_folder import RunFolder, create, find_unfinished, planned
from vfl_party.align import Aligned, alignment_of
from vfl_party.checkpoint import CheckpointStore
from vfl_party.context import Hooks, MakeEncoder
from vfl_party.devices import device_name, keep_freed_memory, peak_memory, set_threads
from vfl_party.files import PartyFiles
from vfl_party.job import Jobs, PartyJob
from vfl_party.methods import handed_on
from vfl_party.models import InputSpec
from vfl_party.party import Assembled, Opened, Spread, Training, Work, assemble, check_ranks, load_encoder, open_party
from vfl_party.prediction import Prediction, TrainedRun, load_start
from vfl_party.progress import Progress
from vfl_party.ranks import Guarded, Ranks, SpreadEncoder, follow
from vfl_party.runner import Outcome, Runner
from vfl_party.transport import Transports

JobName = Literal["train", "predict"]


def training(files: PartyFiles) -> Training:
    """Prepares training from the beginning, or with the encoder of an earlier run. Raises InputError."""
    recipe = files.recipe
    start = load_start(recipe, files.name, Path(files.file.out))
    if start is None or recipe.start is None:
        return Training(recipe)
    begin = partial(load_encoder, tree=start.state, run_id=start.run_id, tower=recipe.start.tower)
    return Training(recipe, begin)


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
        """Takes part in a training run to its end; ``fresh``: does not offer to resume an unfinished one.

        The caller notes in the folder that the run is finished, as the last thing that the process does.
        """
        files = self.files
        self._metrics_address()  # refuses a bad address before the data are read
        opened = files.open()
        out = Path(files.file.out)
        resume = None if fresh else find_unfinished(out, files.name, files.recipe)
        if resume is not None:
            log_to(resume.path / "log.jsonl", run=resume.run_id, party=files.name)  # for what is damaged there
            resume.checkpoints = self._store(resume)

        def open_folder(run_id: str) -> RunFolder:
            folder = create(out, run_id, files.name, files.recipe)
            folder.note(job="train")
            folder.checkpoints = self._store(folder)
            return folder

        with resumable(fresh=fresh):
            return self._run("train", opened, training(files), open_folder, resume)

    def predict(self, trained: TrainedRun, data: DataSettings, output: Path) -> tuple[Outcome, RunFolder]:
        """Takes part in a joint prediction for the rows of ``data``; the active party writes ``output``."""
        files = self.files
        opened = open_party(files.recipe, files.name, data, files.encoder, labels=False)

        def open_folder(run_id: str) -> RunFolder:
            folder = create(Path(files.file.out), run_id, files.name, files.recipe)
            folder.note(job="predict", trained_run=trained.run_id)
            return folder

        return self._run("predict", opened, Prediction(trained, files.settings, output), open_folder, None)

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
        keep_freed_memory()

        def make(aligned: Aligned, spread: Spread | None = None) -> Assembled:
            return assemble(opened, aligned, work, device=files.device, policy=files.policy(), spread=spread)

        spread = partial(self._spread, make, self.ranks) if self.ranks is not None else None
        jobs = Jobs(opened, alignment_of(recipe, files.policy()), make, spread)
        expected = jobs.expected
        if self.ranks is not None and expected is not None:
            check_ranks(expected.party, trains=job == "train")
        plan = expected.plan if expected is not None else planned(resume)
        del expected
        ledger, meter = Ledger(), TcpMeter()
        transports = Transports(files, self.console, ledger, meter)
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
        with transports.listening() as (service, address), self._exposed(session, progress, service):

            def tick(phase: str, round_: int, rounds: int, batch: int, batches: int) -> None:
                session.check()  # so that a party at work on its own notices an interruption too
                progress.tick(phase, round_, rounds, batch, batches)

            def make_job(start: Start, folder: RunFolder) -> PartyJob:
                log_to(folder.path / "log.jsonl", run=start.run_id, party=files.name)
                files.keyring.tell()
                progress.begin(folder.path / "metrics.jsonl", start)
                hooks = Hooks(tick, session.lenient, self.console.show)
                return jobs.make(start.run_id, transports.transport(start, service), hooks)

            runner = Runner(
                session,
                self._joining(job, work.run_id, address),
                make_job,
                open_folder,
                ledger,
                checkpoint_every=recipe.run.checkpoint_every,
                observe=progress.observe,
                begin_round=progress.begin_round,
                plan=plan,
                resume=resume,
                show=self.console.show,
                peak_memory=lambda: peak_memory(files.device),
            )
            try:
                outcome, folder = runner.run()
            finally:
                session.close()
        if outcome.summary_json:  # only the active party has it; on one machine the server writes the same file
            write_atomic(folder.path.parent / "summary.json", outcome.summary_json)
        return outcome, folder

    def _joining(self, job: JobName, run_id: str, address: str) -> Joining:
        """Returns what this party is and offers. ``run_id``: the trained run, for a prediction."""
        files, ranks = self.files, self.ranks
        return Joining(
            role=files.settings.role,
            recipe_json=files.recipe.canonical_json(),
            job=job,
            pid=os.getpid(),
            device=str(files.device) if ranks is None else f"{ranks.size} x {files.device.type}",
            device_name=device_name(files.device),
            run_id=run_id,
            exchange_address=files.file.advertise or address,
        )

    def _spread(self, make: Callable[..., Assembled], ranks: Ranks, aligned: Aligned) -> Assembled:
        """Returns the party with its encoder on all ranks; a lost rank ends the process, and not the run."""
        precision = self.files.recipe.model.precision
        found = make(aligned, spread=lambda encoder, spec: SpreadEncoder(ranks, encoder, spec, precision))
        found.phases = [Guarded(phase) for phase in found.phases]
        return found

    def _metrics_address(self) -> str:
        """Returns host:port for Prometheus, '' for none. Raises InputError if this machine cannot listen there."""
        if not self.metrics:
            return ""
        from vfl_common.prometheus import listen_address

        return listen_address(self.metrics)

    @contextlib.contextmanager
    def _exposed(self, session: Session, progress: Progress, service: ExchangeService | None) -> Iterator[None]:
        """Serves metrics to Prometheus while the run lasts, if they were asked for."""
        address = self._metrics_address()
        if not address:
            yield
            return
        from vfl_common.prometheus import exposed
        from vfl_party.prometheus import PartyMetrics

        files = self.files
        metrics = PartyMetrics(
            {
                "party": files.name,
                "role": files.settings.role,
                "recipe": files.recipe.name,
                "device": str(files.device),
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
    """Runs a process of the party other than its first: its GPU computes for the first, until that one ends."""
    set_threads(files.file.threads)

    def make_encoder(spec: InputSpec) -> nn.Module:
        return handed_on(files.recipe, MakeEncoder(files.recipe, files.name, files.encoder, spec))

    follow(ranks, make_encoder, files.recipe.model.precision)

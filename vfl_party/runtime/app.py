"""Makes and connects the components of a party's program: files, data, network, progress and
runner.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from vfl_common.bundle import Ledger
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError, LostError
from vfl_common.files import await_room, load_or_create_secret, write_atomic
from vfl_common.process import program
from vfl_common.process.logs import Console, version
from vfl_common.process.program import explain_resuming
from vfl_common.process.tracing import trace_run
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.service import ExchangeService
from vfl_common.rpc.session import Session
from vfl_common.run_folder import RunFolder, find_unfinished
from vfl_common.stages import Job
from vfl_party.align import AlignedRows, AlignmentContext, quota
from vfl_party.assembly.files import PartyFiles
from vfl_party.assembly.party import (
    Assembled,
    OpenedParty,
    PutOnRanks,
    assemble,
    open_party,
    parts_of,
)
from vfl_party.base.devices import keep_freed_memory, plain_arithmetic, set_threads
from vfl_party.base.seeds import secret_seed
from vfl_party.policy.guards import (
    InstalledGuard,
    describe_missing_policy,
    list_leave_checks,
    make_run_guards,
    words_of,
)
from vfl_party.predict.prediction import Alone, Prediction, is_away, write_waiting
from vfl_party.predict.results import ALONE, WAITING, Output, Predicted, id_names
from vfl_party.predict.run import TrainedRun, unseen
from vfl_party.privacy.label_noise import LABEL_SECRET
from vfl_party.ranks import RankGuardedPhase, Ranks, begin_ranks
from vfl_party.record.book import RecordBook, folder_of
from vfl_party.record.heads import HeadExchange, HeadRelay
from vfl_party.runtime import versions
from vfl_party.runtime.folders import Folders, make_store
from vfl_party.runtime.generation import AlignmentCalls, Preparation, Processes, new_secret
from vfl_party.runtime.joining import joining_of, prepare_training
from vfl_party.runtime.lending import list_shared_settings, make_spread
from vfl_party.runtime.outcome import RunOutcome
from vfl_party.runtime.progress import Progress
from vfl_party.runtime.run import PartyRun
from vfl_party.runtime.transport import Transports

log = logging.getLogger(__name__)


@dataclass
class PartyApp:
    """Runs one party's program.

    Args:
        files: The party file and the files that it names.
        console: Receives the program's events.
        wait_s: The seconds to wait for a server that does not answer.
        metrics: The address at which Prometheus reads metrics: host:port, or only a port; '' for
            none.
        linger_s: The seconds for which the metrics stay available after the run.
        ranks: The process group of this party, in which this process is the first; None if the
            party has one process.
    """

    files: PartyFiles
    console: Console
    wait_s: float
    metrics: str = ""
    linger_s: float = 0.0
    ranks: Ranks | None = None

    def train(self, *, fresh: bool) -> tuple[RunOutcome, RunFolder]:
        """Takes part in a training run to its end. ``fresh``: Whether to begin a new run instead of
        resuming an unfinished one.

        The caller must mark the run as finished in the folder, as the last step of the process.
        """
        with self.files.telling():
            opened, folders = self._open_to_train(fresh=fresh)
        with explain_resuming(fresh=fresh):
            return self._run(opened, folders)

    def _open_to_train(self, *, fresh: bool) -> tuple[OpenedParty, Folders]:
        """Reads the data and finds the unfinished run to resume. Raises VflError."""
        files = self.files
        # A bad address must fail before the data are read.
        self._metrics_address()
        out = Path(files.file.out)
        resume = None if fresh else find_unfinished(out, files.name, files.recipe)
        self._await_room(out, resume)
        opened = files.open(work=prepare_training(files.recipe, files.name, out))
        plugins = versions.get_shared_versions(opened) | versions.get_model_versions(opened)
        folders = Folders(
            out,
            files.name,
            files.recipe,
            {
                "job": "train",
                "encoder": files.encoder.model_dump(mode="json"),
                "plugins": plugins,
            },
            resume,
            checkpoint_every=files.recipe.run.checkpoint_every,
        )
        if resume is not None:
            resume.lock()
            # The run's log must receive messages about damaged checkpoints.
            folders.log(resume)
            resume.checkpoints = make_store(resume, files.recipe)
            versions.require_same(resume.path, resume.facts().get("plugins", {}), plugins)
        return opened, folders

    def _await_room(self, out: Path, resume: RunFolder | None) -> None:
        """Waits until the disk has room for the record and the next checkpoint. Ending at once
        would make a supervisor give up after several restarts. Raises UnwritableError after
        ``wait_s``.
        """

        def say(text: str) -> None:
            log.error("%s", text, extra={"event": "unwritable"})
            self.console.show("advice", said=text)

        written = resume.path.glob("checkpoints/*") if resume is not None else ()
        # The next checkpoint needs about as much space as the largest so far.
        largest = max((path.stat().st_size for path in written), default=0)
        await_room([out], self.wait_s, say, largest)
        await_room([Path(self.files.file.record.folder or out)], self.wait_s, say)

    def predict(
        self,
        trained: TrainedRun,
        data: DataSettings,
        output: Output,
        *,
        deadline_s: float | None = None,
        alone: Alone | None = None,
    ) -> tuple[Predicted, RunFolder | None]:
        """Takes part in a joint prediction for the rows of ``data``. The active party writes
        ``output``.

        Returns the counts of this party's rows, and the run's folder. If a party is missing past
        ``deadline_s``, or is missing and there is a model to score ``alone`` with, the active party
        writes its rows without the other parties. Then the returned folder is None.
        """
        files = self.files
        with files.telling():
            work = Prediction(
                trained,
                files.settings,
                id_names(data),
                (output,),
                says_parties=trained.says_parties,
                expects=trained.expects,
            )
            opened = self._open_to_predict(work, data)
        folders = Folders(
            Path(files.file.out),
            files.name,
            files.recipe,
            {"job": "predict", "trained_run": trained.run_id},
        )
        try:
            outcome, folder = self._run(
                opened, folders, math.inf if deadline_s is None else deadline_s
            )
        except (LostError, InputError) as error:
            wanted = files.is_active and not (deadline_s is None and alone is None)
            # Joint scores that have been written are not replaced.
            if not wanted or work.written or not is_away(error):
                raise
            log.warning("%s", error, extra={"event": "without_others"})
            if alone is not None:
                alone.write([output], files.device)
            else:
                write_waiting(trained, opened.table, work.ids, output)
            state = WAITING if alone is None else ALONE
            return Predicted.of(opened.table, 0, state=state, why=str(error)), None
        common_rows = outcome.common_rows if outcome.rows else len(opened.table)
        return work.count_rows(opened.table, common_rows), folder

    def _open_to_predict(self, work: Prediction, data: DataSettings) -> OpenedParty:
        """Reads the rows to predict. Raises VflError if the trained model cannot score them."""
        files, trained = self.files, work.trained
        opened = open_party(files.recipe, files.name, data, files.encoder, work=work)
        if len(opened.table) < (min_rows := files.file.predict.at_least):
            raise InputError(
                Code.DATA_INVALID,
                f"{opened.table.source}: must have at least {min_rows:,} rows to predict (got "
                f"{len(opened.table):,}). Give more rows, or lower predict.at_least.",
            )
        versions.require_same(trained.path, trained.plugins, versions.get_model_versions(opened))
        for text in unseen(trained, opened.table) if files.settings.features else ():
            sentence = f"{opened.table.source}: {text}"
            log.warning("%s", sentence, extra={"event": "unseen"})
            self.console.show("unseen", said=sentence)
        return opened

    def _run(
        self,
        opened: OpenedParty,
        folders: Folders,
        deadline_s: float = math.inf,
    ) -> tuple[RunOutcome, RunFolder]:
        with contextlib.ExitStack() as stack:
            with self.files.telling():
                run = self._prepare_to_join(opened, folders, deadline_s, stack)
            outcome, folder = run.run()
        # Only the active party has a summary. On one machine, the server writes the same file.
        if outcome.summary_json:
            write_atomic(folder.path.parent / "summary.json", outcome.summary_json)
        return outcome, folder

    def _prepare_to_join(
        self,
        opened: OpenedParty,
        folders: Folders,
        deadline_s: float,
        stack: contextlib.ExitStack,
    ) -> PartyRun:
        """Makes everything that can fail before the party joins. ``stack``: Closes it after the
        run.
        """
        files, recipe = self.files, self.files.recipe
        self._report_missing_policy()
        set_threads(files.file.threads)
        plain_arithmetic()
        keep_freed_memory()
        program.reduce_gc()
        opened.tell(self.console.show)
        # This copy of the policy sees the alignment's exchanges.
        policy = files.policy()

        def make(
            aligned: AlignedRows, secret: int | None, spread: PutOnRanks | None = None
        ) -> Assembled:
            return assemble(
                opened,
                aligned,
                device=files.device,
                policy=files.policy(policy),
                spread=spread,
                trees=files.file.trees,
                secret=secret,
                label_secret=label_secret,
            )

        book = self._open_record()
        label_secret = None
        if files.is_active and recipe.task.label_epsilon is not None:
            # The secret is kept in the record's folder, so that a label gets the same noise in all
            # runs.
            label_secret = secret_seed(
                load_or_create_secret(book.folder / LABEL_SECRET, new_secret())
            )
        work = opened.work
        trained = work.trained.path if isinstance(work, Prediction) else None
        installed = make_run_guards(files, book, resume=folders.resume, trained=trained)
        heads = HeadExchange(book, files.keyring.current)
        relay = HeadRelay(heads, files.name, recipe.active.name, files.keyring.current)
        guards = [words_of(files.file, recipe), *installed, relay]
        trains, plugins = opened.work.job == "train", versions.get_shared_versions(opened)
        processes = Processes(files.device, make)
        if self.ranks is not None:
            spread = partial(self._assemble_on_ranks, make, self.ranks)
            compare = partial(self._compare_ranks, self.ranks)
            processes = Processes(files.device, make, self.ranks.size, spread, compare)
        prepared = Preparation(
            opened,
            processes,
            plugins,
            policy=policy,
            resume=folders.resume,
            secret=new_secret() if trains and files.file.init == "secret" else None,
            calls=AlignmentCalls(
                complete=partial(self._complete_context, opened.work.job),
                when_aligned=partial(_count_use, installed),
            ),
            guards=guards,
        )
        ledger, meter = Ledger(), TcpMeter()
        joining = joining_of(opened.course, files.settings.role, plugins)
        transport_args = joining, heads, opened.work.job, list_leave_checks(installed)
        transports = Transports(files, self.console, ledger, meter, *transport_args)
        stack.callback(transports.close)
        session = Session(
            files.file.server,
            files.keyring,
            recipe.server,
            ledger,
            meter,
            heartbeat_s=recipe.run.heartbeat_s,
            wait_s=self.wait_s,
            on_waiting=transports.report_waiting,
            absent_s=recipe.run.server_absent_s if trains else 0.0,
            back_s=recipe.run.rejoin_deadline_s,
            emit=self.console.emit,
            deadline_s=deadline_s,
        )
        progress = Progress(self.console, session, ledger, files.is_active)
        stack.enter_context(trace_run("vfl-party", files.name))
        service, address = stack.enter_context(transports.listening())
        stack.enter_context(self._serve_metrics(session, progress, service))
        return PartyRun(
            prepared,
            folders,
            session,
            partial(transports.make_transport, service),
            progress,
            address=files.file.advertise or address,
            guards=installed,
        )

    def _report_missing_policy(self) -> None:
        """Reports the consequences if the party file has no policy."""
        if "policy" not in self.files.file.model_fields_set:
            sentence = describe_missing_policy(self.files.file.policy)
            log.warning("%s", sentence, extra={"event": "policy"})
            self.console.show("policy", said=sentence)

    def _open_record(self) -> RecordBook:
        """Opens the record. Warns if the record is new although this party has run before."""
        file, name = self.files.file, self.files.name
        parent = Path(file.record.folder or file.out)
        book = RecordBook(folder_of(parent, name), name)
        if book.is_new and any(parent.glob(f"*/{name}/run.json")):
            sentence = (
                f"{book.folder}: a new record begins, though {parent} has earlier runs of "
                f"{name}; if there was a record, stop and restore it: peers that have signed it "
                "refuse another one"
            )
            log.warning("%s", sentence, extra={"event": "advice"})
            self.console.show("advice", said=sentence)
        return book

    def _complete_context(self, job: Job, context: AlignmentContext) -> AlignmentContext:
        """Adds this party's threads, credentials and limits to the context of an alignment."""
        file, predicts = self.files.file, job == "predict"
        limits_peers = self.files.recipe.rows.align == "psi" and not (
            predicts and self.files.is_active
        )
        own_rows = len(context.table) if limits_peers else None

        def count_alignment() -> None:
            path = Path(file.record.folder or file.out) / f"alignments-{file.name}.json"
            quota.count(path, context.table.source, file.alignments_a_day, time.time())

        return replace(
            context,
            workers=file.threads,
            credentials=self.files.keyring.current(),
            begins=count_alignment,
            at_least=file.predict.at_least if predicts else 1,
            peer_rows_at_most=quota.limit_peer_rows(file.peer_rows_at_most, own_rows),
        )

    def _assemble_on_ranks(
        self, make: Callable[..., Assembled], ranks: Ranks, aligned: AlignedRows, secret: int | None
    ) -> Assembled:
        """Returns the assembled party with its encoder on all ranks. A lost rank ends this process,
        but not the run.
        """
        spread = make_spread(ranks, self.files)
        assembled = make(aligned, secret, spread=spread)
        assembled.phases = [RankGuardedPhase(phase) for phase in assembled.phases]
        return assembled

    def _compare_ranks(self, ranks: Ranks, aligned: AlignedRows, tried: Assembled) -> None:
        """Makes the other processes read the table. Raises InputError if a process has a different
        table.
        """
        parts = parts_of(tried.opened, aligned)
        begin_ranks(ranks, list_shared_settings(self.files), parts, tried.prepared)

    def _metrics_address(self) -> str:
        """Returns host:port for Prometheus, '' for none. Raises InputError if this machine cannot
        listen there.
        """
        if not self.metrics:
            return ""
        from vfl_common.prometheus import listen_address

        return listen_address(self.metrics)

    @contextlib.contextmanager
    def _serve_metrics(
        self, session: Session, progress: Progress, service: ExchangeService | None
    ) -> Iterator[None]:
        """Serves metrics to Prometheus while the run lasts, and for ``linger_s`` after it, if
        ``metrics`` is set.
        """
        address = self._metrics_address()
        if not address:
            yield
            return
        from vfl_common.prometheus import serve_metrics
        from vfl_party.runtime.prometheus import PartyMetrics

        files, failed = self.files, False

        def state() -> str:
            # The session's state does not reflect this party's own errors.
            return "failed" if failed else session.state

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
            state,
            files.keyring.ends,
            peers=[party.name for party in files.recipe.passives] if service is not None else [],
            waits_for=lambda: service.awaited if service is not None else [],
        )
        with serve_metrics(address, metrics.families, state, linger_s=self.linger_s) as port:
            self.console.emit("metrics", name=files.name, address=port.address)
            try:
                yield
            except Exception:
                failed = True
                raise


def _count_use(guards: Sequence[InstalledGuard], ids: Sequence[str]) -> None:
    for guard in guards:
        guard.count_use(ids)

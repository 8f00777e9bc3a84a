"""Wires a party's program together: files, identity, data, exchange, runner. Decides nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from vfl_common.config.data import DataSettings, ids_only, unaligned_of
from vfl_common.config.models import EncoderSettings
from vfl_common.config.party import PartyFile, load_party
from vfl_common.config.recipe import PartySettings, Recipe, load_recipe
from vfl_common.errors import Code, InputError, InternalError, PeerError, VflError
from vfl_common.files import write_atomic
from vfl_common.identity.credentials import Credentials, load_credentials
from vfl_common.identity.diagnose import diagnose
from vfl_common.ledger import Ledger
from vfl_common.link import Hub, Link
from vfl_common.logs import Console, log_to
from vfl_common.rpc.channel import dial, listening
from vfl_common.rpc.health import Health
from vfl_common.rpc.hub import MAX_STREAMS, ExchangeHub, ExchangeService
from vfl_common.rpc.hub import SERVICE as EXCHANGE
from vfl_common.rpc.link import ExchangeLink
from vfl_common.rpc.session import Joining, Session, Start
from vfl_common.rpc.tcp import TcpMeter
from vfl_common.run_folder import RunFolder, create, find_unfinished
from vfl_common.stages import AggregationPlan, Planned
from vfl_party.checkpoint import CheckpointStore
from vfl_party.context import MakeEncoder, Party
from vfl_party.data import load_table
from vfl_party.devices import device_name, peak_memory, resolve_device, set_threads
from vfl_party.job import BeginWith, PartyJob, Prepared, encoder_settings, load_encoder, load_models, prepare
from vfl_party.methods import build_phases, handed_on, privacy_plan, with_own_passes
from vfl_party.models import InputSpec
from vfl_party.phase import Phase
from vfl_party.prediction import ActivePredict, PassivePredict, TrainedRun, load_start, prepare_prediction
from vfl_party.progress import Progress
from vfl_party.ranks import Guarded, Ranks, SpreadEncoder, check_spread, follow
from vfl_party.runner import Outcome, Runner

_CLOSE_S = 5.0  # for the passive parties to end their streams
_DIAGNOSIS_S = 2.0
_COME_S = 10.0  # for all passive parties to open their streams, before anybody is told who is missing

JobName = Literal["train", "predict"]


@dataclass(frozen=True)
class Place:
    """A party file with all that it names, read and checked."""

    file: PartyFile
    recipe: Recipe
    place: PartySettings
    credentials: Credentials
    device: torch.device
    encoder: EncoderSettings

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def is_active(self) -> bool:
        return self.place.role == "active"

    @property
    def data(self) -> DataSettings:
        if self.file.data is None:
            raise InputError(Code.CONFIG_INVALID, f"party {self.name}: its file needs a [data] table")
        if self.is_active and self.file.data.label is None and not self.file.data.is_named:
            raise InputError(
                Code.CONFIG_INVALID, f"party {self.name}: data.label is missing; the active party holds the labels"
            )
        return self.file.data if self.place.features else ids_only(self.file.data)


def read_place(path: Path, *, device: str | None = None, recipe: Recipe | None = None) -> Place:
    """Reads a party file, its recipe and its certificate; ``device`` replaces the file's. Raises InputError."""
    file = load_party(path)
    sys.path.append(str(path.resolve().parent))  # for an encoder of the user's own that lies beside the party file
    recipe = recipe or load_recipe(Path(file.recipe))
    place = recipe.party(file.name)
    if place is None:
        known = ", ".join(party.name for party in recipe.parties)
        raise InputError(
            Code.NOT_IN_RECIPE, f"{path}: name: {file.name} is not a party of recipe {recipe.name} (parties: {known})"
        )
    credentials = load_credentials(file.tls, name=file.name)
    resolved = resolve_device(device or file.device)
    return Place(file, recipe, place, credentials, resolved, encoder_settings(recipe, file.name, file.encoder))


@dataclass
class _Grpc:
    """One generation's exchange over gRPC; see ``vfl_party.job.Transport``."""

    service: ExchangeService | None
    meter: TcpMeter
    hub: Hub | None = None
    link: Link | None = None
    server: Link | None = None
    grpc_hub: ExchangeHub | None = None
    grpc_links: Sequence[ExchangeLink] = ()
    roll_call: threading.Timer | None = None

    def end(self, error: VflError) -> None:
        if self.grpc_hub is not None:
            self.grpc_hub.end(error)
        for link in self.grpc_links:
            link.end(error)

    def close(self, error: BaseException | None) -> None:
        if self.roll_call is not None:
            self.roll_call.cancel()
        if self.grpc_hub is not None and error is None:
            self.grpc_hub.wait_for_late()
        if self.service is not None and error is None:
            self.service.wait_until_idle(_CLOSE_S)
        self.meter.sample()  # the kernel's counts go with the sockets
        if self.service is not None and error is not None:
            self.service.use(None)
        if error is not None:
            self.end(error if isinstance(error, VflError) else InternalError(str(error)))
        for link in self.grpc_links:
            link.close()


@dataclass
class PartyApp:
    """One party's program.

    Args:
        place: who this is.
        console: where events go.
        wait_s: how long to wait for a server that does not answer.
        metrics: where to listen for Prometheus: host:port, or a port alone; '' for nowhere.
        ranks: this process, the first, among several of this party; None where it is alone.
    """

    place: Place
    console: Console
    wait_s: float
    metrics: str = ""
    ranks: Ranks | None = None

    def train(self, *, fresh: bool) -> tuple[Outcome, RunFolder]:
        """Takes part in a training run to its end; ``fresh`` does not offer to go on with an unfinished one."""
        place = self.place
        self._metrics_address()  # sooner than the data are read
        table = load_table(place.data, with_label=place.is_active)
        more = unaligned_of(place.data)
        unaligned = load_table(more, with_label=False) if more is not None else None
        prepared = prepare(place.recipe, place.name, table, place.data, place.encoder, unaligned)
        out = Path(place.file.out)
        start = load_start(place.recipe, place.name, out)
        begin_with = None
        if start is not None and place.recipe.start is not None:
            tower = place.recipe.start.tower
            begin_with = partial(load_encoder, tree=start.state, run_id=start.run_id, tower=tower)
        resume = None if fresh else find_unfinished(out, place.name, place.recipe)
        if resume is not None:
            resume.checkpoints = self._store(resume)

        def open_folder(run_id: str) -> RunFolder:
            folder = create(out, run_id, place.name, place.recipe)
            folder.note(job="train")
            folder.checkpoints = self._store(folder)
            return folder

        def phases(party: Party) -> Sequence[Phase]:
            return build_phases(place.recipe, party)

        outcome, folder = self._run("train", prepared, phases, open_folder, resume, begin_with)
        self._finish(folder, outcome)
        return outcome, folder

    def predict(self, trained: TrainedRun, data: DataSettings, output: Path) -> tuple[Outcome, RunFolder]:
        """Takes part in a joint prediction for the rows of ``data``; the active party writes ``output``."""
        place = self.place
        prepared = prepare_prediction(place.place, load_table(data, with_label=False), trained.state)

        def open_folder(run_id: str) -> RunFolder:
            folder = create(Path(place.file.out), run_id, place.name, place.recipe)
            folder.note(job="predict", trained_run=trained.run_id)
            return folder

        def phases(party: Party) -> Sequence[Phase]:
            return [ActivePredict(party, prepared.table.ids, output) if place.is_active else PassivePredict(party)]

        begin_with = partial(load_models, tree=trained.state)
        outcome, folder = self._run("predict", prepared, phases, open_folder, None, begin_with, trained.run_id)
        self._finish(folder, outcome)
        return outcome, folder

    def _finish(self, folder: RunFolder, outcome: Outcome) -> None:
        folder.note(finished=True)
        if outcome.summary_json:  # the active party's; on one machine it is the server's file over again
            write_atomic(folder.path.parent / "summary.json", outcome.summary_json)

    def _store(self, folder: RunFolder) -> CheckpointStore:
        return CheckpointStore(folder.path / "checkpoints", self.place.recipe.run.kept_checkpoints)

    def _run(
        self,
        job: JobName,
        prepared: Prepared,
        make_phases: Callable[[Party], Sequence[Phase]],
        open_folder: Callable[[str], RunFolder],
        resume: RunFolder | None,
        begin_with: BeginWith | None,
        trained_run: str = "",
    ) -> tuple[Outcome, RunFolder]:
        place, recipe = self.place, self.place.recipe
        set_threads(place.file.threads)
        # Everything that can be refused without the others is refused before joining.
        trial = self._job(prepared, make_phases, begin_with, "", _Grpc(None, TcpMeter()), lambda *_: None)
        aggregations = tuple(
            AggregationPlan(phase.name, phase.rounds, phase.aggregates)
            for phase in trial.phases
            if phase.aggregates is not None and job == "train"
        )
        plan = [Planned(phase.name, phase.rounds, phase.alone_from, tuple(phase.skippable)) for phase in trial.phases]
        privacy_json = ""
        if place.is_active and job == "train":
            private = privacy_plan(recipe, len(trial.party.rows("train")))
            privacy_json = private.report().model_dump_json() if private is not None else ""
        if self.ranks is not None:
            self._check_ranks(trial, job)
        del trial
        ledger = Ledger()
        meter = TcpMeter()
        session = Session(
            place.file.server,
            place.credentials,
            recipe.server,
            ledger,
            meter,
            heartbeat_s=recipe.run.heartbeat_s,
            wait_s=self.wait_s,
            on_waiting=self._waiting,
        )
        progress = Progress(self.console, session, ledger, place.is_active)
        with self._listening(ledger, meter) as (service, address), self._exposed(session, progress, service):

            def tick(phase: str, round_: int, rounds: int, batch: int, batches: int) -> None:
                session.check()  # a party at work on its own hears of an interruption too
                progress.tick(phase, round_, rounds, batch, batches)

            def make_job(start: Start, folder: RunFolder) -> PartyJob:
                log_to(folder.path / "log.jsonl", run=start.run_id, party=place.name)
                progress.begin(folder.path / "metrics.jsonl", start)
                transport = self._transport(start, service, ledger, meter, aggregates=bool(aggregations))
                return self._job(prepared, make_phases, begin_with, start.run_id, transport, tick, self.ranks)

            runner = Runner(
                session,
                Joining(
                    role=place.place.role,
                    recipe_json=recipe.canonical_json(),
                    job=job,
                    pid=os.getpid(),
                    device=str(place.device) if self.ranks is None else f"{self.ranks.size} x {place.device.type}",
                    device_name=device_name(place.device),
                    run_id=trained_run,
                    exchange_address=place.file.advertise or address,
                    aggregations=aggregations,
                ),
                make_job,
                open_folder,
                ledger,
                checkpoint_every=recipe.run.checkpoint_every,
                observe=progress.observe,
                begin_round=progress.begin_round,
                plan=plan,
                resume=resume,
                privacy_json=privacy_json,
                peak_memory=lambda: peak_memory(place.device),
            )
            try:
                return runner.run()
            finally:
                session.close()

    def _job(
        self,
        prepared: Prepared,
        make_phases: Callable[[Party], Sequence[Phase]],
        begin_with: BeginWith | None,
        run_id: str,
        transport: _Grpc,
        tick: Callable[[str, int, int, int, int], None],
        ranks: Ranks | None = None,
    ) -> PartyJob:
        place = self.place

        def guarded(party: Party) -> Sequence[Phase]:
            return [Guarded(phase) for phase in make_phases(party)]

        def spread(encoder: nn.Module, spec: InputSpec) -> SpreadEncoder:
            assert ranks is not None  # noqa: S101 - see below
            return SpreadEncoder(ranks, encoder, spec, place.recipe.model.precision)

        return PartyJob(
            place.recipe,
            place.name,
            prepared,
            place.encoder,
            place.device,
            run_id,
            transport,
            tick=tick,
            make_phases=make_phases if ranks is None else guarded,
            begin_with=begin_with,
            spread=None if ranks is None else spread,
        )

    def _metrics_address(self) -> str:
        """host:port for Prometheus, '' for none. Raises InputError where this machine cannot listen there."""
        if not self.metrics:
            return ""
        from vfl_common.prometheus import listen_address

        return listen_address(self.metrics)

    @contextlib.contextmanager
    def _exposed(self, session: Session, progress: Progress, service: ExchangeService | None) -> Iterator[None]:
        """Metrics for Prometheus while the run lasts, where they were asked for."""
        address = self._metrics_address()
        if not address:
            yield
            return
        from vfl_common.prometheus import exposed
        from vfl_party.prometheus import PartyMetrics

        place = self.place
        metrics = PartyMetrics(
            {"party": place.name, "role": place.place.role, "recipe": place.recipe.name, "device": str(place.device)},
            progress.standing,
            session.ledger,
            session.meter,
            lambda: session.state,
            peers=[party.name for party in place.recipe.passives] if service is not None else [],
            waits_for=lambda: service.awaited if service is not None else [],
        )
        with exposed(address, metrics.families) as bound:
            self.console.emit("metrics", name=place.name, address=bound)
            yield

    def _check_ranks(self, trial: PartyJob, job: JobName) -> None:
        """Raises InputError where the phases, or the encoder, are for one process alone."""
        place, features = self.place, trial.party.features
        own = with_own_passes(place.recipe) if job == "train" else None
        if own is not None:
            text = f"recipe: phases: {own.name}: a phase of kind {own.kind!r} runs in one process of a party alone"
            raise InputError(Code.CONFIG_INVALID, f"{text}; start {place.name} without torchrun")
        spec = features.spec if features is not None else None
        check_spread(trial.party.models.get("encoder"), spec, place.device, place.name)

    @contextlib.contextmanager
    def _listening(self, ledger: Ledger, meter: TcpMeter) -> Iterator[tuple[ExchangeService | None, str]]:
        """The exchange's service and its address, at the active party; a passive party listens on nothing."""
        if not self.place.is_active:
            yield None, ""
            return
        recipe = self.place.recipe
        roster = [party.name for party in recipe.passives]
        service = ExchangeService(roster, ledger, meter, attach_timeout_s=recipe.run.rejoin_deadline_s)
        health = Health({EXCHANGE: lambda: True}, may_ask=[self.place.name, recipe.server, *roster])
        threads = MAX_STREAMS * len(roster) + 4  # and callers that are to be refused
        with listening(self.place.file.listen, self.place.credentials, [service, health], threads) as (_, address):
            self.console.emit("ready", name=self.place.name, address=address)
            try:
                yield service, address
            finally:
                service.close()

    def _transport(
        self,
        start: Start,
        service: ExchangeService | None,
        ledger: Ledger,
        meter: TcpMeter,
        *,
        aggregates: bool,
    ) -> _Grpc:
        place, recipe = self.place, self.place.recipe
        # The server gives a party that is late the whole of its time and then names it: we wait for that.
        patience_s = 2 * recipe.run.step_timeout_s
        servers = [self._link(place.file.server, recipe.server, start, ledger, patience_s)] if aggregates else []
        server = servers[0] if servers else None
        if service is not None:
            roster = [party.name for party in recipe.passives if party.name not in start.left]
            hub = ExchangeHub(
                start.run_id,
                start.generation,
                roster,
                ledger,
                timeout_s=recipe.run.step_timeout_s,
                allocate=self._allocate,
            )
            service.use(hub)
            roll_call = self._roll_call(hub)
            return _Grpc(service, meter, hub=hub, server=server, grpc_hub=hub, grpc_links=servers, roll_call=roll_call)
        address, peer = place.file.active or start.exchange_address, recipe.active.name
        if not address:
            text = f"the server names no address of {peer}; set 'active' in the party file"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=recipe.server)
        meter.name_address(address, peer)
        link = self._link(address, peer, start, ledger, recipe.run.step_timeout_s)
        return _Grpc(None, meter, link=link, server=server, grpc_links=[link, *servers])

    def _roll_call(self, hub: ExchangeHub) -> threading.Timer:
        """Says after a while who has not come: the passive parties know why, this one can only name them."""
        left_s = max(0.0, self.place.recipe.run.rejoin_deadline_s - _COME_S)

        def tell() -> None:
            if hub.absent:
                self._waiting(hub.absent, left_s)

        timer = threading.Timer(_COME_S, tell)
        timer.daemon = True
        timer.start()
        return timer

    def _waiting(self, missing: Sequence[str], left_s: float, why: str = "") -> None:
        because = {"why": why} if why else {}
        self.console.emit("waiting", missing=list(missing), left_s=round(left_s, 1), **because)

    @property
    def _allocate(self) -> Callable[[int], memoryview] | None:
        return pinned if self.place.device.type == "cuda" else None

    def _link(self, address: str, peer: str, start: Start, ledger: Ledger, timeout_s: float) -> ExchangeLink:
        """This generation's way to ``peer``; nothing is dialled before the first bundle."""
        place = self.place
        return ExchangeLink(
            lambda: dial(address, place.credentials, peer),
            me=place.name,
            peer=peer,
            run_id=start.run_id,
            generation=start.generation,
            ledger=ledger,
            reconnect_s=place.recipe.run.rejoin_deadline_s,
            timeout_s=timeout_s,
            allocate=self._allocate,
            explain=lambda: str(diagnose(address, place.credentials, peer, _DIAGNOSIS_S)),
            on_waiting=lambda left_s, why: self._waiting([peer], left_s, why),
        )


def lend(place: Place, ranks: Ranks) -> None:
    """A process of the party that is not its first: its GPU computes for that one, until that one ends."""
    set_threads(place.file.threads)

    def make_encoder(spec: InputSpec) -> nn.Module:
        return handed_on(place.recipe, MakeEncoder(place.recipe, place.name, place.encoder, spec))

    follow(ranks, make_encoder, place.recipe.model.precision)


def pinned(nbytes: int) -> memoryview:
    """A writable buffer in page-locked memory, from which a GPU copies without a detour."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy().data

"""Wires the aggregation server together and runs one job to its end."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from vfl_common.bundle import Ledger, load_entries
from vfl_common.config.party import TlsSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError, UnwritableError, VflError
from vfl_common.files import PLAIN_NAME, await_room, write_atomic
from vfl_common.identity.credentials import ANSWERS, collect_members
from vfl_common.identity.keyring import Keyring
from vfl_common.process.logs import Console, log_to
from vfl_common.process.program import do_last, explain_resuming
from vfl_common.process.signals import Stopped
from vfl_common.process.tracing import trace_run
from vfl_common.psi import MAX_ROWS
from vfl_common.rpc.ask import MAX_QUESTIONS
from vfl_common.rpc.channel import Service, run_server
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.service import MAX_STREAMS, ExchangeService
from vfl_common.rpc.exchange.service import SERVICE as EXCHANGE
from vfl_common.rpc.guard import share_arenas
from vfl_common.rpc.health import MAX_CHECKS, Health
from vfl_common.rpc.uplink import SERVICE as SESSIONS
from vfl_common.run_folder import RunFolder, create, find_unfinished, set_all_aside
from vfl_common.stages import AggregationPlan, Job
from vfl_common.summary import Summary, load_summary
from vfl_server.aggregation import AggregatedRun, Aggregator
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.run import Departures, RunHooks, ServedRun
from vfl_server.control.service import MAX_SESSIONS, ControlService
from vfl_server.intersection import alignment_service, oldest_protocol, remove_tags
from vfl_server.results import count_starts, summarise

_TICK_S = 0.2
_SAVE_S = 1.0
_CLOSE_S = 5.0
# Seconds between two notes of the time at which the run last trained.
_NOTE_S = 60.0
# Seconds in which parties that may not know that the run is complete can connect and learn it.
_TELL_S = 60.0
# Seconds in which the parties learn that the server was stopped, or that the run has failed.
_STOP_S = 1.5
# Characters; a larger summary is not sent to the active party.
MAX_SUMMARY = 2_000_000


class _SetAside(Exception):  # noqa: N818 - it says what happened
    """Raised if the run cannot be resumed and a new run replaces it."""


@dataclass(frozen=True)
class _ServerParts:
    """The components of one job's server. ``completed``: The summary, if an earlier process has
    completed the run.
    """

    keyring: Keyring
    folder: RunFolder
    ledger: Ledger
    meter: TcpMeter
    exchange: ExchangeService
    aggregator: Aggregator
    coordinator: Coordinator
    control: ControlService
    completed: Summary | None

    def save_ledger(self) -> None:
        self.ledger.save(self.folder.path / "ledger.json", self.meter.counts())


@dataclass
class ServerApp:
    """Runs the aggregation server for one job of one recipe.

    Args:
        out: The folder with all runs; the server writes to ``<out>/<run id>/<server's name>``.
        run_id: A name for a new run; if empty, it is made from time and recipe.
        fresh: Whether to begin a new run even if ``out`` has an unfinished run of the same recipe.
        metrics: The address at which Prometheus reads metrics: host:port, or only a port; '' for
            none.
        linger_s: The seconds for which the metrics stay available after the run.
        pins: {party: ``sha256:…`` of its public key}. A party without a pin may have any key.
        max_rows: The maximum number of rows of a party, if the parties align with the server.
    """

    recipe: Recipe
    tls: TlsSettings
    listen: str
    out: Path
    console: Console
    job: Job = "train"
    run_id: str = ""
    fresh: bool = False
    metrics: str = ""
    linger_s: float = 0.0
    pins: Mapping[str, str] = field(default_factory=dict)
    max_rows: int = MAX_ROWS
    # Whether this run replaces a run that this process has set aside.
    _follows: bool = field(default=False, init=False)

    def run(self) -> Summary:
        """Serves until the run is complete. Raises VflError if it fails."""
        with trace_run("vfl-server", self.recipe.server):
            return self._serve_all()

    def _serve_all(self) -> Summary:
        """Serves the run. If the run is set aside, serves the new run that replaces it."""
        share_arenas()
        members = collect_members(self.recipe, pins=self.pins)
        keyring = Keyring(self.tls, self.recipe.server, members, uses=ANSWERS, out=self.out)
        # A bad address must fail before a folder is made.
        self._metrics_address()
        if self.job == "predict":
            return self._run(keyring, self._open_folder())
        with explain_resuming(fresh=self.fresh):
            # Waiting for disk space is better than ending: a supervisor gives up after several
            # restarts.
            await_room(
                [self.out],
                self.recipe.run.rejoin_deadline_s,
                lambda text: self.console.emit("advice", said=text),
            )
            folder = self._open_folder()
            # A new run replaces a run that was set aside.
            while True:
                try:
                    return self._run(keyring, folder)
                except _SetAside as why:
                    folder.set_aside(str(why))
                    self.console.emit("set_aside", run=folder.run_id, why=str(why))
                    folder.unlock()
                    folder, self._follows = self._create_folder(_new_run_id(self.recipe.name)), True

    def _run(self, keyring: Keyring, folder: RunFolder) -> Summary:
        log_to(folder.path / "log.jsonl", run=folder.run_id, party=self.recipe.server)
        keyring.tell()
        parts = self._build_parts(keyring, folder)
        with self._listen(parts):
            self._serve(parts)
            summary = self._complete(parts)
        # Until the folder is marked as finished, the same command reports the end to the parties
        # again.
        do_last(folder.prepare_finished_note())
        self.console.emit(
            "completed", run_id=folder.run_id, summary=str(folder.path.parent / "summary.json")
        )
        return summary

    def _build_parts(self, keyring: Keyring, folder: RunFolder) -> _ServerParts:
        """Makes and connects the server's components. None of them listens yet."""
        recipe, ledger, meter = self.recipe, Ledger(), TcpMeter()
        ledger.carry(load_entries(folder.path / "ledger.json"))
        roster = [party.name for party in recipe.parties]
        phases = [phase.name for phase in recipe.phases]
        exchange = ExchangeService(
            roster,
            keyring,
            ledger,
            meter,
            phases=phases,
            attach_timeout_s=recipe.run.step_timeout_s,
        )
        aggregator = Aggregator(
            exchange,
            AggregatedRun(folder.run_id, roster, [party.name for party in recipe.passives], phases),
            timeout_s=recipe.run.step_timeout_s,
            fail=lambda error: coordinator.fail(error),
            align=alignment_service(
                recipe,
                folder.path,
                trains=self.job == "train",
                max_rows=self.max_rows,
            ),
        )
        departures = Departures(folder.path / "left.json")
        completed = self._read_completed(folder)

        def begin(
            generation: int, checkpoint: str, aggregations: Sequence[AggregationPlan]
        ) -> None:
            if self.job == "train":
                goes_on = (
                    {"goes_on": generation}
                    if recipe.run.server_absent_s and not aggregations
                    else {}
                )
                folder.note(trained_s=time.time(), **goes_on)
            aggregator.begin(generation, checkpoint, aggregations)

        def open_generation(generation: int, _checkpoint: str) -> None:
            note_start(folder, generation, coordinator.status().wall_s)
            aggregator.open(generation)

        generation = folder.facts().get("generation", 0)
        run = ServedRun(
            recipe,
            self.job,
            folder.run_id,
            oldest=oldest_protocol(recipe),
            generation=generation,
            left=departures.read(),
            completed=completed is not None,
            ran_s=ran_s(folder),
            under_way=generation > 0 and folder.facts().get("goes_on") == generation,
        )
        hooks = RunHooks(
            self.console.emit,
            on_start=open_generation,
            on_plan=begin,
            on_end=aggregator.end,
            on_leave=departures.add,
            released=partial(self._release_reason, folder),
            expired=partial(self._is_expired, folder),
        )
        coordinator = Coordinator(run, hooks)
        control = ControlService(coordinator, keyring, ledger, meter, self.console.show)
        return _ServerParts(
            keyring, folder, ledger, meter, exchange, aggregator, coordinator, control, completed
        )

    @contextlib.contextmanager
    def _listen(self, parts: _ServerParts) -> Iterator[None]:
        """Listens for the parties, for health checks and for Prometheus."""
        recipe, keyring = self.recipe, parts.keyring
        roster = [party.name for party in recipe.parties]

        def is_running() -> bool:
            return not parts.coordinator.finished.is_set()

        health = Health(
            {SESSIONS: is_running, EXCHANGE: is_running}, keyring, may_ask=[recipe.server, *roster]
        )
        # Each party needs threads for its sessions, streams, questions and health checks. The
        # server's own probes need threads for health checks. Four more threads refuse other
        # callers.
        threads = (
            (MAX_SESSIONS + MAX_STREAMS + MAX_QUESTIONS + MAX_CHECKS) * len(roster) + MAX_CHECKS + 4
        )
        services: list[Service] = [parts.control, parts.exchange, health]
        with (
            self._serve_metrics(parts),
            run_server(self.listen, keyring, services, threads) as (_, address),
        ):
            # A replacing run listens at the same address, even if the requested port was 0.
            self.listen = address
            self.console.emit(
                "ready", name=recipe.server, address=address, run_id=parts.folder.run_id
            )
            yield

    def _serve(self, parts: _ServerParts) -> None:
        """Serves until the parties have finished. Raises VflError if the run fails. Also raises
        KeyboardInterrupt.
        """
        coordinator = parts.coordinator
        try:
            if parts.completed is None:
                self._tick(parts)
        # A full disk may be temporary, so the parties wait as they do for a stopped server.
        except (KeyboardInterrupt, Stopped, UnwritableError):
            coordinator.stop()
            coordinator.wait_until_empty(_STOP_S)
            raise
        except VflError as error:
            coordinator.fail(error)
        finally:
            parts.aggregator.close()
            if coordinator.failure is None:
                parts.save_ledger()
        if coordinator.set_aside:
            coordinator.wait_until_empty(_STOP_S)
            raise _SetAside(coordinator.set_aside)
        if coordinator.failure is not None:
            # The run's failure is raised below, so a signal need not be.
            with contextlib.suppress(KeyboardInterrupt, Stopped):
                coordinator.wait_until_empty(_STOP_S)
            # A failed run is not resumed, so its stored tags are not needed.
            remove_tags(parts.folder.path)
            raise coordinator.failure

    def _complete(self, parts: _ServerParts) -> Summary:
        """Writes the summary and sends it to the active party. Reports the end of the run to
        all.
        """
        recipe, coordinator, folder = self.recipe, parts.coordinator, parts.folder
        summary = parts.completed or summarise(
            recipe, self.job, coordinator, folder, parts.ledger, parts.meter
        )
        text = summary.model_dump_json(indent=1) + "\n"
        write_atomic(folder.path.parent / "summary.json", text)
        coordinator.complete(text if len(text) < MAX_SUMMARY else "")
        # It is unknown to which parties an earlier process reported the end.
        if parts.completed is not None:
            coordinator.wait_until_informed(min(recipe.run.rejoin_deadline_s, _TELL_S))
        coordinator.wait_until_empty(_CLOSE_S)
        parts.save_ledger()
        return summary

    def _read_completed(self, folder: RunFolder) -> Summary | None:
        """Returns the summary of this run if an earlier process completed the run and wrote it;
        None otherwise.
        """
        path = folder.path.parent / "summary.json"
        try:
            summary = load_summary(path) if self.job == "train" and path.exists() else None
        except (OSError, ValueError):
            return None
        expected = (folder.run_id, self.recipe.digest())
        return (
            summary
            if summary is not None and (summary.run_id, summary.recipe_digest) == expected
            else None
        )

    def _metrics_address(self) -> str:
        """Returns host:port for Prometheus, '' for none. Raises InputError if this machine cannot
        listen there.
        """
        if not self.metrics:
            return ""
        from vfl_common.prometheus import listen_address

        return listen_address(self.metrics)

    @contextlib.contextmanager
    def _serve_metrics(self, parts: _ServerParts) -> Iterator[None]:
        """Serves metrics for Prometheus while the run lasts, and for ``linger_s`` after it, if
        ``metrics`` is set.
        """
        address = self._metrics_address()
        if not address:
            yield
            return
        from vfl_common.prometheus import serve_metrics
        from vfl_server.prometheus import ServerMetrics

        exchange, control = parts.exchange, parts.control

        def count_refusals() -> Counter[str]:
            return control.refusals.counts() + exchange.refusals.counts()

        awaited, ends = lambda: exchange.awaited, parts.keyring.ends
        metrics = ServerMetrics(
            parts.coordinator, parts.ledger, parts.meter, awaited, count_refusals, ends
        )
        coordinator = parts.coordinator
        with serve_metrics(
            address,
            metrics.families,
            lambda: coordinator.status().state.value,
            linger_s=self.linger_s,
        ) as port:
            self.console.emit("metrics", name=self.recipe.server, address=port.address)
            try:
                yield
            finally:
                # The replacing run needs the port at once.
                if coordinator.set_aside:
                    port.linger_s = 0.0

    def _open_folder(self) -> RunFolder:
        """Opens a run folder: the folder of ``run_id``, of an unfinished run, or of a new run."""
        if self.job == "predict":
            return self._create_folder(self.run_id or _new_run_id(f"{self.recipe.name}-predict"))
        if self.run_id:
            folder_facts = RunFolder(
                self.out / self.run_id / self.recipe.server, self.run_id
            ).facts()
            return self._create_folder(
                self.run_id, "" if folder_facts else f"the new run {self.run_id} was asked for"
            )
        if self.fresh:
            return self._create_folder(
                _new_run_id(self.recipe.name), "a new run was asked for (--fresh)"
            )
        unfinished = find_unfinished(self.out, self.recipe.server, self.recipe)
        return self._create_folder(
            unfinished.run_id if unfinished is not None else _new_run_id(self.recipe.name)
        )

    def _create_folder(self, run_id: str, anew: str = "") -> RunFolder:
        """Opens the folder of run ``run_id``. ``anew``: Why the parties may leave their current
        runs; '' if they must not.
        """
        folder = create(self.out, run_id, self.recipe.server, self.recipe)
        folder.note(
            job=self.job, server_starts=count_starts(folder) + 1, **({"anew": anew} if anew else {})
        )
        for old_run in (
            set_all_aside(self.out, self.recipe.server, self.recipe, anew, but=run_id)
            if anew
            else ()
        ):
            self.console.emit("set_aside", run=old_run, why=anew)
        return folder

    def _release_reason(self, folder: RunFolder, run_id: str) -> str:
        """Returns why a party may leave run ``run_id``, which it offers to resume; '' if it must
        not.

        ``folder``: The folder of the run that begins.
        """
        if PLAIN_NAME.fullmatch(run_id):
            # A run with a damaged file cannot be resumed, so the reason is looked up below.
            with contextlib.suppress(InputError):
                other = RunFolder(self.out / run_id / self.recipe.server, run_id)
                if other.facts().get("finished"):
                    return f"run {run_id} is complete"
                if why := other.set_aside_reason:
                    return why
        return str(folder.facts().get("anew", ""))

    def _is_expired(self, folder: RunFolder) -> bool:
        """Returns whether the run is set aside if a party cannot resume it.

        A process sets aside only one run. Otherwise a party that can resume no run would start new
        runs for ever.
        """
        within_s = self.recipe.run.resume_within_s
        return not self._follows and time.time() - folder.facts().get("trained_s", 0.0) > within_s

    @staticmethod
    def _tick(parts: _ServerParts) -> None:
        """Checks deadlines, saves the ledger and samples counters until the run is done."""
        saved_s = noted_s = time.monotonic()
        while not parts.coordinator.finished.wait(_TICK_S):
            parts.coordinator.tick()
            # If this process dies, the next one continues from the saved ledger.
            if time.monotonic() - saved_s > _SAVE_S:
                saved_s = time.monotonic()
                # The ledger only counts bytes, so the run continues if it cannot be saved.
                with contextlib.suppress(VflError):
                    parts.save_ledger()
            # After a restart, the noted time is compared with ``run.resume_within_s``.
            if time.monotonic() - noted_s > _NOTE_S and parts.coordinator.status().at_work:
                noted_s = time.monotonic()
                parts.folder.note(trained_s=time.time())
            parts.keyring.warn_of_expiry_daily()
            parts.meter.sample()
        parts.meter.sample()
        parts.save_ledger()


def note_start(folder: RunFolder, generation: int, wall_s: float) -> None:
    """Records in ``folder`` that a generation starts, and when the run first started. ``wall_s``:
    The seconds since that first start.
    """
    folder.note(generation=generation, started_s=time.time() - wall_s)


def ran_s(folder: RunFolder) -> float:
    """Returns the seconds since an earlier process of this server first started the run; 0 if no
    earlier process did.

    Also returns 0 if the machine's clock was set back to before that start.
    """
    return max(0.0, time.time() - float(folder.facts().get("started_s", math.inf)))


def _new_run_id(name: str) -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name}-{os.urandom(2).hex()}"

"""Runs a serving party: the active party answers HTTP, passive parties answer the active party."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vfl_common.config.party import PartyFile, ServeSettings
from vfl_common.errors import Code, InputError, VflError
from vfl_common.process.handover import get_predecessor, hand_over, notify, on_hangup
from vfl_common.process.logs import Console, log_to, version
from vfl_common.registry import ModelRegistry
from vfl_common.rpc.channel import run_server
from vfl_common.rpc.health import MAX_CHECKS, Health
from vfl_common.rpc.serving.service import MAX_STREAMS, SERVICE, SeveralRuns
from vfl_party.assembly.machine import room
from vfl_party.predict.run import TrainedRun
from vfl_serve.models import ChosenRun, Follower, Lineage, LoadedRun
from vfl_serve.opening import (
    GrantWatch,
    OpenedRun,
    Opener,
    choose_loader,
    is_peer_missing,
    list_attending,
)
from vfl_serve.parties import Active, Passive
from vfl_serve.rpc import serve_grpc
from vfl_serve.scored import Counts
from vfl_serve.telling import open_request_reporter
from vfl_serve.tokens import Tokens, check_open, describe_plain_tokens, get_allowed_hosts

# These logs are in the folder of the party's runs, since they outlive each served run.
LOG, ACCESS = "serve-{}.jsonl", "serve-access-{}.jsonl"
# Maximum wait for passive parties to reconnect after a handover, which takes them about a second,
# and the interval between two checks.
_COME_S, _LOOK_S = 5.0, 0.02
INSTALL = "pip install '.[serve]' in the clone of vfl"

if TYPE_CHECKING:
    from vfl_serve.http.app import HttpPort

log = logging.getLogger(__name__)

R = TypeVar("R", bound=LoadedRun)
# {recipe name: the runs of the model}
Lineages = Mapping[str, Lineage[R]]


class _Hangup(Exception):  # noqa: N818 - a person's wish, not a fault
    """The process has received SIGHUP."""


@dataclass
class ServingParty:
    """A party that serves trained runs.

    Args:
        path: The path of the party file.
        file: The settings of the party file, with replacements from the command line.
        chosen: The runs. For each model the run in production answers if it is chosen, otherwise
            the first run.
        device: Replaces the device of the party file.
        source: The table with the served ids; None: the table of the party file.
        metrics: host:port of the metrics for Prometheus; '' for none.
        solo: Whether the active party scores alone, with each run's student.
    """

    path: Path
    file: PartyFile
    chosen: Sequence[ChosenRun]
    console: Console
    device: str | None = None
    source: str | None = None
    metrics: str = ""
    solo: bool = False
    # Counts requests of both ports by HTTP status.
    counts: Counts = field(default_factory=Counts)

    @property
    def settings(self) -> ServeSettings:
        """Returns the ``serve`` section of the party file."""
        return self.file.serve

    @property
    def registry(self) -> ModelRegistry:
        """Returns the party's model registry."""
        return ModelRegistry(Path(self.file.out), self.file.name)

    @property
    def follows(self) -> set[str]:
        """Returns the names of the models whose run in production is served."""
        return {run.follows for run in self.chosen if run.follows}

    def run(self, *, listens: bool = False) -> None:
        """Serves until a signal ends the program. Raises VflError.

        ``listens``: whether the command line sets the address of HTTP, which is an error at a
        passive party.
        """
        load = choose_loader(solo=self.solo)
        runs = [load(run.folder, self.file.name) for run in self.chosen]
        is_active = runs[0].recipe.active.name == self.file.name
        if listens and not is_active:
            raise InputError(
                Code.CONFIG_INVALID,
                f"--http: only for the active party, but {self.file.name} is passive. Remove it.",
            )
        log_to(self._log_path(LOG), party=self.file.name)
        room(self.file)
        opener = Opener(
            self.path, self.file, runs, self.console, self.device, self.source, solo=self.solo
        )
        failed = queue.SimpleQueue[BaseException]()
        with ExitStack() as stack:
            stack.callback(opener.close)
            port = None
            if is_active:
                port = self._start_active(stack, opener, runs)
            else:
                self._start_passive(stack, opener, runs, failed)
            watch = GrantWatch(opener.list_approvals, failed, self.console.emit)
            stack.callback(watch.close)
            watch.watch()
            on_hangup(lambda: failed.put(_Hangup()))
            notify("READY=1")
            while isinstance(ended := failed.get(), _Hangup):
                if self._hand_over(opener, port):
                    return
            raise ended

    def _hand_over(self, opener: Opener, port: HttpPort | None) -> bool:
        """Starts a new process that takes over; returns whether it succeeded.

        ``port``: The HTTP port of an active party.
        """
        sockets = {"http": port.socket} if port is not None else {}
        try:
            process = hand_over(sockets, lambda: {"present": list_attending(opener.tallies)})
        except InputError as error:
            log.error("%s", error, extra={"event": "handover"})
            self.console.show("advice", said=str(error))
            return False
        self.console.emit("handover", pid=process)
        if port is not None:
            port.leave()
        return True

    def _take_over(
        self, stack: ExitStack, opener: Opener, runs: Sequence[TrainedRun]
    ) -> tuple[dict[str, socket.socket], dict[str, list[str]]]:
        """Waits for the end of the process that this one replaces, if any, and serves metrics.

        Returns the sockets of that process, and {run id: the passive parties that were connected}.
        Raises InputError.
        """
        predecessor = get_predecessor()
        connected: dict[str, list[str]] = (
            predecessor.wait()["present"] if predecessor is not None else {}
        )
        stack.enter_context(self._serve_metrics(opener, runs))
        return dict(predecessor.sockets) if predecessor is not None else {}, connected

    def _log_path(self, name: str) -> Path:
        """Returns the path of a log. ``name``: A format string for the party's name."""
        return self.registry.out / name.format(self.file.name)

    def _start_passive(
        self,
        stack: ExitStack,
        opener: Opener,
        runs: Sequence[TrainedRun],
        failed: queue.SimpleQueue[BaseException],
    ) -> None:
        """Starts to answer the active party. Raises VflError.

        ``failed``: Receives the error that ends a stream for good.
        """
        opened = [opener.open(run) for run in runs]
        self._take_over(stack, opener, runs)
        patient = len(runs) > 1 or bool(self.follows)
        passive = Passive(opener, opened[0], self.console, failed, patient=patient)
        self.console.emit("ready", name=passive.name, address=passive.address)
        self._start_runs(stack, opener, opened, passive.open)

    def _start_active(
        self, stack: ExitStack, opener: Opener, runs: Sequence[TrainedRun]
    ) -> HttpPort:
        """Starts to answer HTTP; returns the port. Raises VflError."""
        http, settings = _import_http(), self.settings
        check_open(settings)
        http.require_certificate(settings)
        if (text := describe_plain_tokens(settings)) is not None:
            log.warning("%s", text, extra={"event": "advice"})
            self.console.show("advice", said=text)
        path = Path(settings.tokens) if settings.tokens is not None else None
        counts = Path(self.file.out) / f"tokens-{self.file.name}.json" if path is not None else None
        # Errors in the token file must be raised while the previous process still answers.
        Tokens(path)
        opened = [opener.open(run) for run in runs]
        sockets, connected = self._take_over(stack, opener, runs)
        tokens = Tokens(path, kept=counts)
        # A followed model has its kept runs, a run that starts and a run that ends.
        max_runs = len(runs) + len(self.follows) * (settings.keep + 2)
        several = SeveralRuns(opener.keyring, opener.passives, max_runs)
        active = Active(opener, several, self.console, tokens, http.served)
        lines = self._start_runs(stack, opener, opened, active.open)
        models = {name: http.model(line) for name, line in lines.items()}
        may_ask = [self.file.name, *opener.servers, *opener.passives]
        health = Health({SERVICE: lambda: True}, opener.keyring, may_ask=may_ask)
        threads = (MAX_STREAMS * max_runs + MAX_CHECKS) * len(opener.passives) + 2 * MAX_CHECKS + 4
        address = ""
        if not self.solo:
            listen_address = self.settings.listen or self.file.listen
            listens = run_server(listen_address, opener.keyring, [several, health], threads)
            _, address = stack.enter_context(listens)
            stack.callback(several.close)
        catalog = http.catalog(models, tokens, self.counts, opener.disk.ready)
        access = self._log_path(ACCESS) if settings.access_log else None
        access_log = open_request_reporter(access, self.file.name)
        reporter = stack.enter_context(access_log)
        app = http.make_app(catalog, get_allowed_hosts(settings), reporter)
        # The passive parties reconnect; until then new connections wait in the socket.
        until_s = time.monotonic() + _COME_S
        while time.monotonic() < until_s and is_peer_missing(
            connected, list_attending(opener.tallies)
        ):
            time.sleep(_LOOK_S)
        port: HttpPort = stack.enter_context(http.listening(app, settings, sockets.get("http")))
        grpc = stack.enter_context(serve_grpc(catalog, settings, reporter))
        where = {"http": port.url} | ({"grpc": grpc} if grpc is not None else {})
        self.console.emit("ready", name=self.file.name, address=address, **where)
        return port

    def _start_runs(
        self,
        stack: ExitStack,
        opener: Opener,
        opened: Sequence[OpenedRun],
        begin: Callable[[OpenedRun], R],
    ) -> Lineages[R]:
        """Serves runs until ``stack`` closes, and follows the registry. Raises VflError.

        ``begin``: Starts to serve an opened run.
        """

        def load(run_id: str) -> R:
            loaded = opener.load(self.registry.out / run_id)
            try:
                return begin(loaded)
            except BaseException:
                loaded.store.close()
                raise

        production = {run.folder.name for run in self.chosen if run.follows}
        runs_by_model = dict[str, list[R]]()
        for loaded in opened:
            runs, run = runs_by_model.setdefault(loaded.trained.recipe.name, []), begin(loaded)
            if all(other.run_id != run.run_id for other in runs):
                runs.insert(0 if run.run_id in production else len(runs), run)
        lines = dict[str, Lineage[R]]()
        for name, runs in runs_by_model.items():
            previous_ids = self._load_previous(name, runs, load) if name in self.follows else []
            line = Lineage(name, runs, previous_ids, self.settings.keep, self.console.emit)
            stack.callback(line.close)
            lines[name] = line
        followed = [line for name, line in lines.items() if name in self.follows]
        follower = Follower(self.registry, followed, load, self.console.emit)
        stack.callback(follower.close)
        follower.watch()
        return lines

    def _load_previous(self, name: str, runs: list[R], load: Callable[[str], R]) -> list[str]:
        """Appends earlier runs in production to ``runs``, so that a rollback loads nothing.

        Returns their ids, with the latest first.
        """
        result = list[str]()
        line = self.registry.lines().get(name)
        for run_id in reversed(line.before[-self.settings.keep :] if line is not None else []):
            try:
                if all(run.run_id != run_id for run in runs):
                    runs.append(load(run_id))
                    result.append(run_id)
            except VflError as error:
                self.console.emit("advice", said=f"run {run_id}: no rollback to it ({error})")
        return result

    @contextlib.contextmanager
    def _serve_metrics(self, opener: Opener, runs: Sequence[TrainedRun]) -> Iterator[None]:
        """Serves metrics to Prometheus if ``metrics`` has an address."""
        if not self.metrics:
            yield
            return
        from vfl_common.prometheus import listen_address, serve_metrics
        from vfl_serve.prometheus import ServeMetrics

        address = listen_address(self.metrics)
        metrics = ServeMetrics(
            {
                "party": self.file.name,
                "role": "active" if opener.active == self.file.name else "passive",
                "recipe": ",".join(dict.fromkeys(run.recipe.name for run in runs)),
                "device": self.device or self.file.device,
                "version": version(),
            },
            opener.tallies,
            self.counts,
            opener.disk.ready,
            opener.keyring.ends,
        )
        with serve_metrics(address, metrics.families, metrics.state) as port:
            self.console.emit("metrics", address=port.address)
            yield


@dataclass(frozen=True)
class _HttpParts:
    """Classes and functions of the HTTP port, which need the packages of the extra ``serve``."""

    make_app: Callable[..., Any]
    listening: Callable[..., Any]
    catalog: Callable[..., Any]
    model: Callable[..., Any]
    served: Callable[..., Any]
    require_certificate: Callable[..., None]


def _import_http() -> _HttpParts:
    """Imports the HTTP port. Raises InputError if a package is missing."""
    try:
        from vfl_serve.http.app import listening as listening_http
        from vfl_serve.http.app import make_app, require_certificate
        from vfl_serve.served import Catalog, Served, ServedModel
    except ImportError as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"serve: FastAPI cannot be imported ({str(error).splitlines()[0]}). Run {INSTALL}.",
        ) from None
    return _HttpParts(make_app, listening_http, Catalog, ServedModel, Served, require_certificate)

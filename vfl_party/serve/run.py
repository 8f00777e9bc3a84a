"""Runs a party that serves: the active one answers HTTP, the passive ones answer it."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from vfl_common.config.party import ServeSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.ledger import Ledger
from vfl_common.process.logs import Console, log_to
from vfl_common.rpc.channel import listening, split_address
from vfl_common.rpc.health import MAX_CHECKS, Health
from vfl_common.rpc.serving.answered import Keeping
from vfl_common.rpc.serving.attendance import Attendance
from vfl_common.rpc.serving.service import MAX_STREAMS, SERVICE, ServingService
from vfl_party.assembly.files import PartyFiles
from vfl_party.phases import stand_in
from vfl_party.predict.prediction import TrainedRun
from vfl_party.serve.answering import Answers, DailyLimit, SentBefore
from vfl_party.serve.batching import Batcher
from vfl_party.serve.counts import Counts
from vfl_party.serve.quality import read_quality
from vfl_party.serve.scorer import OnlineScorer, columns_of
from vfl_party.serve.store import Store, require_served
from vfl_party.serve.stores.kept import KeptEmbeddings
from vfl_party.serve.tokens import Tokens

# Of an answer; a message of gRPC has at most four.
_ANSWER_BYTES = 2 << 20
# In the party's folder of the run: the log, and the bytes of the last time that it was served.
LOG, BYTES = "serve.jsonl", "serve-bytes.json"
INSTALL = 'pip install "vfl[serve]"'


@dataclass
class Serving:
    """A party that serves a trained model.

    Args:
        source: of the table with the people who may be asked for; None: the party file's.
        metrics: host:port for Prometheus; '' for none.
    """

    files: PartyFiles
    trained: TrainedRun
    console: Console
    source: str | None = None
    metrics: str = ""
    ledger: Ledger = field(default_factory=Ledger)
    counts: Counts = field(default_factory=Counts)

    @property
    def settings(self) -> ServeSettings:
        return self.files.file.serve

    @property
    def recipe(self) -> Recipe:
        return self.trained.recipe

    @cached_property
    def store(self) -> Store:
        """The rows and models. Raises InputError."""
        require_served(self.trained)
        return Store(self.files, self.trained, self.console.show, self.source)

    @property
    def most_at_once(self) -> int:
        """The most rows of a question: its answers must fit into a message."""
        widest = max(self.store.held.party.widths.values(), default=1)
        return max(1, min(self.settings.max_batch, _ANSWER_BYTES // (4 * widest)))

    def run(self) -> None:
        """Serves until a signal comes. Raises VflError."""
        log_to(self.trained.path / LOG, run=self.trained.run_id, party=self.files.name)
        with ExitStack() as stack:
            stack.enter_context(self._exposed())
            self.store.watch()
            stack.callback(self.store.close)
            stack.callback(self.ledger.save, self.trained.path / BYTES)
            if not self.files.is_active:
                self._attend()
            stack.enter_context(self._answering())
            threading.Event().wait()

    def _attend(self) -> None:
        """Answers the active party. Raises VflError."""
        file, recipe = self.files.file, self.recipe
        peer = recipe.active.name
        if file.active is None:
            text = f"party {self.files.name}: set active to the address at which {peer} serves"
            raise InputError(Code.CONFIG_INVALID, text)
        limit, path = None, Path(file.out) / f"answers-{self.files.name}.sqlite"
        if self.settings.answers_a_day is not None:
            limit = DailyLimit(path, self.settings.answers_a_day)

        def attends(here: bool) -> None:
            self.console.emit("attending" if here else "away", peer=peer)

        def keeping() -> Keeping:
            return Keeping(self.settings.cache_s, self.store.held.features_version)

        attendance = Attendance(
            file.active,
            peer,
            self.files.keyring,
            self.ledger,
            run_id=self.trained.run_id,
            digest=recipe.digest(),
            # The active party's own bound may be another one.
            most_ids=max(self.most_at_once, 1024),
            answer=Answers(self.store, partial(SentBefore, path, self.trained.run_id), limit),
            attends=attends,
            keeping=keeping,
            at_once=self.store.at_once,
        )
        self.store.when_renewed(attendance.renew)
        self.console.emit("ready", name=self.files.name, address=file.active)
        attendance.run()

    @contextlib.contextmanager
    def _answering(self) -> Iterator[str]:
        """Answers HTTP while the block runs; yields the URL. Raises VflError."""
        files, recipe, settings = self.files, self.recipe, self.settings
        listen_http, make_app, served_of = _http()
        check_open(settings)
        tokens = Tokens(Path(settings.tokens) if settings.tokens is not None else None)

        def attends(name: str, here: bool) -> None:
            self.console.emit("attending" if here else "away", party=name)

        service = ServingService(
            self.store.held.party.widths,
            files.keyring,
            self.ledger,
            run_id=self.trained.run_id,
            digest=recipe.digest(),
            attends=attends,
        )
        roster = [each.name for each in recipe.passives]
        may_ask = [files.name, recipe.server, *roster]
        health = Health({SERVICE: lambda: True}, files.keyring, may_ask=may_ask)
        threads = (MAX_STREAMS + MAX_CHECKS) * len(roster) + 2 * MAX_CHECKS + 4
        quality = read_quality(self.trained.path.parent, recipe.task)
        with ExitStack() as stack:
            listens = listening(files.file.listen, files.keyring, [service, health], threads)
            _, address = stack.enter_context(listens)
            stack.callback(service.close)
            scorer = OnlineScorer(
                self.store,
                KeptEmbeddings(service, settings.cache_mib, self.counts.used_again).ask,
                settings.party_timeout_ms / 1000,
                quality,
                stand_in.kept(self.trained.path),
            )
            batcher = Batcher(scorer.score, self.most_at_once, settings.max_wait_ms / 1000)
            stack.callback(batcher.close)
            one = columns_of(self.store.held, torch.zeros(1, recipe.task.outputs))
            served = served_of(
                name=recipe.name,
                run_id=self.trained.run_id,
                columns={name: values.dtype for name, values in one.items()},
                parties=tuple(each.name for each in recipe.parties),
                batcher=batcher,
                tokens=tokens,
                quality=quality,
                counts=self.counts,
                most_rows=settings.most_rows,
                most_at_once=self.most_at_once,
                present=lambda: service.present,
            )
            app = make_app(served, self.store.held.columns, _hosts(settings))
            url = stack.enter_context(listen_http(app, settings))
            self.console.emit("ready", name=files.name, address=address, http=url)
            yield url

    @contextlib.contextmanager
    def _exposed(self) -> Iterator[None]:
        """Serves metrics to Prometheus, if they were asked for."""
        if not self.metrics:
            yield
            return
        from vfl_common.prometheus import exposed, listen_address
        from vfl_party.serve.prometheus import families

        address = listen_address(self.metrics)
        told = partial(families, self.counts, self.ledger)
        with exposed(address, told, lambda: "running") as port:
            self.console.emit("metrics", address=port.address)
            yield


def check_open(settings: ServeSettings) -> None:
    """Raises InputError if HTTP would be open to more than was meant."""
    if (settings.certificate is None) != (settings.key is None):
        raise InputError(Code.CONFIG_INVALID, "serve: give certificate and key, or none of them")
    host = split_address(settings.http)[0]
    if settings.tokens is None and not _is_local(host):
        text = f"serve.http: others can reach {settings.http}, and no token is asked for"
        ways = "set serve.tokens to a file that vfl-party token writes, or take 127.0.0.1"
        raise InputError(Code.CONFIG_INVALID, f"{text}; {ways}")


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(settings: ServeSettings) -> frozenset[str] | None:
    """Returns the names under which callers may reach the port; None: any, since they need a
    token.
    """
    if settings.tokens is not None:
        return None
    return frozenset(("localhost", "127.0.0.1", "[::1]", split_address(settings.http)[0]))


def _http() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Imports the HTTP port. Raises InputError if its packages are missing."""
    try:
        from vfl_party.serve.http.app import make_app
        from vfl_party.serve.http.port import listening as listening_http
        from vfl_party.serve.http.served import Served
    except ImportError as error:
        text = f"serve: FastAPI cannot be imported here ({str(error).splitlines()[0]}); {INSTALL}"
        raise InputError(Code.CONFIG_INVALID, text) from None
    return listening_http, make_app, Served

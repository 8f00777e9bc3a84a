"""Runs a party that serves: the active one answers HTTP, the passive ones answer it."""

from __future__ import annotations

import ipaddress
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_common.ledger import Ledger
from vfl_common.process.logs import Console, log_to
from vfl_common.rpc.channel import listening, split_address
from vfl_common.rpc.health import MAX_CHECKS, Health
from vfl_common.rpc.serving.attendance import Attendance
from vfl_common.rpc.serving.service import MAX_STREAMS, SERVICE, ServingService
from vfl_party.assembly.files import PartyFiles
from vfl_party.predict.prediction import TrainedRun
from vfl_party.serve.answering import Answers, DailyLimit
from vfl_party.serve.batching import Batcher
from vfl_party.serve.counts import Counts
from vfl_party.serve.quality import read_quality
from vfl_party.serve.scorer import OnlineScorer, columns_of
from vfl_party.serve.store import Store, require_served
from vfl_party.serve.tokens import Tokens

# Of an answer; a message of gRPC has at most four.
_ANSWER_BYTES = 2 << 20
# In the party's folder of the run: the log, and the bytes of the last time that it was served.
LOG, BYTES = "serve.jsonl", "serve-bytes.json"
INSTALL = 'pip install "vfl[serve]"'


def serve(files: PartyFiles, trained: TrainedRun, console: Console, source: str | None) -> None:
    """Serves until a signal comes. Raises VflError."""
    log_to(trained.path / LOG, run=trained.run_id, party=files.name)
    settings, ledger = files.file.serve, Ledger()
    store = Store(files, trained, console.show, source)
    require_served(trained, store.held.party)
    most = most_at_once(settings, store)
    store.watch()
    try:
        if files.is_active:
            with ExitStack() as stack:
                stack.enter_context(_active(files, trained, store, ledger, console, most))
                threading.Event().wait()
        else:
            _passive(files, trained, store, ledger, console, most)
    finally:
        store.close()
        ledger.save(trained.path / BYTES)


def most_at_once(settings: ServeSettings, store: Store) -> int:
    """Returns the most rows of a question: its answers must fit into a message."""
    widest = max(store.held.party.widths.values(), default=1)
    return max(1, min(settings.max_batch, _ANSWER_BYTES // (4 * widest)))


def _passive(
    files: PartyFiles,
    trained: TrainedRun,
    store: Store,
    ledger: Ledger,
    console: Console,
    most: int,
) -> None:
    file, recipe = files.file, trained.recipe
    if file.active is None:
        text = f"party {files.name}: set active to the address at which {recipe.active.name} serves"
        raise InputError(Code.CONFIG_INVALID, text)
    limit = None
    if file.serve.answers_a_day is not None:
        path = Path(file.out) / f"answers-{files.name}.sqlite"
        limit = DailyLimit(path, file.serve.answers_a_day)

    def attends(here: bool) -> None:
        console.emit("attending" if here else "away", peer=recipe.active.name)

    console.emit("ready", name=files.name, address=file.active)
    Attendance(
        file.active,
        recipe.active.name,
        files.keyring,
        ledger,
        run_id=trained.run_id,
        digest=recipe.digest(),
        # The active party's own bound may be another one.
        most_ids=max(most, 1024),
        answer=Answers(store, limit),
        attends=attends,
    ).run()


@contextmanager
def _active(
    files: PartyFiles,
    trained: TrainedRun,
    store: Store,
    ledger: Ledger,
    console: Console,
    most: int,
) -> Iterator[str]:
    file, recipe, settings = files.file, trained.recipe, files.file.serve
    listening_http, make_app, served_of = _http()
    check_open(settings)
    tokens = Tokens(Path(settings.tokens) if settings.tokens is not None else None)
    party = store.held.party

    def attends(name: str, here: bool) -> None:
        console.emit("attending" if here else "away", party=name)

    service = ServingService(
        party.widths,
        files.keyring,
        ledger,
        run_id=trained.run_id,
        digest=recipe.digest(),
        attends=attends,
    )
    roster = [each.name for each in recipe.passives]
    health = Health(
        {SERVICE: lambda: True}, files.keyring, may_ask=[files.name, recipe.server, *roster]
    )
    threads = (MAX_STREAMS + MAX_CHECKS) * len(roster) + 2 * MAX_CHECKS + 4
    with ExitStack() as stack:
        _, address = stack.enter_context(
            listening(file.listen, files.keyring, [service, health], threads)
        )
        stack.callback(service.close)
        scorer = OnlineScorer(
            store, service.ask, settings.party_timeout_ms / 1000, read_quality(trained.path.parent)
        )
        batcher = Batcher(scorer.score, most, settings.max_wait_ms / 1000)
        stack.callback(batcher.close)
        one = columns_of(store.held, torch.zeros(1, recipe.task.outputs))
        served = served_of(
            name=recipe.name,
            run_id=trained.run_id,
            columns={name: values.dtype for name, values in one.items()},
            parties=tuple(each.name for each in recipe.parties),
            batcher=batcher,
            tokens=tokens,
            quality=read_quality(trained.path.parent),
            counts=Counts(),
            most_rows=settings.most_rows,
            most_at_once=most,
            present=lambda: service.present,
        )
        app = make_app(served, store.held.columns, _hosts(settings))
        url = stack.enter_context(listening_http(app, settings))
        console.emit("ready", name=files.name, address=address, http=url)
        yield url


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

"""``vfl-server hub``: members, proposals, votes, a queue, and the servers of the runs.

The hub stores signed documents and starts a run's server when all parties have approved the run. It
joins the tunnels of the parties. It never has data, ids, keys of parties, or embeddings.

All state is used in the thread of the asyncio loop, but for ``Tunnels`` and ``RunServer``.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import ssl
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from cryptography import x509
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from vfl.simulation.federation import to_toml
from vfl_common.config.party import TlsSettings
from vfl_common.errors import Code, InputError, PeerError, UnwritableError, VflError
from vfl_common.files import load_or_create_secret, lock_file, raise_file_limit, write_atomic
from vfl_common.http_limits import Patient, limit_bodies
from vfl_common.identity import pem
from vfl_common.identity.credentials import ANSWERS, Members, ends_soon
from vfl_common.identity.keyring import Keyring
from vfl_common.process.logs import Console, log_to, version
from vfl_common.text import clean
from vfl_hub import documents
from vfl_hub.children import Child, is_finished
from vfl_hub.front import Front, RunRoute, Tunnels
from vfl_hub.joining import RENEW_S, make_request, sign_request
from vfl_hub.schedule import ENDED, MOVES_ON, State, choose_next, decide_state, explain
from vfl_hub.store import Store, StoredProposal

log = logging.getLogger(__name__)
# Seconds: a request for news is held; a member without requests counts as connected; a session; a
# run goes on while a party is away.
HOLD_S, PRESENT_S, SESSION_S, ABSENT_S = 20.0, 45.0, 3600.0, 86_400.0
_TICK_S, _GRACE_S = 0.25, 5.0
# Seconds for which a node's signed proof of identity cannot be used again.
_NONCE_S = 2 * documents.CLOCK_S
MAX_OPEN, MAX_SESSIONS, _PAGE_BYTES = 100, 32, 2**22


class JoinRequest(BaseModel):
    """A request to join. ``secret``: that of the token; ``request``: a signing request in PEM;
    ``version``: that of the node.
    """

    secret: str
    request: str
    version: str = ""


class RenewRequest(BaseModel):
    """A member's request to sign its key again. ``request``: a signing request in PEM."""

    request: str


class SyncRequest(BaseModel):
    """A node's news.

    Args:
        cursor: The number of the last event that the node knows.
        slots: The number of runs that the node makes at a time.
        runs: {run: its state and reason at this node}.
        hold: Whether to wait for news.
    """

    cursor: int = 0
    slots: int = 1
    runs: dict[str, tuple[str, str]] = {}
    hold: bool = True


@dataclass
class _Presence:
    seen_s: float
    slots: int = 0
    runs: dict[str, tuple[str, str]] = field(default_factory=dict)
    # The time at which this member reported the failure of a run.
    failed_s: dict[str, float] = field(default_factory=dict)


class RunServer:
    """The server process of a run, which listens on this machine only."""

    def __init__(self, hub: FederationHub, entry: StoredProposal) -> None:
        self.port: int | None = None
        self._hub, folder = hub, hub.folder / "runs" / entry.id[:16]
        recipe = documents.read_proposal(entry.envelope)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "recipe.toml", to_toml(recipe.proposal.recipe))
        pins = hub.store.members()
        tls = hub.tls
        args = [
            "vfl-server",
            "run",
            str(folder / "recipe.toml"),
            *("--listen", "127.0.0.1:0", "--out", str(folder), "--run-id", entry.id[:16]),
            *("--ca", tls.ca, "--certificate", tls.certificate, "--key", tls.key),
        ]
        for party in entry.parties:
            args += ["--pin", f"{party}={pins[party][0]}"]
        self._child = Child(
            hub.name,
            args,
            folder,
            on_event=self._hear,
            on_change=self._change,
            is_finished=partial(is_finished, folder, entry.id[:16], hub.name),
        )

    def _hear(self, event: dict[str, Any]) -> None:
        if event.get("event") == "ready":
            self.port = int(str(event["address"]).rpartition(":")[2])
        self._hub.wake()

    def _change(self) -> None:
        self.port = None
        self._hub.wake()

    @property
    def state(self) -> str:
        """``runs``, ``done`` or ``failed``."""
        return self._child.state

    @property
    def reason(self) -> str:
        """Why it failed."""
        return self._child.reason

    def stop(self) -> None:
        """Ends the process."""
        self._child.stop()


class FederationHub:
    """The hub.

    Args:
        folder: The folder of the hub.
        store: The database.
        tls: The files of the hub's certificate.
        name: The hub's name, which is the server's name in recipes.
        max_runs: The maximum number of runs at a time.
        console: Where events are shown.
    """

    def __init__(
        self,
        folder: Path,
        store: Store,
        tls: TlsSettings,
        name: str,
        max_runs: int,
        console: Console,
    ) -> None:
        self.folder, self.store, self.tls, self.name = folder, store, tls, name
        self._lock_file = (folder / "lock").open("a")
        if not lock_file(self._lock_file, wait=False):
            raise InputError(
                Code.FILE_INVALID, f"{folder}: is in use by another hub. Stop it first."
            )
        self._max_runs, self.console = max_runs, console
        self.keyring = Keyring(tls, name, Members(), uses=ANSWERS)
        self.pin = pem.compute_pin(self.keyring.current().certificate)
        secret = load_or_create_secret(folder / "tunnels.secret", secrets.token_bytes(32))
        self.tunnels = Tunnels(secret, self.find_route, self.wake)
        self._sessions: dict[str, tuple[str, float]] = {}
        self._nonces: dict[str, float] = {}
        self._present: dict[str, _Presence] = {}
        self._servers: dict[str, RunServer] = {}
        self._routes: dict[str, frozenset[str]] = {}
        self._active: dict[str, str] = {}
        self._begun_s = time.monotonic()
        self._loop: asyncio.AbstractEventLoop | None = None
        # {event of a request that waits for news: the member}
        self._waiters: dict[asyncio.Event, str] = {}
        # The number of the last event of which the requests know.
        self._noticed = store.last_event
        self._work = asyncio.Event()
        # Nodes ask for everything again after each start, because the database may be a backup.
        self._epoch = secrets.token_hex(8)

    # Other threads call these methods.

    def wake(self) -> None:
        """Looks at all runs soon, and answers the nodes that wait. Any thread may call it."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._wake)

    def find_route(self, run: str) -> RunRoute | None:
        """Returns the end points of a running run. Any thread may call it."""
        parties, server = self._routes.get(run), self._servers.get(run)
        if parties is None or server is None:
            return None
        return RunRoute(parties, self._active[run], server.port)

    # Only the thread of the loop calls these methods.

    def _wake(self) -> None:
        """Answers only requests of members for whom there is news, because hundreds may wait."""
        self._work.set()
        concerned = self.tunnels.list_asked()
        for entry in self.store.entries(after=self._noticed):
            concerned |= {entry.by, *entry.parties}
            self._noticed = max(self._noticed, entry.changed)
        for waiter, name in self._waiters.items():
            if name in concerned:
                waiter.set()

    async def serve(self) -> None:
        """Advances proposals and runs until it is cancelled."""
        self._loop, last_event = asyncio.get_running_loop(), 0
        while True:
            self._work.clear()
            try:
                # The operator's commands are other processes.
                if self._advance() or self.store.last_event != last_event:
                    last_event = self.store.last_event
                    self._wake()
            except VflError as error:
                # For example a full disk: the nodes wait, and this is tried again.
                log.warning("%s", error)
            except Exception:
                # A defect in one run must not end the others.
                log.exception("a proposal cannot be advanced")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), _TICK_S * 4)

    def stop(self) -> None:
        """Ends the servers of all runs. They go on when the hub starts again."""
        threads = [threading.Thread(target=server.stop) for server in self._servers.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _advance(self) -> bool:
        """Moves each proposal that can change its state. Returns whether something changed."""
        entries, changed = self.store.entries(MOVES_ON), False
        # The operator may have stopped a run, or this process could not advance it.
        running_ids = {entry.id for entry in entries if entry.state == "running"}
        for number in [number for number in self._servers if number not in running_ids]:
            self._drop_server(number)
            changed = True
        for entry in entries:
            if entry.state == "running":
                changed |= self._try(entry, self._watch)
            elif (move := decide_state(entry, time.time())) is not None:
                self._move(entry, *move)
                changed = True
        entries = self.store.entries(("queued", "running")) if changed else entries
        queued = [entry for entry in entries if entry.state == "queued"]
        running = [entry for entry in entries if entry.state == "running"]
        for entry in choose_next(queued, running, self._slots(), self._max_runs):
            self._move(entry, "running")
            self._try(entry, self._begin)
            changed = True
        return changed

    def _try(self, entry: StoredProposal, act: Callable[[StoredProposal], bool]) -> bool:
        """Advances one run. If that is impossible, the run fails, and the others go on."""
        try:
            return act(entry)
        except UnwritableError:
            raise
        except Exception:
            log.exception("run %s cannot be advanced", entry.id[:16])
            self._move(entry, "failed", "the hub cannot run it; its log has the details")
            self._drop_server(entry.id)
            return True

    def _drop_server(self, number: str) -> None:
        self._routes.pop(number, None)
        self._active.pop(number, None)
        for presence in self._present.values():
            presence.failed_s.pop(number, None)
        server = self._servers.pop(number, None)
        if server is not None:
            threading.Thread(target=server.stop, daemon=True).start()

    def _slots(self) -> dict[str, int]:
        now_s = time.monotonic()
        return {
            name: presence.slots
            for name, presence in self._present.items()
            if now_s - presence.seen_s < PRESENT_S
        }

    def _move(self, entry: StoredProposal, state: State, reason: str = "") -> None:
        self.store.move(entry.id, state, clean(reason))
        self.console.emit("run_state", run=entry.id[:16], name=entry.name, state=state, why=reason)

    def _begin(self, entry: StoredProposal) -> bool:
        proposal = documents.read_proposal(entry.envelope)
        self._servers[entry.id] = RunServer(self, entry)
        self._active[entry.id] = proposal.recipe.active.name
        self._routes[entry.id] = frozenset(entry.parties)
        return False

    def _watch(self, entry: StoredProposal) -> bool:
        """Looks at a running run. Returns whether it ended."""
        if entry.id not in self._servers:
            # The hub was started again.
            self._begin(entry)
            return False
        server, now_s = self._servers[entry.id], time.monotonic()
        stopped = [party for party, votes in entry.votes.items() if "stop" in votes]
        reports = {
            party: self._present[party].runs.get(entry.id, ("", ""))
            for party in entry.parties
            if party in self._present
        }
        failed = {party: why for party, (state, why) in reports.items() if state == "failed"}
        for party in failed:
            self._present[party].failed_s.setdefault(entry.id, now_s)
        absent = [
            party
            for party in entry.parties
            if now_s - max(self._get_seen_s(party), self._begun_s) > ABSENT_S
        ]
        late = any(now_s - self._present[party].failed_s[entry.id] > _GRACE_S for party in failed)
        done = all(reports.get(party, ("",))[0] == "done" for party in entry.parties)
        if stopped:
            self._end(entry, "stopped", explain(entry, sorted(stopped)[0], "stop"))
        elif server.state == "failed":
            # The server repeats what a party reported to it.
            self._end(entry, "failed", server.reason)
        elif failed and late:
            party, why = sorted(failed.items())[0]
            self._end(entry, "failed", f"{party}: {why}")
        elif absent:
            self._end(entry, "failed", f"{absent[0]} was away for a day")
        elif server.state == "done" and done:
            self._end(entry, "done", "")
        else:
            return False
        return True

    def _get_seen_s(self, party: str) -> float:
        return self._present[party].seen_s if party in self._present else 0.0

    def _end(self, entry: StoredProposal, state: State, reason: str) -> None:
        self._move(entry, state, reason)
        self._drop_server(entry.id)

    # The requests of members follow.

    def join(self, asked: JoinRequest) -> dict[str, Any]:
        """Stores the request of an invited member. Returns its certificate once it is signed."""
        secret = hashlib.sha256(asked.secret.encode()).hexdigest()
        invite = self.store.find_invite(secret)
        if invite is None or time.time() > invite["until"]:
            raise HTTPException(403, "the token is not known or has expired. Ask for another one")
        if problem := documents.find_version_problem(version(), asked.version):
            raise HTTPException(400, problem)
        try:
            csr = pem.parse_request(asked.request.encode(), Path("request"))
        except InputError as error:
            raise HTTPException(400, clean(str(error))) from None
        if pem.names(csr) != (invite["name"],):
            raise HTTPException(400, f"the token is for {invite['name']} alone")
        if not self.store.set_request(secret, asked.request):
            raise HTTPException(403, "the token was used with another key. Ask for another one")
        invite = self.store.find_invite(secret) or invite
        return {"certificate": invite["certificate"]}

    def open_session(self, value: Any) -> dict[str, Any]:
        """Returns a token for a member that proves its identity."""
        envelope, session = documents.read_session(value)
        member = self.store.members().get(session.name)
        now_s = time.time()
        self._nonces = {key: until for key, until in self._nonces.items() if until > now_s}
        if member is None:
            raise HTTPException(403, f"{session.name} is not a member")
        documents.verify(envelope, session.name, member[0], self.keyring.current())
        if problem := documents.find_version_problem(version(), session.version):
            raise HTTPException(400, problem)
        if session.hub != self.pin or session.nonce in self._nonces:
            raise HTTPException(403, "the proof is for another hub, or was used before")
        if abs(session.at - now_s) > documents.CLOCK_S:
            raise HTTPException(403, f"the clocks differ by {abs(session.at - now_s):.0f} s")
        self._nonces[session.nonce] = now_s + _NONCE_S
        token = secrets.token_hex(32)
        self._sessions = {
            key: item for key, item in self._sessions.items() if item[1] > time.monotonic()
        }
        own = [key for key, (owner, _) in self._sessions.items() if owner == session.name]
        for key in own[:-MAX_SESSIONS]:
            del self._sessions[key]
        self._sessions[token] = (session.name, time.monotonic() + SESSION_S)
        return {"token": token, "echo": self.tunnels.make_echo_token(session.name)}

    def renew(self, name: str, asked: RenewRequest) -> dict[str, Any]:
        """Signs the key of a member again, so that its certificate ends later."""
        pin = self.store.members()[name][0]
        try:
            csr = pem.parse_request(asked.request.encode(), Path("request"))
        except InputError as error:
            raise HTTPException(400, clean(str(error))) from None
        if pem.names(csr) != (name,) or pem.compute_pin(csr) != pin:
            raise HTTPException(403, f"the request is not for the key of {name}")
        certificate = sign_request(Path(self.tls.ca).parent, name, asked.request)
        return {"certificate": certificate.decode()}

    def find_member(self, token: str) -> str:
        """Returns the member of a session. Raises HTTPException."""
        name, until_s = self._sessions.get(token, ("", 0.0))
        if time.monotonic() > until_s or name not in self.store.members():
            raise HTTPException(401, "the session has ended")
        return name

    def take_document(self, name: str, value: Any) -> dict[str, Any]:
        """Stores a proposal or a vote of a member."""
        kind = value.get("payloadType") if isinstance(value, dict) else None
        members, credentials = self.store.members(), self.keyring.current()
        if kind == documents.PROPOSAL:
            read = documents.read_proposal(value)
            documents.verify(read.envelope, name, members[name][0], credentials)
            self._check_proposal(name, read)
            self.store.propose(
                read.id,
                name,
                read.recipe.name,
                read.parties,
                read.envelope.value,
                read.proposal.until,
            )
            self._wake()
            return {"id": read.id}
        envelope, vote = documents.read_vote(value)
        documents.verify(envelope, name, members[name][0], credentials)
        entry = next(iter(self.store.entries(ids=[vote.proposal])), None)
        if entry is None or vote.party != name or name not in (entry.by, *entry.parties):
            raise HTTPException(404, "there is no such proposal of yours")
        if vote.kind != "stop" and name not in entry.parties:
            raise HTTPException(403, f"{name} is not a party of this run")
        if entry.state not in ENDED:
            self.store.vote(entry.id, name, vote.kind, envelope.value)
            self._wake()
        return {"id": entry.id}

    def _check_proposal(self, name: str, read: documents.ReadProposal) -> None:
        members, proposal = self.store.members(), read.proposal
        if proposal.by != name:
            raise HTTPException(403, f"the proposal is {proposal.by}'s")
        if read.recipe.server != self.name:
            raise HTTPException(
                400, f'the recipe\'s server must be {self.name}. Set server = "{self.name}"'
            )
        shared = members[name][1]
        for party in read.parties:
            shared = shared & members[party][1] if party in members else frozenset()
        if not shared:
            raise HTTPException(400, "the parties are not all members of one collaboration")
        if not time.time() < proposal.until < time.time() + 366 * 86400:
            raise HTTPException(400, "until must be within a year from now")
        if sum(entry.by == name for entry in self.store.entries(MOVES_ON)) >= MAX_OPEN:
            raise HTTPException(429, f"{MAX_OPEN} proposals of {name} wait already")

    async def sync(self, name: str, asked: SyncRequest) -> dict[str, Any]:
        """Takes a node's news and returns the hub's, or waits for them."""
        before = self._present.get(name)
        kept_failures = before.failed_s if before is not None else {}
        self._present[name] = _Presence(time.monotonic(), asked.slots, asked.runs, kept_failures)
        if before is None or (before.slots, before.runs) != (asked.slots, asked.runs):
            self._work.set()
        give_up_s = time.monotonic() + (HOLD_S if asked.hold else 0.0)
        waiter = asyncio.Event()
        self._waiters[waiter] = name
        try:
            while True:
                waiter.clear()
                answer = self._collect(name, asked.cursor)
                left_s = give_up_s - time.monotonic()
                if answer["proposals"] or answer["tunnels"] or left_s <= 0:
                    return answer
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(waiter.wait(), left_s)
        finally:
            del self._waiters[waiter]

    def _collect(self, name: str, cursor: int) -> dict[str, Any]:
        members = self.store.members()
        if name not in members:
            raise HTTPException(401, f"{name} is not a member any more")
        # A hub whose database was restored from a backup is behind its nodes.
        last = self.store.last_event
        after = cursor if cursor <= last else -1
        own, size = list[StoredProposal](), 0
        news = self.store.entries(after=after) if after < last else []
        for entry in sorted(news, key=lambda entry: entry.changed):
            if name in (entry.by, *entry.parties):
                own.append(entry)
                size += len(json.dumps(entry.envelope)) + len(json.dumps(entry.votes))
            if size > _PAGE_BYTES:
                # The node asks again from here.
                last = entry.changed
                break
        shared, present = members[name][1], self._slots()
        return {
            "cursor": last,
            "epoch": self._epoch,
            "members": {
                other: {"pin": pin, "connected": other in present}
                for other, (pin, collaborations) in members.items()
                if collaborations & shared
            },
            "proposals": [
                entry.as_json()
                | (
                    {"token": self.tunnels.make_token(entry.id, name)}
                    if name in entry.parties
                    else {}
                )
                for entry in own
            ],
            "tunnels": self.tunnels.take_pending(name),
        }


async def _read_body(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is not JSON") from None


async def _find_member(request: Request) -> str:
    hub: FederationHub = request.app.state.hub
    return hub.find_member(request.headers.get("authorization", "").removeprefix("Bearer "))


def make_application(hub: FederationHub) -> FastAPI:
    """Returns the hub's HTTP application."""

    @contextlib.asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(hub.serve())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    app = FastAPI(title="vfl hub", lifespan=live, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.hub = hub

    limit_bodies(app)

    @app.exception_handler(VflError)
    async def refuse(_: Request, error: VflError) -> JSONResponse:
        is_refusal = isinstance(error, InputError | PeerError)
        # A disk may be full now, and have room later.
        status = 400 if is_refusal and not isinstance(error, UnwritableError) else 503
        return JSONResponse({"detail": clean(str(error))}, status)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"state": "serves"}

    @app.post("/v1/join")
    async def join(asked: JoinRequest) -> dict[str, Any]:
        return hub.join(asked)

    @app.post("/v1/session")
    async def session(value: Annotated[Any, Depends(_read_body)]) -> dict[str, Any]:
        return hub.open_session(value)

    @app.post("/v1/renew")
    async def renew(
        asked: RenewRequest, name: Annotated[str, Depends(_find_member)]
    ) -> dict[str, Any]:
        return hub.renew(name, asked)

    @app.post("/v1/documents")
    async def document(
        value: Annotated[Any, Depends(_read_body)], name: Annotated[str, Depends(_find_member)]
    ) -> dict[str, Any]:
        return hub.take_document(name, value)

    @app.post("/v1/sync")
    async def sync(
        asked: SyncRequest, name: Annotated[str, Depends(_find_member)]
    ) -> dict[str, Any]:
        return await hub.sync(name, asked)

    return app


def serve_hub(
    hub: FederationHub, listen: str, *, behind_gateway: bool, stopped: threading.Event
) -> None:
    """Serves until ``stopped`` is set or a signal arrives."""
    log_to(hub.folder / "log.jsonl", party=hub.name)
    raise_file_limit()
    context = None
    if not behind_gateway:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(hub.tls.certificate, hub.tls.key)
    with tempfile.TemporaryDirectory(prefix="vfl-hub-") as place:
        path = Path(place) / "application"
        # The port is opened first, because a second hub must not advance the runs of the first.
        front = Front(listen, context, path, hub.tunnels)
        config = uvicorn.Config(
            make_application(hub),
            uds=str(path),
            log_config=None,
            lifespan="on",
            access_log=False,
            http=Patient,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, name="application", daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        hub.console.emit("ready", name=hub.name, address=front.address, pin=hub.pin)
        try:
            renewed_s = -RENEW_S
            while not stopped.wait(1.0):
                hub.keyring.warn_of_expiry_daily()
                if time.monotonic() - renewed_s > RENEW_S:
                    renewed_s = time.monotonic()
                    _renew_own(hub, context)
        finally:
            front.close()
            server.should_exit = True
            hub.stop()
            thread.join(5.0)


def _renew_own(hub: FederationHub, context: ssl.SSLContext | None) -> None:
    """Signs the hub's key again if its certificate ends soon. Members know the hub by its key."""
    try:
        credentials = hub.keyring.current()
        if not ends_soon(credentials.certificate, datetime.now(UTC)):
            return
        folder = Path(hub.tls.ca).parent
        content = sign_request(folder, hub.name, make_request(credentials).decode())
        write_atomic(Path(hub.tls.certificate), content.decode())
        if context is not None:
            context.load_cert_chain(hub.tls.certificate, hub.tls.key)
        hub.console.emit("renewed", name=hub.name)
    except (VflError, OSError) as error:
        log.warning("the hub's certificate is not renewed: %s", error)


def sign_member(store: Store, folder: Path, invite: dict[str, Any]) -> str:
    """Signs the request of an invited member. Returns the pin of its key. Raises InputError."""
    content = sign_request(folder, invite["name"], invite["request"])
    pin = pem.compute_pin(x509.load_pem_x509_certificate(content))
    store.admit(invite, content.decode(), pin)
    return pin

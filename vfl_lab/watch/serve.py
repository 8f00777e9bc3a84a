"""Serves the page on 127.0.0.1. Only this module imports FastAPI and uvicorn.

A request needs the token of the link, and a host name of this machine. The guard that checks this
is an ASGI middleware, so a refused request does not reach the application.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from vfl.summary.reading import find_run_folder
from vfl_common.http_limits import Patient
from vfl_common.registry import make_sort_key
from vfl_common.text import to_json
from vfl_lab.watch.run import RunFollower

LOOPBACK = "127.0.0.1"
# The interval between two readings of the files while a browser has the page open.
EVERY_S = 1.0
# The maximum number of simultaneous connections. A browser opens up to six.
MAX_CONNECTIONS = 200
# The interval of comments that keep proxies and browsers from closing a stream without events.
_BEAT_S = 15.0
# The maximum number of digits of a version in the id of an event.
_MAX_DIGITS = 18
# The time after which a browser reconnects to a stream that was interrupted.
_RETRY_MS = 2_000
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}


class Reader:
    """Reads the files of the run while there are viewers, and sends the changes to all of them."""

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        # A random id of this process. A page of an earlier process gets the whole state again.
        self.nonce = secrets.token_hex(4)
        self.viewers = 0
        self.ended = False
        self.failure: BaseException | None = None
        self.failed = asyncio.Event()
        # These locks protect the picture, between coroutines and between threads.
        self._lock, self._thread_lock = asyncio.Lock(), threading.Lock()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def viewing(self) -> AsyncIterator[None]:
        """Counts a viewer for a block. The first viewer starts the readings, and the last ends
        them.
        """
        self.viewers += 1
        try:
            if self._task is None:
                news, self._task = self._news, asyncio.create_task(self._read_repeatedly())
                # The last reading for earlier viewers may be old, so this waits for a new one.
                await news.wait()
            yield
        finally:
            self.viewers -= 1
            if not self.viewers and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _read_repeatedly(self) -> None:
        try:
            while True:
                await self._read()
                await asyncio.sleep(EVERY_S)
        # An unexpected error ends the program.
        except Exception as error:  # noqa: BLE001 - ``Page.serve`` raises it
            self.failure = error
            self.failed.set()

    async def _read(self) -> None:
        async with self._lock:
            await asyncio.to_thread(self._read_in_thread)
        self._notify_viewers()

    def _read_in_thread(self) -> None:
        with self._thread_lock:
            self._picture.read()

    def _get_changes(self, version: int) -> tuple[str, int]:
        with self._thread_lock:
            return self._picture.get_changes(version), self._picture.version

    def _notify_viewers(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def end(self) -> None:
        """Reads the files a last time for the viewers, and ends their streams."""
        self.ended = True
        if self.viewers and self.failure is None:
            await self._read()
        self._notify_viewers()

    async def messages(self, last: str) -> AsyncIterator[str]:
        """Yields server-sent events for a viewer.

        ``last`` is the id of the last event that the viewer received.
        """
        nonce, _, number = last.partition("-")
        is_valid = nonce == self.nonce and number.isdecimal() and len(number) < _MAX_DIGITS
        version = int(number) if is_valid else 0
        yield f"retry: {_RETRY_MS}\n\n"
        async with self.viewing():
            while not self.ended or version < self._picture.version:
                news = self._news
                if version < self._picture.version:
                    async with self._lock:
                        text, version = self._get_changes(version)
                    # The compact JSON has no line breaks, which would end the event.
                    yield f"id: {self.nonce}-{version}\ndata: {text}\n\n"
                    continue
                try:
                    await asyncio.wait_for(news.wait(), _BEAT_S)
                except TimeoutError:
                    yield ": \n\n"
            yield "event: end\ndata: {}\n\n"


def make_application(reader: Reader) -> FastAPI:
    """Makes the FastAPI application, which serves the files of the page and a stream of events."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    folder = files("vfl_lab.watch")
    content = {name: (folder / name).read_bytes() for name in _FILES}

    @app.get("/")
    async def page() -> Response:
        return Response(content["page.html"], media_type=_FILES["page.html"])

    @app.get("/{name}.{kind}")
    async def page_file(name: str, kind: str) -> Response:
        body = content.get(f"{name}.{kind}")
        if body is None:
            return Response(status_code=404)
        return Response(body, media_type=_FILES[f"{name}.{kind}"])

    @app.get("/events")
    async def events(request: Request) -> StreamingResponse:
        last = request.headers.get("last-event-id", "")
        return StreamingResponse(reader.messages(last), media_type="text/event-stream")

    return app


class Page:
    """Serves the page of a run on a listening socket.

    ``link`` is the address of the page with the token.
    """

    def __init__(self, picture: Picture, listening: socket.socket) -> None:
        self._picture, self._socket = picture, listening
        self._token = secrets.token_urlsafe(24)
        self._port = listening.getsockname()[1]
        self.link = f"http://{LOOPBACK}:{self._port}/?{TOKEN}={self._token}"

    def serve(self, until: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Serves the page until a signal, which is then raised.

        ``until`` is called with a function that ends the page, and that any thread may call.
        """
        asyncio.run(self._serve(until))

    async def _serve(self, until: Callable[[Callable[[], None]], None] | None) -> None:
        reader = Reader(self._picture)
        config = uvicorn.Config(
            Guard(make_application(reader), self._token, self._port),
            http=Patient,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=3,
        )
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        server = _Server(config, ended)
        if until is not None:

            def end() -> None:
                loop.call_soon_threadsafe(ended.set)

            until(end)
        ending = asyncio.create_task(_wait_and_end(ended, reader, server))
        try:
            await server.serve(sockets=[self._socket])
        finally:
            ending.cancel()
            with suppress(asyncio.CancelledError):
                await ending
        if reader.failure is not None:
            raise reader.failure


class _Server(uvicorn.Server):
    """A uvicorn server that also ends the streams at a signal."""

    def __init__(self, config: uvicorn.Config, ended: asyncio.Event) -> None:
        super().__init__(config)
        self._ended = ended

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._ended.set()


async def _wait_and_end(ended: asyncio.Event, reader: Reader, server: uvicorn.Server) -> None:
    waiting = [asyncio.create_task(event.wait()) for event in (ended, reader.failed)]
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
    await reader.end()
    server.should_exit = True


def listen(port: int) -> socket.socket:
    """Returns a socket that listens on the loopback interface. Raises OSError."""
    return socket.create_server((LOOPBACK, port), backlog=128)


Message = MutableMapping[str, Any]


Receive = Callable[[], Awaitable[Message]]


Send = Callable[[Message], Awaitable[None]]


App = Callable[[Message, Receive, Send], Awaitable[None]]
# Only these host names are accepted. Other names are a sign of a DNS rebinding attack.
_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
_SITES = frozenset({b"same-origin", b"none"})
# This policy allows no content from other sites, no inline scripts or styles, and no frames.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
# The security headers of every response.
_SECURITY_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
TOKEN = "token"  # noqa: S105 - this is the name of the parameter


class Guard:
    """Passes a request to the application if the request has the token.

    A request with the token in the link is redirected to a link without the token, and gets a
    cookie that contains it. Later requests have the token in the cookie.

    Args:
        app: The application.
        token: The secret, in ASCII characters.
        port: The port of the page. It is part of the cookie's name, because browsers share cookies
            between ports.
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._cookie = f"vfl-watch-{port}"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles one request, as an ASGI application."""
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            # The page has no WebSockets.
            await send({"type": "websocket.close"})
            return
        headers = dict(scope["headers"])
        refusal = _check_request(scope, headers)
        if refusal is not None:
            await _send_text(send, *refusal)
        elif self._has_token_in_link(scope):
            await _answer(send, HTTPStatus.SEE_OTHER, self._make_redirect())
        elif self._has_token_in_cookie(headers):
            await self._app(scope, receive, _with_headers(send))
        else:
            text = "The token is missing or wrong. Open the link that `vfl watch` has printed."
            await _send_text(send, HTTPStatus.FORBIDDEN, text)

    def _has_token_in_link(self, scope: Message) -> bool:
        if scope["path"] != "/":
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=5)
        return any(self._is_token(value) for value in query.get(TOKEN, ()))

    def _has_token_in_cookie(self, headers: Mapping[bytes, bytes]) -> bool:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return self._cookie in cookies and self._is_token(cookies[self._cookie].value)

    def _is_token(self, text: str) -> bool:
        # A comparison in constant time does not leak the token through timing.
        return secrets.compare_digest(text.encode("utf-8", "surrogateescape"), self._token)

    def _make_redirect(self) -> dict[str, str]:
        cookie = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Lax"
        return {"location": "/", "set-cookie": cookie}


def _check_request(scope: Message, headers: Mapping[bytes, bytes]) -> tuple[HTTPStatus, str] | None:
    """Checks host, site and method of a request. Returns status and text of a refusal, or None."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name, _, port = host.rpartition(":")
    if not (host in _HOSTS or (name in _HOSTS and port.isdigit())):
        text = "This page accepts only the hosts 127.0.0.1 and localhost. Open it with one of them."
        return HTTPStatus.MISDIRECTED_REQUEST, text
    # A browser also sends the cookie with requests from pages of other sites or ports.
    site = headers.get(b"sec-fetch-site", b"none")
    if site not in _SITES and scope["path"] != "/":
        return HTTPStatus.FORBIDDEN, "The request comes from another site."
    if scope["method"] not in ("GET", "HEAD"):
        return HTTPStatus.METHOD_NOT_ALLOWED, "This page is read-only."
    return None


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            missing = {
                key: value for key, value in _SECURITY_HEADERS.items() if key.encode() not in names
            }
            message["headers"] = [*message["headers"], *_encode_headers(missing)]
        await send(message)

    return send_with_headers


async def _send_text(send: Send, status: HTTPStatus, text: str) -> None:
    await _answer(send, status, {"content-type": "text/plain; charset=utf-8"}, text)


async def _answer(
    send: Send, status: HTTPStatus, headers: Mapping[str, str], text: str = ""
) -> None:
    body = f"{text}\n".encode() if text else b""
    raw_headers = _encode_headers(
        {**headers, **_SECURITY_HEADERS, "content-length": str(len(body))}
    )
    await send({"type": "http.response.start", "status": status.value, "headers": raw_headers})
    await send({"type": "http.response.body", "body": body})


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


@dataclass
class Picture:
    """The current state of a run, for all viewers. Not thread-safe.

    ``path`` is the folder of a run, the folder of a process in it, or a folder of runs, whose
    newest run is shown. Each reading looks for the run again, because it may begin, vanish or be
    replaced. ``version`` is the number of the last reading that found a change.
    """

    path: Path
    version: int = 0
    _run: RunFollower | None = None
    _state: dict[str, Any] = field(default_factory=dict)
    # The version in which the current run was shown first.
    _begun: int = 0
    _messages: dict[int, str] = field(default_factory=dict)

    def read(self) -> None:
        """Reads the changes of the run's files."""
        version = self.version + 1
        folder = find_run(self.path)
        run = self._run
        if run is not None and (folder != run.folder or run.is_replaced()):
            run = None
        if run is None and folder is not None:
            run = RunFollower(folder)
        is_replaced = run is not self._run
        has_new_lines = run is not None and run.read(version)
        state = run.make_state() if run is not None else self._make_missing_state()
        if not (is_replaced or has_new_lines or state != self._state):
            return
        self._begun = version if is_replaced else self._begun
        self.version, self._run, self._state = version, run, state
        self._messages.clear()

    def _make_missing_state(self) -> dict[str, Any]:
        reason = "there is no run yet" if self.path.is_dir() else "the folder does not exist"
        return {"state": "none", "why": f"{reason}; this page waits for one"}

    def get_changes(self, version: int) -> str:
        """Returns the changes since ``version`` as JSON, for a page. For a new page, with version
        0, this is the whole state.
        """
        if version not in self._messages:
            self._messages[version] = to_json(self._collect_changes(version), compact=True)
        return self._messages[version]

    def _collect_changes(self, version: int) -> dict[str, Any]:
        is_whole = version < self._begun or version == 0
        since = 0 if is_whole else version
        run, changes = self._run, {"version": self.version, "anew": is_whole, "state": self._state}
        if run is None:
            return changes
        log = [line for line_version, line in run.log if line_version > since]
        return changes | {"curves": run.curves.get_changes(since), "log": log}


def find_run(path: Path) -> Path | None:
    """Returns the folder of the run to show for ``path``; None if there is no run yet."""
    if any(path.glob("*/run.json")):
        return path
    if (path / "run.json").is_file():
        return find_run_folder(path)
    try:
        with os.scandir(path) as entries:
            folders = [
                (make_sort_key(entry.name, entry.stat().st_mtime), Path(entry.path))
                for entry in entries
                if entry.is_dir() and not entry.name.startswith(".")
            ]
    except OSError:
        return None
    folders.sort(reverse=True)
    return next((folder for _, folder in folders if any(folder.glob("*/run.json"))), None)

"""The HTTP application: routes, limits and the texts of refusals."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, InputError
from vfl_common.http_limits import Patient
from vfl_common.rpc.channel import check_address, split_address
from vfl_common.text import LINE, clean
from vfl_serve.http import v1, v2
from vfl_serve.scored import Counts
from vfl_serve.served import BUSY, Catalog
from vfl_serve.telling import RequestReporter, RequestTrace, set_current_request
from vfl_serve.tokens import Denied

# Maximum bytes of a request's body.
MAX_BYTES = 4 << 20
# Maximum bytes of a larger body that are read and discarded before the connection closes.
_MAX_DISCARDED = 64 << 20
# Seconds for a whole body to arrive.
_BODY_S = 10.0
# Maximum bytes of the bodies of all current requests. Parsed bodies take several times as much.
MAX_HELD_BYTES = 16 * MAX_BYTES

# The text for each of pydantic's types of errors.
_WORDS = {
    "missing": "is missing",
    "extra_forbidden": "is not a field of a request",
    "list_type": "must be a list",
    "dict_type": "must be an object: a list of values for each column",
    "string_type": "must be text, in quotes",
    "string_unicode": "must be text of valid characters",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "too_short": "must not be empty",
}
_CELL = "must be a number, text, true, false or null"

log = logging.getLogger(__name__)


def make_app(
    models: Catalog[Any], hosts: frozenset[str] | None, reporter: RequestReporter | None = None
) -> ASGIApp:
    """Makes the application.

    Args:
        models: The served models.
        hosts: The host names that requests may contain; None: any. Without tokens, a web page in
            a local browser could otherwise reach this port by another name.
        reporter: Logs each request; None: requests are not logged.
    """
    app = FastAPI(
        # The title must not reveal names of models, which need a token.
        title="Scores by id",
        description="Scores of models that several parties hold together, by id.",
        version=models.first.run_id,
        responses=REFUSALS,
    )
    first = v1.make_routes(models)
    app.include_router(first)
    app.include_router(v2.make_routes(models))
    app.include_router(v1.make_mlflow_routes(models))

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        served = models.first
        presence = {"present": served.present(), "parties": served.parties}
        return {"run": served.run_id, **presence, **served.exactness}

    @app.exception_handler(Denied)
    async def on_denied(_request: Request, why: Denied) -> JSONResponse:
        return _make_refusal(why)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = error.errors()
        texts = describe_faults(faults)[:3]
        # The whole body is invalid: it is not JSON, or the caller does not declare it as JSON.
        if any(fault["loc"] == ("body",) or fault["type"] == "json_invalid" for fault in faults):
            texts = ["give a JSON object, with the header content-type: application/json"]
        return JSONResponse({"error": clean("; ".join(texts), LINE)}, 422)

    @app.exception_handler(HTTPException)
    async def on_http_error(_request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def on_error(_request: Request, _error: Exception) -> JSONResponse:
        # The framework raises the error again, and ``StatusCounter`` logs it.
        return _make_error()

    predict = next(route.endpoint for route in first.routes if isinstance(route, APIRoute))
    fast_path = Direct(app, "/v1/predict", v1.ScoreRequest, predict, _make_refusal)
    limits = RequestLimits(StatusCounter(fast_path, models.counts), models, hosts)
    if reporter is None:
        return limits
    return RequestLog(
        limits, reporter, [path for path in app.openapi()["paths"] if "{" not in path]
    )


class StatusCounter:
    """Counts answers by status and logs internal errors."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app, self._counts = app, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def relay(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._counts.count_answered(status)
            await send(message)

        try:
            await self._app(scope, receive, relay)
        except Exception:
            log.exception("internal error", extra={"event": "failed"})
            if not status:
                await _make_error()(scope, receive, relay)


class RequestLimits:
    """Refuses missing tokens, large or slow bodies, and foreign host names before parsing."""

    def __init__(self, app: ASGIApp, models: Catalog[Any], hosts: frozenset[str] | None) -> None:
        self._app, self._models, self._hosts = app, models, hosts
        # Bytes of the bodies of all current requests.
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        try:
            self._check(scope["method"], headers)
        except Denied as why:
            await self._refuse(send, why)
            return
        # Only POST routes read a body.
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                is_connected = await self._read(receive, body)
            if is_connected:
                body_message = {"type": "http.request", "body": bytes(body), "more_body": False}
                await self._app(scope, replay_message(body_message, receive), send)
        except TimeoutError:
            await self._refuse(send, Denied(408, "the request's body did not arrive in time"))
        except Denied as why:
            await self._refuse(send, why)
        finally:
            self._held_bytes -= len(body)

    def _check(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raises Denied if the method and headers are refused."""
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and _strip_port(host) not in self._hosts:
            raise Denied(421, "this address is not served under that name")
        if method == "POST":
            self._models.allow(headers.get(b"authorization", b"").decode("latin-1"))

    async def _read(self, receive: Receive, body: bytearray) -> bool:
        """Reads a request's body; returns whether the caller is still connected. Raises Denied."""
        is_incomplete = True
        while is_incomplete:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > MAX_BYTES:
                await _discard(receive, message)
                raise Denied(413, f"a request must have at most {MAX_BYTES:,} bytes")
            if self._held_bytes + len(chunk) > MAX_HELD_BYTES:
                raise Denied(503, BUSY)
            body += chunk
            self._held_bytes += len(chunk)
            is_incomplete = message.get("more_body", False)
        return True

    async def _refuse(self, send: Send, why: Denied) -> None:
        self._models.counts.count_answered(why.status)
        answer = _make_refusal(why)
        headers = [*answer.raw_headers, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": why.status, "headers": headers})
        await send({"type": "http.response.body", "body": answer.body})


async def _discard(receive: Receive, message: Message) -> None:
    """Reads and discards the rest of a body: callers read the refusal only after sending it."""
    remaining_bytes = _MAX_DISCARDED
    while remaining_bytes > 0 and message.get("more_body", False):
        message = await receive()
        remaining_bytes -= len(message.get("body", b""))


def _make_refusal(why: Denied) -> JSONResponse:
    headers = {"WWW-Authenticate": "Bearer"} if why.status == 401 else {}
    return JSONResponse({"error": why.why}, why.status, headers)


def _make_error() -> JSONResponse:
    return JSONResponse({"error": "internal error (see the log)"}, 500)


def _strip_port(host: str) -> str:
    """Returns the host name of a Host header, without the port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


@dataclass(frozen=True)
class Direct:
    """A fast path to one POST route, past the framework's routing and validation.

    It saves 0.26 ms of processor time per request, more than a tenth of what a single id takes.
    Requests that are not valid go to ``app``, which has the same route and describes the error.

    Args:
        path: The route's path.
        shape: The model of its body.
        route: Answers a request; it may raise Denied.
        denied: Makes the answer to a denied request.
    """

    app: ASGIApp
    path: str
    shape: type[BaseModel]
    route: Callable[[Any, Request], Awaitable[Response]]
    denied: Callable[[Denied], Response]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._accepts(scope):
            await self.app(scope, receive, send)
            return
        message = await receive()
        body = message.get("body", b"")
        if message.get("more_body", False) or (asked := self._parse(body)) is None:
            await self.app(scope, replay_message(message, receive), send)
            return
        try:
            response = await self.route(asked, Request(scope))
        except Denied as why:
            response = self.denied(why)
        await response(scope, receive, send)

    def _accepts(self, scope: Scope) -> bool:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", self.path):
            return False
        header = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        kind: bytes = header.partition(b";")[0]
        return kind.strip().lower() == b"application/json"

    def _parse(self, body: bytes) -> BaseModel | None:
        try:
            return self.shape.model_validate_json(body)
        except ValidationError:
            return None


def replay_message(message: Message, receive: Receive) -> Receive:
    """Returns a ``Receive`` that first returns ``message``, and then calls ``receive``."""
    delivered = False

    async def receive_again() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return message

    return receive_again


class RequestLog:
    """Reports each request to ``reporter`` when it has ended.

    ``known``: The fixed paths. Other paths are reported as their route, since a caller's path may
    contain an id.
    """

    def __init__(self, app: ASGIApp, reporter: RequestReporter, known: Collection[str]) -> None:
        self._app, self._reporter, self._known = app, reporter, frozenset(known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parent = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        request, status = RequestTrace("http", "", parent), 0
        set_current_request(request)

        async def relay(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, relay)
        finally:
            path = scope["path"]
            chosen = getattr(scope.get("route"), "path", "")
            request.route = (
                f"{_get_method(scope)} {path if path in self._known else chosen}".strip()
            )
            # A request without an answer was aborted by the caller.
            self._reporter.report(request, status or 499)


def _get_method(scope: Scope) -> str:
    """Returns the HTTP method; '' for an unknown method."""
    method: str = scope["method"]
    return method if method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS") else ""


def describe_faults(faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describes each invalid part of a body, from pydantic's errors.

    The sentences do not contain the values, which may be ids.
    """
    texts: dict[str, str] = {}
    for fault in faults:
        path = _make_path(fault["loc"][1:])
        words = _WORDS.get(fault["type"], fault["msg"])
        # Pydantic reports an error for each type that a cell may have.
        if path[:1] == ["columns"] and isinstance(path[-1], int):
            words = _CELL
        texts.setdefault(".".join(map(str, path)), words)
    # An error inside a nested list is more specific than that of the list.
    parents = {path.rpartition(".")[0] for path in texts}
    return [f"{path}: {words}" for path, words in texts.items() if path not in parents]


def _make_path(loc: Sequence[str | int]) -> list[str | int]:
    """Returns an error's location without pydantic's names of types, which follow a list index."""
    path: list[str | int] = []
    was_index = False
    for part in loc:
        if not (was_index and isinstance(part, str)):
            path.append(part)
        was_index = isinstance(part, int)
    return path


class Refusal(BaseModel):
    """The body of a refusal."""

    error: str = Field(description="One sentence: what is wrong, and what to do.")


_REASONS = {
    400: "The request is invalid.",
    401: "The token is missing or has expired.",
    403: "The token is for other models, or the party does not allow as many rows.",
    404: "The model does not exist.",
    408: "The body did not arrive in time.",
    413: "The body is too large, or has too many ids.",
    421: "This machine is not served under that name.",
    422: "The request is invalid.",
    429: "The token's rows of the day are spent.",
    500: "The program has failed; its log says how.",
    503: "Too many requests wait, or the party cannot write its record.",
}
# {HTTP status: its documentation}, for all routes.
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": why} for status, why in _REASONS.items()
}


# Maximum number of connections and of current requests; further ones get status 503.
_MAX_CONNECTIONS = 1_000
# The cipher suites of TLS 1.2: with forward secrecy and authenticated encryption. Some versions of
# uvicorn allow others by default. The suites of TLS 1.3 all have both.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


_CLOSE_S = 10


# Seconds for callers to close their connections, and between two checks.
_LEAVE_S, _POLL_S = 2.0, 0.02


class HttpPort:
    """The running HTTP port. ``url``: its address; ``socket``: its listening socket.

    ``server``: the server of uvicorn. ``leaving``: set once another process takes over.
    """

    def __init__(
        self, url: str, bound: socket.socket, server: uvicorn.Server, leaving: threading.Event
    ) -> None:
        self.url, self.socket = url, bound
        self._server, self._leaving = server, leaving

    def leave(self) -> None:
        """Stops accepting connections; new ones wait in the socket for the next process.

        Existing connections close with the answer to their next request.
        """
        self._leaving.set()
        for server in self._server.servers:
            server.get_loop().call_soon_threadsafe(server.close)
        until_s = time.monotonic() + _LEAVE_S
        while self._server.server_state.connections and time.monotonic() < until_s:
            time.sleep(_POLL_S)


@contextmanager
def listening(
    app: ASGIApp, settings: ServeSettings, inherited: socket.socket | None = None
) -> Iterator[HttpPort]:
    """Serves ``app`` while the block runs. Raises InputError.

    ``inherited``: the listening socket of the process that this one replaces.
    """
    host, _ = split_address(settings.http)
    secure = settings.certificate is not None
    require_certificate(settings)
    bound, leaving = _bind(settings.http, inherited), threading.Event()
    config = uvicorn.Config(
        _close_when_leaving(app, leaving),
        http=Patient,
        ws="none",
        access_log=False,
        log_level="warning",
        log_config=None,
        lifespan="off",
        server_header=False,
        # No code here uses the caller's address.
        proxy_headers=False,
        interface="asgi3",
        limit_concurrency=_MAX_CONNECTIONS,
        timeout_graceful_shutdown=_CLOSE_S,
        h11_max_incomplete_event_size=16 << 10,
        ssl_certfile=settings.certificate,
        ssl_keyfile=settings.key,
        ssl_ciphers=_CIPHERS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([bound],), name="http", daemon=True)
    thread.start()
    address = f"[{host}]" if ":" in host else host
    try:
        url = f"{'https' if secure else 'http'}://{address}:{bound.getsockname()[1]}"
        yield HttpPort(url, bound, server, leaving)
    finally:
        server.should_exit = True
        thread.join(timeout=2 * _CLOSE_S)
        bound.close()


def require_certificate(settings: ServeSettings) -> None:
    """Raises InputError if the certificate and key of HTTPS cannot be used."""
    if settings.certificate is None or settings.key is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.certificate, settings.key)
    except (OSError, ValueError) as error:
        raise InputError(
            Code.CERTIFICATE_INVALID,
            f"serve.certificate, serve.key: cannot use {settings.certificate} and {settings.key} "
            f"({error}). Give a PEM certificate and its key.",
        ) from None


def _bind(address: str, inherited: socket.socket | None) -> socket.socket:
    """Returns a listening socket: the inherited one, unless the address has changed. Raises
    InputError.
    """
    host, port = split_address(address)
    if inherited is not None:
        if port in (0, inherited.getsockname()[1]):
            return inherited
        inherited.close()
    check_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given as TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((host, port))
    # From here on, connections wait in the socket until the server has started.
    bound.listen(_MAX_CONNECTIONS)
    return bound


def _close_when_leaving(app: ASGIApp, leaving: threading.Event) -> ASGIApp:
    """Wraps the application so that its answers close connections once ``leaving`` is set."""

    async def app_closing(scope: Scope, receive: Receive, send: Send) -> None:
        async def relay(message: Message) -> None:
            if leaving.is_set() and message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, relay)

    return app_closing

"""The HTTP application: routes, limits and the words of refusals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vfl_common.text import LINE, clean
from vfl_party.serve.http import mlflow, v1, v2
from vfl_party.serve.http.served import Served
from vfl_party.serve.tokens import Denied

# Of a request's body.
MOST_BYTES = 4 << 20
# For a whole body to arrive.
_BODY_S = 10.0

log = logging.getLogger(__name__)


def make_app(served: Served, id_columns: tuple[str, ...], hosts: frozenset[str] | None) -> ASGIApp:
    """Makes the application.

    Args:
        id_columns: the names of the columns of an id.
        hosts: names by which callers may reach it; None: any. A page in somebody's browser can
            reach this machine by another name, if no token is asked for.
    """
    app = FastAPI(
        title=f"{served.name}",
        description="Scores of a model that several parties hold together, by id.",
        version=served.run_id,
    )
    app.include_router(v1.routes(served))
    app.include_router(v2.routes(served))
    app.include_router(mlflow.routes(served, id_columns))

    @app.get("/healthz")
    async def healthz() -> dict[str, Any]:
        return {"run": served.run_id, "present": served.present(), "parties": served.parties}

    @app.exception_handler(Denied)
    async def denied(_request: Request, why: Denied) -> JSONResponse:
        headers = {"WWW-Authenticate": "Bearer"} if why.status == 401 else {}
        return JSONResponse({"error": why.why}, why.status, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        # What was given may be an id, so the answer does not repeat it.
        faults = error.errors()
        found = [
            f"{'.'.join(str(part) for part in each['loc'][1:])}: {each['msg']}"
            for each in faults[:3]
        ]
        # The body as a whole is none: it is no JSON, or the caller does not say that it is.
        if any(each["loc"] == ("body",) or each["type"] == "json_invalid" for each in faults):
            found = ["give a JSON object, with the header content-type: application/json"]
        return JSONResponse({"error": clean("; ".join(found), LINE)}, 422)

    @app.exception_handler(HTTPException)
    async def refused(_request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.middleware("http")
    async def counted(request: Request, go_on: Callable[[Request], Awaitable[Any]]) -> Any:
        try:
            response = await go_on(request)
        except Exception:
            log.exception("internal error", extra={"event": "failed"})
            response = JSONResponse({"error": "internal error; the log has it"}, 500)
        served.counts.answered(response.status_code)
        return response

    return Limits(app, hosts)


class Limits:
    """Refuses bodies that are too large or too slow, and names that are not this machine's, before
    anything is parsed.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._hosts is not None and _name(host) not in self._hosts:
            await _say(send, 421, "this address is not served under that name")
            return
        try:
            body = await asyncio.wait_for(_body(receive), _BODY_S)
        except TimeoutError:
            await _say(send, 408, "the request's body did not come in time")
            return
        if body is None:
            await _say(send, 413, f"a request has at most {MOST_BYTES:,} bytes")
            return
        given = False

        async def again() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, again, send)


def _name(host: str) -> str:
    """Returns the name of a Host header, without its port."""
    return host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]


async def _body(receive: Receive) -> bytes | None:
    """Returns a request's body; None if it is too large."""
    found, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        found += message.get("body", b"")
        if len(found) > MOST_BYTES:
            return None
        more = message.get("more_body", False)
    return bytes(found)


async def _say(send: Send, status: int, why: str) -> None:
    body = JSONResponse({"error": why}).body
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})

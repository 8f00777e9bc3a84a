"""Reports HTTP requests to the access log and the traces."""

from __future__ import annotations

from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vfl_party.serve.telling.request import RequestTrace, begin
from vfl_party.serve.telling.teller import Teller


class RequestLog:
    """Reports each request when it has ended.

    ``known``: the fixed paths. Other paths are reported as their route, since a path that a caller
    writes may contain an id.
    """

    def __init__(self, app: ASGIApp, teller: Teller, known: Collection[str]) -> None:
        self._app, self._teller, self._known = app, teller, frozenset(known)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        parent = dict(scope["headers"]).get(b"traceparent", b"").decode("latin-1")
        request, status = RequestTrace("http", "", parent), 0
        begin(request)

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
            request.route = f"{_method(scope)} {path if path in self._known else chosen}".strip()
            # Without an answer the caller is gone.
            self._teller.ended(request, status or 499)


def _method(scope: Scope) -> str:
    """Returns the method; '' for one that a caller has made up."""
    method: str = scope["method"]
    return method if method in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS") else ""

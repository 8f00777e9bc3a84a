"""A fast path to one route: the framework's routing takes as long as the scoring of a row."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vfl_party.serve.tokens import Denied


@dataclass(frozen=True)
class Direct:
    """Gives a route what it asks for, if that can be read. Everything else goes to ``app``, which
    has the same route, and words for what is wrong.

    Args:
        path: of the route, whose method is POST.
        shape: of its body.
        route: answers; it may raise Denied.
        denied: the answer to who is denied.
    """

    app: ASGIApp
    path: str
    shape: type[BaseModel]
    route: Callable[[Any, Request], Awaitable[Response]]
    denied: Callable[[Denied], Response]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._is_for_it(scope):
            await self.app(scope, receive, send)
            return
        message = await receive()
        body = message.get("body", b"")
        if message.get("more_body", False) or (asked := self._read(body)) is None:
            await self.app(scope, again(message, receive), send)
            return
        try:
            response = await self.route(asked, Request(scope))
        except Denied as why:
            response = self.denied(why)
        await response(scope, receive, send)

    def _is_for_it(self, scope: Scope) -> bool:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != ("POST", self.path):
            return False
        header = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        kind: bytes = header.partition(b";")[0]
        return kind.strip().lower() == b"application/json"

    def _read(self, body: bytes) -> BaseModel | None:
        try:
            return self.shape.model_validate_json(body)
        except ValidationError:
            return None


def again(message: Message, receive: Receive) -> Receive:
    """Returns what gives a message that was received already, then goes on as ``receive``."""
    delivered = False

    async def receive_again() -> Message:
        nonlocal delivered
        if delivered:
            return await receive()
        delivered = True
        return message

    return receive_again

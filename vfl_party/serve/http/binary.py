"""Tensors as bytes after the JSON of a request: Triton's extension ``binary_tensor_data``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.types import Message, Receive

from vfl_party.serve.tokens import Denied

# How many bytes of a body are JSON.
LENGTH = "inference-header-content-length"
OCTETS = "application/octet-stream"
_REST = "vfl.rest"


class BinaryRoute(APIRoute):
    """A route whose requests may have bytes after their JSON, which ``rest_of`` gives.

    Triton's client does not say that it sends JSON. A page in a browser could do the same with
    somebody else's request, but cannot hide that it is one.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            headers = request.headers
            if (length := headers.get(LENGTH)) is not None:
                request = await _split(request, length)
            elif "content-type" not in headers and "origin" not in headers:
                request = _as_json(request, request.receive)
            return await handle(request)

        return handle_request


async def _split(request: Request, length: str) -> Request:
    """Returns a request with the JSON alone as its body. Raises Denied."""
    body = await request.body()
    if not (length.isascii() and length.isdigit()) or not 0 < int(length[:20]) <= len(body):
        raise Denied(400, f"{LENGTH}: must be the number of JSON bytes of the body")
    head, rest = body[: int(length)], body[int(length) :]

    async def receive() -> Message:
        return {"type": "http.request", "body": head, "more_body": False}

    return _as_json(request, receive, rest)


def _as_json(request: Request, receive: Receive, rest: bytes | None = None) -> Request:
    others = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    headers = [*others, (b"content-type", b"application/json")]
    return Request({**request.scope, "headers": headers, _REST: rest}, receive)


def rest_of(request: Request) -> bytes | None:
    """Returns the bytes after a request's JSON; None if it says of none."""
    rest: bytes | None = request.scope.get(_REST)
    return rest


def cut(rest: bytes | None, sizes: Sequence[Any]) -> list[bytes | None]:
    """Returns the piece of each input, None for one that has its data in the JSON. Raises
    Denied.
    """
    rest = rest or b""
    binary = [size for size in sizes if size is not None]
    if any(type(size) is not int or size < 0 for size in binary) or sum(binary) != len(rest):
        raise Denied(400, "inputs: binary_data_size does not match the bytes after the JSON")
    pieces, at = list[bytes | None](), 0
    for size in sizes:
        pieces.append(None if size is None else rest[at : at + size])
        at += size or 0
    return pieces

"""The Open Inference Protocol, version 2 (kserve/open-inference-protocol), over HTTP: JSON, and
tensors as bytes after it, as Triton's client sends them.

The input ``ids`` has BYTES, [N] or [N, columns of an id]; other inputs, [N], are columns of the
active party. ``vfl_serve.rpc.make_outputs`` makes the outputs. Clients accept no null and JSON
has no NaN, so NaN is the text "NaN", as in protobuf's JSON.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Message, Receive

from vfl_common.rpc.inference import Tensor, fill_missing, raw
from vfl_serve.http.v1 import Cells, Id
from vfl_serve.rpc import (
    EXTENSIONS,
    choose_outputs,
    describe_model,
    make_outputs,
    read_columns,
    read_ids,
    read_min_quality,
)
from vfl_serve.served import Catalog
from vfl_serve.tokens import Denied

_NAN = "NaN"

Parameters = dict[str, Any]
Element = Id | bool | int | float | None
# The header with the number of JSON bytes of a body.
LENGTH = "inference-header-content-length"
OCTETS = "application/octet-stream"
_BINARY_PART = "vfl.rest"


class Input(BaseModel):
    """An input tensor.

    ``data``: flat, row by row, or nested as in ``shape``. None if the data are ``binary_data_size``
    bytes after the JSON.
    """

    model_config = ConfigDict(extra="ignore")

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(max_length=2)]
    datatype: str
    data: Annotated[list[Cells | Element], Field(fail_fast=True)] | None = None
    parameters: Parameters = {}


class Wanted(BaseModel):
    """A requested output; the parameter ``binary_data`` requests bytes."""

    model_config = ConfigDict(extra="ignore")

    name: str
    parameters: Parameters = {}


class Inference(BaseModel):
    """A request for inference. It supports the parameters ``min_quality`` and
    ``binary_data_output``.
    """

    model_config = ConfigDict(extra="ignore")

    id: Id | None = None
    inputs: Annotated[list[Input], Field(min_length=1, max_length=1000)]
    outputs: Annotated[list[Wanted], Field(max_length=1000)] | None = None
    parameters: Parameters = {}


def make_routes(models: Catalog[Any]) -> APIRouter:
    """Makes the routes of ``/v2``."""
    router = APIRouter(prefix="/v2", route_class=BinaryRoute)

    @router.get("")
    async def server() -> dict[str, Any]:
        from vfl_common.process.logs import version

        return {"name": "vfl", "version": version(), "extensions": EXTENSIONS}

    @router.get("/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @router.get("/health/ready")
    async def ready() -> JSONResponse:
        # Testing the disk must not block other requests.
        is_ready = await asyncio.to_thread(models.ready)
        # The specification's text and its example name different fields, so the answer has both.
        return JSONResponse({"ready": is_ready, "live": True}, 200 if is_ready else 503)

    @router.get("/models/{name}/ready")
    @router.get("/models/{name}/versions/{run}/ready")
    async def model_ready(request: Request, name: str, run: str | None = None) -> dict[str, Any]:
        served, _ = models.open(request.headers.get("authorization"), name, run)
        return {"name": served.name, "ready": True}

    @router.get("/models/{name}")
    @router.get("/models/{name}/versions/{run}")
    async def model(request: Request, name: str, run: str | None = None) -> dict[str, Any]:
        served, _ = models.open(request.headers.get("authorization"), name, run)
        inputs, outputs = describe_model(served.columns, served.parties)
        return {
            "name": served.name,
            "versions": models.versions(served),
            "platform": "vfl",
            "inputs": [_describe_tensor(tensor) for tensor in inputs],
            "outputs": [_describe_tensor(tensor) for tensor in outputs],
        }

    @router.post("/models/{name}/infer", response_model=None)
    @router.post("/models/{name}/versions/{run}/infer", response_model=None)
    async def infer(
        asked: Inference, request: Request, name: str, run: str | None = None
    ) -> Response:
        served, token = models.open(request.headers.get("authorization"), name, run)
        inputs = read_inputs(asked, get_binary_part(request))
        ids = read_ids(inputs)
        columns = read_columns(inputs, len(ids))
        scores = await served.score(ids, token, read_min_quality(asked.parameters), columns)
        requested_outputs = asked.outputs or []
        outputs = choose_outputs(
            make_outputs(scores, served.parties), [output.name for output in requested_outputs]
        )
        answer: dict[str, Any] = {"model_name": served.name, "model_version": served.run_id}
        if asked.id is not None:
            answer["id"] = asked.id
        every = asked.parameters.get("binary_data_output") is True
        as_bytes = {
            output.name
            for output in requested_outputs
            if output.parameters.get("binary_data", every) is True
        }
        if every and not requested_outputs:
            as_bytes = {output.name for output in outputs}
        return _make_response(answer, outputs, as_bytes)

    return router


def read_inputs(asked: Inference, rest: bytes | None) -> list[Tensor]:
    """Returns the input tensors of a request. ``rest``: the bytes after its JSON. Raises Denied."""
    sizes = [tensor.parameters.get("binary_data_size") for tensor in asked.inputs]
    pieces = cut_pieces(rest, sizes)
    tensors = []
    for tensor, piece in zip(asked.inputs, pieces, strict=True):
        data: list[Any] | bytes | None = piece if piece is not None else tensor.data
        if data is None:
            raise Denied(400, f"inputs: {tensor.name}: give data")
        if isinstance(data, list) and any(isinstance(cell, list) for cell in data):
            data = [one for cell in data for one in (cell if isinstance(cell, list) else [cell])]
        tensors.append(Tensor(tensor.name, tensor.datatype, tensor.shape, data))
    return tensors


def _describe_tensor(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}


def _make_response(answer: dict[str, Any], outputs: list[Tensor], as_bytes: set[str]) -> Response:
    """Makes the response: JSON, followed by the outputs that were requested as bytes."""
    pieces, facts = [], []
    for output in outputs:
        fields = _describe_tensor(output)
        if output.name in as_bytes:
            pieces.append(raw(output))
            fields["parameters"] = {"binary_data_size": len(pieces[-1])}
        else:
            fields["data"] = [_NAN if value != value else value for value in fill_missing(output)]
        facts.append(fields)
    answer["outputs"] = facts
    if not pieces:
        return JSONResponse(answer)
    head = json.dumps(answer, separators=(",", ":"), allow_nan=False).encode()
    return Response(b"".join((head, *pieces)), media_type=OCTETS, headers={LENGTH: str(len(head))})


class BinaryRoute(APIRoute):
    """A route whose requests may have bytes after their JSON; see ``get_binary_part``.

    Triton's client sends no content type, so its requests count as JSON. Requests of web pages,
    which have the header ``origin``, do not.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_request(request: Request) -> Response:
            headers = request.headers
            if (length := headers.get(LENGTH)) is not None:
                request = await _split_body(request, length)
            elif "content-type" not in headers and "origin" not in headers:
                request = _as_json(request, request.receive)
            return await handle(request)

        return handle_request


async def _split_body(request: Request, length: str) -> Request:
    """Returns a request whose body is only the JSON. Raises Denied."""
    body = await request.body()
    if not (length.isascii() and length.isdigit()) or not 0 < int(length[:20]) <= len(body):
        raise Denied(400, f"{LENGTH}: must be the number of JSON bytes of the body")
    head, binary_part = body[: int(length)], body[int(length) :]

    async def receive() -> Message:
        return {"type": "http.request", "body": head, "more_body": False}

    return _as_json(request, receive, binary_part)


def _as_json(request: Request, receive: Receive, rest: bytes | None = None) -> Request:
    other_headers = [
        (name, value) for name, value in request.scope["headers"] if name != b"content-type"
    ]
    headers = [*other_headers, (b"content-type", b"application/json")]
    return Request({**request.scope, "headers": headers, _BINARY_PART: rest}, receive)


def get_binary_part(request: Request) -> bytes | None:
    """Returns the bytes after a request's JSON; None if it has no binary part."""
    rest: bytes | None = request.scope.get(_BINARY_PART)
    return rest


def cut_pieces(rest: bytes | None, sizes: Sequence[Any]) -> list[bytes | None]:
    """Cuts the bytes after the JSON into inputs of ``sizes`` bytes. Raises Denied.

    Inputs whose size is None have their data in the JSON and get None.
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

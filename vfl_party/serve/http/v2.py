"""The Open Inference Protocol, version 2 (kserve/open-inference-protocol), over HTTP and JSON.

The input ``ids`` has BYTES, [N] or [N, columns of an id]; other inputs, [N], are columns of the
active party. The outputs are the columns of a result, ``state``, ``parties`` (names with commas
between them) and ``run`` as BYTES, and ``expected_quality``. NaN is no JSON, so a number that is
missing is null there.
"""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from vfl_party.serve.http.catalog import Catalog
from vfl_party.serve.http.v1 import Cells, Id, one_text
from vfl_party.serve.scored import Scores
from vfl_party.serve.tokens import Denied

_EXTENSIONS: list[str] = []
_TEXT, _NUMBER = "BYTES", "FP64"
_WORDS = frozenset(("state", "parties", "run"))


class Tensor(BaseModel):
    """An input. ``data``: flat, row by row, or nested as ``shape`` says."""

    model_config = ConfigDict(extra="ignore")

    name: str
    shape: Annotated[list[Annotated[int, Field(ge=0, le=2**31)]], Field(max_length=2)]
    datatype: str
    data: Annotated[list[Id | Cells | bool | int | float | None], Field(fail_fast=True)]


class Wanted(BaseModel):
    """An output that is wanted."""

    model_config = ConfigDict(extra="ignore")

    name: str


class Inference(BaseModel):
    """A request for inference. Of its parameters, ``min_quality`` is known."""

    model_config = ConfigDict(extra="ignore")

    id: Id | None = None
    inputs: Annotated[list[Tensor], Field(min_length=1, max_length=16)]
    outputs: Annotated[list[Wanted], Field(max_length=1000)] | None = None
    parameters: dict[str, Any] = {}


def routes(models: Catalog[Any]) -> APIRouter:
    """Makes the routes of ``/v2``."""
    found = APIRouter(prefix="/v2")

    @found.get("")
    async def server() -> dict[str, Any]:
        from vfl_common.process.logs import version

        return {"name": "vfl", "version": version(), "extensions": _EXTENSIONS}

    @found.get("/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @found.get("/health/ready")
    async def ready() -> dict[str, bool]:
        # The specification's example names it so, and its text otherwise.
        return {"ready": True, "live": True}

    @found.get("/models/{name}/ready")
    @found.get("/models/{name}/versions/{run}/ready")
    async def model_ready(request: Request, name: str, run: str | None = None) -> dict[str, Any]:
        served, _ = models.open(request.headers.get("authorization"), name, run)
        return {"name": served.name, "ready": True}

    @found.get("/models/{name}")
    @found.get("/models/{name}/versions/{run}")
    async def model(request: Request, name: str, run: str | None = None) -> dict[str, Any]:
        served, _ = models.open(request.headers.get("authorization"), name, run)
        outputs = [
            {"name": each, "datatype": _datatype(dtype), "shape": [-1]}
            for each, dtype in served.columns.items()
        ]
        outputs += [{"name": each, "datatype": _TEXT, "shape": [-1]} for each in sorted(_WORDS)]
        outputs.append({"name": "expected_quality", "datatype": _NUMBER, "shape": [-1]})
        return {
            "name": served.name,
            "versions": models.versions(served),
            "platform": "vfl",
            "inputs": [{"name": "ids", "datatype": _TEXT, "shape": [-1]}],
            "outputs": outputs,
        }

    @found.post("/models/{name}/infer", response_model=None)
    @found.post("/models/{name}/versions/{run}/infer", response_model=None)
    async def infer(
        asked: Inference, request: Request, name: str, run: str | None = None
    ) -> JSONResponse:
        served, token = models.open(request.headers.get("authorization"), name, run)
        scores = await served.score(_ids(asked), token, _least(asked), _columns(asked))
        outputs = outputs_of(scores)
        if asked.outputs is not None:
            known = {each["name"]: each for each in outputs}
            missing = [each.name for each in asked.outputs if each.name not in known]
            if missing:
                raise Denied(400, f"outputs: there are {', '.join(known)}")
            outputs = [known[each.name] for each in asked.outputs]
        answer: dict[str, Any] = {
            "model_name": served.name,
            "model_version": served.run_id,
            "outputs": outputs,
        }
        return JSONResponse(answer | ({"id": asked.id} if asked.id is not None else {}))

    return found


def _ids(asked: Inference) -> list[str]:
    """Returns the ids of a request. Raises Denied."""
    names = [each.name for each in asked.inputs]
    if names.count("ids") != 1 or len(set(names)) != len(names):
        raise Denied(400, "inputs: give the input ids, and each other one once")
    tensor = asked.inputs[names.index("ids")]
    flat = [cell for each in tensor.data for cell in (each if isinstance(each, list) else [each])]
    texts = [cell for cell in flat if isinstance(cell, str)]
    if tensor.datatype != _TEXT or len(texts) != len(flat):
        raise Denied(400, "inputs: ids: datatype must be BYTES")
    rows, *columns = tensor.shape or [0]
    per = columns[0] if columns else 1
    if rows * per != len(flat) or per < 1:
        raise Denied(400, "inputs: ids: shape and data do not fit each other")
    return [one_text(texts[at * per : (at + 1) * per]) for at in range(rows)]


def _columns(asked: Inference) -> dict[str, list[Any]] | None:
    """Returns the active party's columns, if the request has inputs beside ``ids``."""
    found = {each.name: list(each.data) for each in asked.inputs if each.name != "ids"}
    return found or None


def _least(asked: Inference) -> float | None:
    found = asked.parameters.get("min_quality")
    if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
        raise Denied(400, "parameters: min_quality must be a number")
    return found


def _datatype(dtype: np.dtype[Any]) -> str:
    if np.issubdtype(dtype, np.integer):
        return "INT64"
    return _NUMBER if np.issubdtype(dtype, np.floating) else _TEXT


def outputs_of(scores: Scores) -> list[dict[str, Any]]:
    """Returns the outputs of a response."""
    n, has_score, numbers = len(scores), scores.has_score, scores.of_part.tolist()

    def output(name: str, datatype: str, data: list[Any]) -> dict[str, Any]:
        return {"name": name, "shape": [n], "datatype": datatype, "data": data}

    found = []
    for name, values in scores.columns.items():
        datatype = _datatype(values.dtype)
        missing = "" if datatype == _TEXT else None
        given = [
            value if has else missing for value, has in zip(values.tolist(), has_score, strict=True)
        ]
        found.append(output(name, datatype, given))
    parties = [",".join(part.parties) for part in scores.parts]
    runs = [part.run for part in scores.parts]
    quality = [part.quality for part in scores.parts]
    return [
        *found,
        output("state", _TEXT, list(scores.state)),
        output("parties", _TEXT, [parties[number] for number in numbers]),
        output("run", _TEXT, [runs[number] for number in numbers]),
        output("expected_quality", _NUMBER, [quality[number] for number in numbers]),
    ]

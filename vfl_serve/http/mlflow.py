"""The scoring protocol of MLflow's model server: ``/invocations``, ``/ping`` and ``/version``.

The column ``id`` contains the ids. The cells of an id of several columns are joined in order.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from vfl_common.process.logs import version
from vfl_serve.http.catalog import Catalog
from vfl_serve.http.v1 import join_id, make_rows
from vfl_serve.tokens import Denied

T = TypeVar("T")
# Validation stops at the first invalid item.
Items = Annotated[list[T], Field(fail_fast=True)]


class DataFrameSplit(BaseModel):
    """A data frame in the format of ``orient="split"``."""

    model_config = ConfigDict(extra="ignore")

    columns: Items[str]
    data: Items[list[Any]]


class Invocation(BaseModel):
    """A request in one of the formats of MLflow's scoring protocol."""

    model_config = ConfigDict(extra="ignore")

    dataframe_split: DataFrameSplit | None = None
    dataframe_records: Items[dict[str, Any]] | None = None
    inputs: Items[str] | dict[str, Items[str]] | None = None
    instances: Items[str] | Items[dict[str, Any]] | None = None


def make_routes(models: Catalog[Any]) -> APIRouter:
    """Makes the routes."""
    router = APIRouter()

    @router.get("/ping")
    async def ping() -> dict[str, str]:
        return {"status": "ok"}

    @router.get("/version", response_class=PlainTextResponse)
    async def of_package() -> PlainTextResponse:
        # MLflow's server returns its own version here.
        return PlainTextResponse(version())

    @router.post("/invocations", response_model=None)
    async def invocations(
        asked: Invocation, request: Request, model: str | None = None
    ) -> JSONResponse:
        served, token = models.open(request.headers.get("authorization"), model)
        ids = [join_id(row) for row in read_cells(asked, served.id_columns)]
        scores = await served.score(ids, token)
        return JSONResponse({"predictions": make_rows(list(ids), scores)})

    return router


def read_cells(asked: Invocation, names: tuple[str, ...]) -> list[list[str]]:
    """Returns the cells of each id. Raises Denied."""
    if asked.dataframe_split is not None:
        split = asked.dataframe_split
        records = [dict(zip(split.columns, row, strict=False)) for row in split.data]
    elif asked.dataframe_records is not None:
        records = asked.dataframe_records
    elif isinstance(asked.inputs, dict):
        lists = asked.inputs
        n = len(next(iter(lists.values()), []))
        if any(len(values) != n for values in lists.values()):
            raise Denied(400, "inputs: columns must have the same length")
        records = [{name: lists[name][at] for name in lists} for at in range(n)]
    else:
        rows = asked.inputs if asked.inputs is not None else asked.instances
        if rows is None:
            raise Denied(400, "give dataframe_split, dataframe_records, inputs or instances")
        records = [row if isinstance(row, dict) else {names[0]: row} for row in rows]
    if any(not set(names) <= set(record) for record in records):
        raise Denied(400, f"each row needs the column {', '.join(names)}")
    return [[_to_text(record[name]) for name in names] for record in records]


def _to_text(value: Any) -> str:
    """Returns a cell as text. Raises Denied for 7.0, NaN and null, whose text may be another
    row's id.
    """
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise Denied(422, "an id must be text or a whole number; write others as text")
    return str(value)

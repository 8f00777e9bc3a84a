"""``POST /v1/predict``: returns a row for each id."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from vfl_common.process.logs import version
from vfl_serve.scored import ServedScores
from vfl_serve.served import Catalog
from vfl_serve.store import LONGEST_ID
from vfl_serve.tokens import Denied

Id = Annotated[str, Field(max_length=LONGEST_ID)]
# Validation stops at the first invalid item.
Cells = Annotated[list[Id], Field(fail_fast=True)]
Values = Annotated[list[bool | int | float | str | None], Field(fail_fast=True)]


class ScoreRequest(BaseModel):
    """Ids to score. An id of several columns is a list of their cells."""

    model_config = ConfigDict(extra="forbid")

    ids: Annotated[list[Id | Cells], Field(min_length=1, fail_fast=True)]
    columns: dict[str, Values] | None = Field(
        None,
        description="The active party's columns of these rows, in place of those of its table.",
    )
    min_quality: float | None = Field(
        None,
        strict=True,
        allow_inf_nan=False,
        description="Refuse a row if the parties that know it give less quality than this.",
    )
    model: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="The model's name; needed if several are served."
    )
    version: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="The id of one of the model's runs, in place of the one that answers now."
    )


class Row(BaseModel):
    """One row. It also has the columns of the result, such as ``score_1`` and ``class``."""

    model_config = ConfigDict(extra="allow")

    id: str | list[str]
    state: str = Field(
        description="scored, partly, unknown, refused, failed, incomplete or unmeasured"
    )
    parties: list[str] = Field(description="The parties that took part.")
    missing: dict[str, str] = Field(description="The parties that did not, and why.")
    expected_quality: float | None = Field(
        description="What was measured of the model with these parties."
    )
    run: str = Field(description="The run that scores the row.")


class Answer(BaseModel):
    """A row for each id, in order."""

    model: str
    run: str
    metric: str | None = Field(description="The metric of expected_quality.")
    rows: list[Row]


class VersionAnswer(BaseModel):
    """A run of a model."""

    run: str
    present: list[str] = Field(description="The passive parties that serve it now.")
    exact: bool = Field(
        description="Whether this party's models give a row the bits of a prediction, whichever "
        "rows are asked for with it."
    )
    why_inexact: str | None = Field(description="Why they do not.")


class Listed(BaseModel):
    """A model that is served."""

    name: str
    run: str = Field(description="The run that answers.")
    waits: str | None = Field(description="The run that answers next, once all parties serve it.")
    versions: list[VersionAnswer]


class ModelsAnswer(BaseModel):
    """The models that the caller may ask."""

    models: list[Listed]


def make_routes(models: Catalog[Any]) -> APIRouter:
    """Makes the routes of ``/v1``."""
    router = APIRouter(prefix="/v1")

    @router.post("/predict", response_model=None, responses={200: {"model": Answer}})
    async def predict(asked: ScoreRequest, request: Request) -> JSONResponse:
        header = request.headers.get("authorization")
        served, token = models.open(header, asked.model, asked.version)
        ids = [join_id(name) for name in asked.ids]
        scores = await served.score(ids, token, asked.min_quality, asked.columns)
        answer = {
            "model": served.name,
            "run": served.run_id,
            "metric": served.quality.metric or None,
            "rows": make_rows(asked.ids, scores),
        }
        return JSONResponse(answer)

    @router.get("/models", response_model=None, responses={200: {"model": ModelsAnswer}})
    async def listed(request: Request) -> JSONResponse:
        return JSONResponse({"models": models.list_models(request.headers.get("authorization"))})

    return router


def join_id(cells: str | list[str]) -> str:
    """Returns an id as one text: its cells with ``SEPARATOR`` between them."""
    from vfl_party.data.id_rules import SEPARATOR

    return cells if isinstance(cells, str) else SEPARATOR.join(cells)


def make_rows(ids: list[str | list[str]], scores: ServedScores) -> list[dict[str, Any]]:
    """Returns the rows as JSON objects. Rows without a score have null in all result columns."""
    columns = {name: values.tolist() for name, values in scores.columns.items()}
    common = [
        {
            "parties": list(part.parties),
            "missing": dict(part.missing),
            "expected_quality": part.quality,
            "run": part.run,
        }
        for part in scores.parts
    ]
    numbers, has_score = scores.part_numbers.tolist(), scores.has_score
    return [
        {
            "id": row_id,
            "state": scores.state[at],
            **{name: values[at] if has_score[at] else None for name, values in columns.items()},
            **common[numbers[at]],
        }
        for at, row_id in enumerate(ids)
    ]


T = TypeVar("T")


# Validation stops at the first invalid item.
Items = Annotated[list[T], Field(fail_fast=True)]


# The scoring protocol of MLflow's model server: ``/invocations``, ``/ping`` and ``/version``.
#
# The column ``id`` contains the ids. The cells of an id of several columns are joined in order.
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


def make_mlflow_routes(models: Catalog[Any]) -> APIRouter:
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

"""``POST /v1/predict``: returns a row for each id."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from vfl_serve.http.catalog import Catalog
from vfl_serve.scored import ServedScores
from vfl_serve.store import LONGEST_ID

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

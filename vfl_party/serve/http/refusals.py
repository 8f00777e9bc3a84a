"""What the HTTP port says that it may refuse, in its OpenAPI page."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Refusal(BaseModel):
    """Why a request gets no answer."""

    error: str = Field(description="One sentence: what is wrong, and what to do.")


_WHY = {
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
# By status, for all routes.
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": Refusal, "description": why} for status, why in _WHY.items()
}

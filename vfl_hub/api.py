"""The REST API of a node, for its own people. The commands and the console use only this."""

from __future__ import annotations

import hmac
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from vfl_common.config.policy import Pin
from vfl_common.errors import LostError, VflError
from vfl_common.http_limits import limit_bodies
from vfl_common.process.logs import version
from vfl_common.text import clean
from vfl_hub.console import LOCAL_OWNER, Sessions, make_console
from vfl_hub.node import DEFAULT_DAYS, Node


class NewProposal(BaseModel):
    """A recipe to propose.

    Args:
        recipe: The tables of the recipe.
        data: {party: the name of its data set}.
        purpose: The purpose, for the people who approve it.
        days: The number of days in which the run may begin.
    """

    recipe: dict[str, Any]
    data: dict[str, str]
    purpose: str = ""
    days: float = DEFAULT_DAYS


class Reason(BaseModel):
    """Why a proposal is denied or a run stopped."""

    why: str = ""


class Trust(BaseModel):
    """The new pin of a member's key."""

    pin: Pin


def make_api(node: Node, token: str, console: Sessions | None = None) -> FastAPI:
    """Returns the application.

    ``token``: The token that requests must have. ``console``: The sessions of the console, or None
    to serve no console.
    """

    def check(request: Request) -> None:
        presented = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(presented.encode(), token.encode()):
            raise HTTPException(401, "the token is wrong")

    app = FastAPI(
        title="vfl node",
        version=version(),
        docs_url=None,
        redoc_url=None,
    )

    limit_bodies(app)
    api = APIRouter(dependencies=[Depends(check)])

    @app.exception_handler(VflError)
    def refuse(_: Request, error: VflError) -> JSONResponse:
        status = 503 if isinstance(error, LostError) else 400
        return JSONResponse({"detail": str(error), "exit_code": error.exit_code}, status)

    @api.get("/v1/status")
    def status() -> dict[str, Any]:
        """Who this node is, and whether the hub answers."""
        return node.describe()

    @api.get("/v1/members")
    def members() -> dict[str, Any]:
        """The members of this node's collaborations, with the pins that this node knows."""
        return node.list_members()

    @api.post("/v1/members/{name}/trust")
    def trust(name: str, new: Trust) -> dict[str, str]:
        """Replaces the known key of a member."""
        do = partial(node.trust, name, new.pin)
        node.decide(LOCAL_OWNER, "owner", "trust", f"{name} {new.pin}", do)
        return {"name": name}

    @api.get("/v1/proposals")
    def proposals() -> list[dict[str, Any]]:
        """All proposals of which this member is a party or the proposer, the newest first."""
        return node.list_proposals()

    @api.post("/v1/proposals")
    def propose(new: NewProposal) -> dict[str, str]:
        """Proposes a run."""
        return {"id": node.propose(new.recipe, new.data, new.purpose, new.days)}

    @api.get("/v1/proposals/{number}")
    def proposal(number: str) -> dict[str, Any]:
        """One proposal, with its recipe."""
        whole = node.find(number)
        (row,) = node.list_proposals(whole)
        return {**row, "recipe": node.read_recipe(whole)}

    @api.post("/v1/proposals/{number}/approve")
    def approve(number: str) -> dict[str, str]:
        """Approves a proposal."""
        whole = node.find(number)
        node.decide(LOCAL_OWNER, "owner", "approve", whole, partial(node.approve, whole))
        return {"id": whole}

    @api.post("/v1/proposals/{number}/{kind}")
    def vote(number: str, kind: Literal["deny", "stop"], reason: Reason) -> dict[str, str]:
        """Denies a proposal, or stops its run."""
        whole = node.find(number)
        do = partial(node.vote, whole, kind, clean(reason.why))
        node.decide(LOCAL_OWNER, "owner", kind, whole, do)
        return {"id": whole}

    @api.get("/v1/proposals/{number}/preview")
    def preview(number: str) -> dict[str, Any]:
        """What the run would send, as ``vfl-party check`` prints it for this member's data."""
        text, is_ready = node.preview(node.find(number))
        return {"text": text, "ready": is_ready}

    @api.get("/v1/proposals/{number}/progress")
    def progress(number: str) -> dict[str, Any]:
        """The rounds, bytes and metrics of a run so far, as this party's files have them."""
        return node.read_progress(node.find(number))

    @api.get("/v1/proposals/{number}/report")
    def report(number: str) -> dict[str, str]:
        """The page that ``vfl report`` has made of a run; '' if there is none."""
        path = node.find_report(node.find(number))
        return {"html": path.read_text() if path else ""}

    @api.get("/v1/data/{name}")
    def data(name: str) -> dict[str, Any]:
        """The policy of a data set, and what each peer has received in all runs of this node."""
        return node.describe_data(name)

    @api.get("/v1/proposals/{number}/log")
    def read_log(number: str) -> dict[str, str]:
        """The end of this party's log of a run, as JSON lines."""
        return {"log": node.read_log(node.find(number))}

    app.include_router(api)
    if console is not None:
        app.include_router(make_console(node, console))
    return app

"""The console: pages of a node for its own people, rendered here and without scripts.

It can do what the REST API can do. A person signs in with the node's token. The cookie is not sent
by other sites, and each form has a token of its session.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import deque
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from vfl.simulation.federation import to_toml
from vfl_common.errors import VflError
from vfl_common.process.logs import format_line
from vfl_common.text import LINE, clean
from vfl_hub.node import Node

COOKIE, SESSION_S = "vfl_console", 8 * 3600.0
# A person may mistype the token this often in a minute.
MAX_TRIES, _TRY_S = 10, 60.0
_MAX_FORM, _REFRESH_S = 4096, 10
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_PAGES = Environment(
    loader=PackageLoader("vfl_hub"), autoescape=select_autoescape(), undefined=StrictUndefined
)


class Sessions:
    """The people who have signed in.

    Args:
        token: The node's token.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._secrets: dict[str, float] = {}
        self._failures: deque[float] = deque(maxlen=MAX_TRIES)

    def sign_in(self, token: str) -> str | None:
        """Returns a new session, or None if the token is wrong. Raises HTTPException (429)."""
        now_s = time.monotonic()
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            # The right token always works, so that nobody can lock people out.
            if len(self._failures) == MAX_TRIES and now_s - self._failures[0] < _TRY_S:
                raise HTTPException(429, "too many wrong tokens; try again in a minute")
            self._failures.append(now_s)
            return None
        self._secrets = {key: until for key, until in self._secrets.items() if until > now_s}
        session = secrets.token_hex(32)
        self._secrets[session] = now_s + SESSION_S
        return session

    def is_open(self, session: str) -> bool:
        """Returns whether a session goes on."""
        return time.monotonic() < self._secrets.get(session, 0.0)

    def make_form_token(self, session: str) -> str:
        """Returns the token that the forms of a session have."""
        return hmac.new(self._token.encode(), session.encode(), "sha256").hexdigest()


def make_console(node: Node, token: str) -> APIRouter:
    """Returns the routes of the console. ``token``: The node's token."""
    router, sessions = APIRouter(prefix="/console", include_in_schema=False), Sessions(token)

    def render(page: str, status: int = 200, headers: Mapping[str, str] = {}, **facts: Any) -> Any:
        facts = {"message": "", "title": "", "node": node.describe(), **facts}
        text = _PAGES.get_template(page).render(**facts)
        return HTMLResponse(text, status, {**_HEADERS, **headers})

    def find_session(request: Request) -> str:
        session = request.cookies.get(COOKIE, "")
        if not sessions.is_open(session):
            raise HTTPException(303, "sign in", {"Location": "/console/login"})
        return session

    async def read_form(request: Request) -> dict[str, str]:
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise HTTPException(403, "the form is another site's")
        body = await request.body()
        if len(body) > _MAX_FORM:
            raise HTTPException(413, "the form is too large")
        return {key: values[0] for key, values in parse_qs(body.decode("utf-8", "replace")).items()}

    @router.get("/style.css")
    def style() -> Response:
        text = _PAGES.get_template("style.css").render()
        return Response(text, media_type="text/css", headers=_HEADERS)

    @router.get("/login")
    def show_login() -> Any:
        return render("login.html")

    @router.post("/login")
    async def login(request: Request) -> Any:
        form = await read_form(request)
        session = sessions.sign_in(form.get("token", ""))
        if session is None:
            return render("login.html", 403, message="The token is wrong.")
        answer = RedirectResponse("/console", 303, _HEADERS)
        answer.set_cookie(COOKIE, session, path="/console", httponly=True, samesite="strict")
        return answer

    @router.get("")
    def overview(request: Request) -> Any:
        find_session(request)
        rows = node.list_proposals()
        for row in rows:
            kinds = row["votes"].items()
            row["approved"] = ", ".join(party for party, votes in kinds if "approve" in votes)
            row["waits"] = _may_vote(node, row)
        return render("overview.html", title="Proposals", rows=rows, members=node.list_members())

    def show_proposal(request: Request, number: str, message: str = "", check: bool = False) -> Any:
        session, whole = find_session(request), node.find(number)
        (row,) = (row for row in node.list_proposals() if row["id"] == whole)
        leaves = node.preview(whole) if check else ""
        actions = ["approve", "deny"] if _may_vote(node, row) else []
        actions += ["stop"] if row["state"] in ("queued", "running") else []
        last = row["last"]
        return render(
            "proposal.html",
            title=row["name"],
            headers={"Refresh": str(_REFRESH_S)} if row["state"] == "running" else {},
            row=row,
            recipe=to_toml(node.read_recipe(whole)),
            csrf=sessions.make_form_token(session),
            actions=actions,
            leaves=leaves,
            message=message,
            progress=clean(format_line({"message": last["event"], **last}), LINE) if last else "",
            log=node.read_log(whole, 8192) if row["state"] in ("failed", "stopped") else "",
        )

    @router.get("/proposals/{number}")
    def proposal(request: Request, number: str, check: int = 0) -> Any:
        return show_proposal(request, number, check=bool(check))

    @router.post("/proposals/{number}")
    async def act(request: Request, number: str) -> Any:
        session, form = find_session(request), await read_form(request)
        expected = sessions.make_form_token(session)
        if not hmac.compare_digest(form.get("csrf", "").encode(), expected.encode()):
            raise HTTPException(403, "the form is not from this session")
        action, whole = form.get("action", ""), node.find(number)
        try:
            if action == "approve":
                await asyncio.to_thread(node.approve, whole)
            elif action == "deny":
                await asyncio.to_thread(node.vote, whole, "deny", form.get("why", ""))
            elif action == "stop":
                await asyncio.to_thread(node.vote, whole, "stop", form.get("why", ""))
            else:
                raise HTTPException(400, "there is no such action")
        except VflError as error:
            return show_proposal(request, number, clean(str(error), LINE))
        return RedirectResponse(f"/console/proposals/{whole}", 303, _HEADERS)

    return router


def _may_vote(node: Node, row: Mapping[str, Any]) -> bool:
    """Returns whether a proposal waits for the vote of this member."""
    name = node.settings.name
    return row["state"] == "open" and name in row["parties"] and name not in row["votes"]

"""The console: pages of a node for its own people, rendered here and without scripts.

It can do what the REST API can do. A person signs in with the node's token, or once with the link
that the node prints, and is an owner, or comes through a proxy that has signed the person in, with
a role of the node's file. The cookie is not sent by other sites, and each form has a token of its
session.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

from vfl.simulation.federation import to_toml
from vfl.summary.table import format_size
from vfl_common.errors import Code, InputError, VflError
from vfl_common.identity import pem
from vfl_common.process.logs import format_line
from vfl_common.text import LINE, clean
from vfl_hub.node import Node
from vfl_hub.schedule import ENDED
from vfl_hub.settings import ConsoleSettings, Role

log = logging.getLogger(__name__)
COOKIE, SESSION_S = "vfl_console", 8 * 3600.0
# A person may mistype the token this often in a minute.
MAX_TRIES, _TRY_S = 10, 60.0
# The link of the ready line holds once, and for this time, because logs may contain it.
LINK_S = 600.0
_MAX_FORM, _REFRESH_S, _CHECK_S, _MAX_CHECKS, _MAX_WAITING = 4096, 10, 2, 32, 8
# The name of people who sign in with the token. A proxy cannot send it, because it has spaces.
LOCAL_OWNER = "owner of the token"
SECRET_HEADER, _MIN_SECRET = "X-VFL-Proxy-Secret", 32
# A name without spaces and commas, with which proxies join the values of repeated headers.
_PERSON = re.compile(r"[!-+\--~]{1,254}")
_APPROVER = ("approve", "deny", "stop")
# {role: the actions that it may take}
RIGHTS: dict[Role, tuple[str, ...]] = {
    "viewer": (),
    "approver": _APPROVER,
    "owner": (*_APPROVER, "trust"),
}
# The size of a chart, and the maximum number of points of a line, which the eye can distinguish.
_WIDTH, _HEIGHT, _MAX_POINTS = 300, 100, 300
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# A report is a page of its own, with styles and pictures in it. Nothing in it may run or send.
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
)
_PAGES = Environment(
    loader=PackageLoader("vfl_hub"), autoescape=select_autoescape(), undefined=StrictUndefined
)
_PAGES.filters["size"] = format_size


@dataclass(frozen=True)
class ConsoleUser:
    """A person who uses the console.

    Args:
        name: The name for the log.
        role: The role, which decides what the person may do.
        session: The session that the person's forms belong to.
    """

    name: str
    role: Role
    session: str


class Sessions:
    """The people who have signed in.

    Args:
        token: The node's token.
        settings: The roles of people, and the proxy that signs them in.

    Raises InputError if the proxy's secret cannot be used.
    """

    def __init__(self, token: str, settings: ConsoleSettings) -> None:
        self._token, self._settings, self._key = token, settings, secrets.token_bytes(32)
        self._proxy_secret = _read_proxy_secret(settings)
        self.link, self._link_until_s = secrets.token_hex(16), time.monotonic() + LINK_S
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
        return self._begin()

    def follow_link(self, link: str) -> str | None:
        """Returns a new session, or None if the link is wrong, or old, or was used before."""
        if time.monotonic() > self._link_until_s or not hmac.compare_digest(
            link.encode(), self.link.encode()
        ):
            return None
        self._link_until_s = 0.0
        return self._begin()

    def _begin(self) -> str:
        now_s = time.monotonic()
        self._secrets = {key: until for key, until in self._secrets.items() if until > now_s}
        session = secrets.token_hex(32)
        self._secrets[session] = now_s + SESSION_S
        return session

    def sign_out(self, session: str) -> None:
        """Ends a session."""
        self._secrets.pop(session, None)

    def find_person(self, request: Request) -> ConsoleUser:
        """Returns the person who sends a request. Raises HTTPException (303, 403)."""
        if self._is_from_proxy(request):
            names = request.headers.getlist(self._settings.proxy_header)
            if len(names) != 1 or not _PERSON.fullmatch(names[0]):
                raise HTTPException(403, "the proxy has sent no name of a person")
            roles = self._settings.roles
            role = roles.get(names[0], roles.get("*"))
            if role is None:
                raise HTTPException(403, f"{names[0]} has no role here")
            return ConsoleUser(names[0], role, f"proxy {names[0]}")
        session = request.cookies.get(COOKIE, "")
        if time.monotonic() >= self._secrets.get(session, 0.0):
            raise HTTPException(303, "sign in", {"Location": "/console/login"})
        return ConsoleUser(LOCAL_OWNER, "owner", session)

    def _is_from_proxy(self, request: Request) -> bool:
        # Anybody can send the name of a person, so only the secret proves that the proxy did.
        values = request.headers.getlist(SECRET_HEADER)
        return (
            bool(self._proxy_secret)
            and len(values) == 1
            and hmac.compare_digest(values[0].encode(), self._proxy_secret)
        )

    def make_form_token(self, person: ConsoleUser) -> str:
        """Returns the token that the forms of a person's session have."""
        return hmac.new(self._key, person.session.encode(), "sha256").hexdigest()


def _read_proxy_secret(settings: ConsoleSettings) -> bytes:
    if settings.proxy_secret is None:
        return b""
    secret = pem.read_secret(Path(settings.proxy_secret), "the secret of the proxy").strip()
    if len(secret) < _MIN_SECRET:
        raise InputError(
            Code.FILE_INVALID,
            f"{settings.proxy_secret}: must have at least {_MIN_SECRET} characters (got "
            f"{len(secret)}). Write the output of `openssl rand -hex 32` into it.",
        )
    return secret


class Checks:
    """Checks proposals with this member's data, one at a time, and stores the results."""

    def __init__(self, node: Node) -> None:
        self._node, self._one = node, threading.Lock()
        self._lock = threading.Lock()
        # {proposal: what leaves, and whether the run could begin}; None while it is checked.
        self._results: dict[str, tuple[str, bool] | None] = {}

    def begin(self, number: str, *, again: bool) -> None:
        """Checks a proposal in a thread.

        ``again``: Whether to check it once more if the result is known, because data may change.
        """
        with self._lock:
            is_known = number in self._results
            waiting = [one for one, result in self._results.items() if result is None]
            if number in waiting or (is_known and not again) or len(waiting) >= _MAX_WAITING:
                return
            if len(self._results) >= _MAX_CHECKS:
                del self._results[next(one for one in self._results if one not in waiting)]
            self._results[number] = None
        threading.Thread(target=self._check, args=(number,), daemon=True).start()

    def read(self, number: str) -> tuple[str, bool] | None:
        """Returns what leaves and whether the run could begin; None while it is checked; '' and
        False if the check has not begun.
        """
        return self._results.get(number, ("", False))

    def _check(self, number: str) -> None:
        with self._one:
            try:
                result = self._node.preview(number)
            except VflError as error:
                result = clean(str(error), LINE), False
            except Exception:
                log.exception("%s cannot be checked", number[:16])
                result = "it cannot be checked; the node's log has the details", False
            with self._lock:
                self._results[number] = result


def make_console(node: Node, sessions: Sessions) -> APIRouter:
    """Returns the routes of the console."""
    router = APIRouter(prefix="/console", include_in_schema=False)
    checks, checking = Checks(node), threading.Lock()

    def render(
        page: str,
        person: ConsoleUser | None = None,
        status: int = 200,
        headers: Mapping[str, str] = {},
        **facts: Any,
    ) -> Any:
        facts = {"message": "", "title": "", "person": person, "node": node.describe(), **facts}
        facts["can_sign_out"] = person is not None and person.name == LOCAL_OWNER
        facts["csrf"] = sessions.make_form_token(person) if person else ""
        facts["rights"] = RIGHTS[person.role] if person else ()
        text = _PAGES.get_template(page).render(**facts)
        return HTMLResponse(text, status, {**_HEADERS, **headers})

    async def read_form(request: Request) -> dict[str, str]:
        origin = request.headers.get("origin")
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            raise HTTPException(403, "the form is another site's")
        body = await request.body()
        if len(body) > _MAX_FORM:
            raise HTTPException(413, "the form is too large")
        return {key: values[0] for key, values in parse_qs(body.decode("utf-8", "replace")).items()}

    async def read_own_form(request: Request) -> tuple[ConsoleUser, dict[str, str]]:
        """Returns the person who sends a form of the console, and the form."""
        person, form = sessions.find_person(request), await read_form(request)
        expected = sessions.make_form_token(person)
        if not hmac.compare_digest(form.get("csrf", "").encode(), expected.encode()):
            raise HTTPException(403, "the form is not from this session")
        return person, form

    def decide(person: ConsoleUser, action: str, about: str, do: Callable[[], None]) -> str:
        """Takes an action and logs who did. Returns the reason if it is refused, or ''."""
        if action not in RIGHTS[person.role]:
            raise HTTPException(403, f"the role {person.role} may not {action}")
        try:
            node.decide(person.name, person.role, action, about, do)
        except VflError as error:
            return clean(str(error), LINE)
        return ""

    def check_alone(compute: Callable[[], Any]) -> Any:
        # A check is a program that reads the data, so people could fill the machine with them.
        if not checking.acquire(blocking=False):
            raise HTTPException(429, "another check goes on; try again when it has ended")
        try:
            return compute()
        finally:
            checking.release()

    @router.get("/style.css")
    def style() -> Response:
        text = _PAGES.get_template("style.css").render()
        return Response(text, media_type="text/css", headers=_HEADERS)

    def enter(session: str | None, why: str) -> Any:
        if session is None:
            return render("login.html", status=403, message=why)
        answer = _go_to("/console")
        answer.set_cookie(COOKIE, session, path="/console", httponly=True, samesite="strict")
        return answer

    @router.get("/login")
    async def show_login(link: str = "") -> Any:
        if not link:
            return render("login.html")
        return enter(sessions.follow_link(link), "The link is old, or was used. Use the token.")

    @router.post("/login")
    async def login(request: Request) -> Any:
        form = await read_form(request)
        return enter(sessions.sign_in(form.get("token", "")), "The token is wrong.")

    @router.post("/logout")
    async def logout(request: Request) -> Any:
        person, _ = await read_own_form(request)
        sessions.sign_out(person.session)
        return _go_to("/console/login")

    def show_overview(request: Request, message: str = "") -> Any:
        person, rows, now = sessions.find_person(request), node.list_proposals(), datetime.now(UTC)
        for row in rows:
            kinds = row["votes"].items()
            row["approved"] = ", ".join(party for party, votes in kinds if "approve" in votes)
            row["waits"] = _may_vote(node, row)
        ends = {
            name: (end, (datetime.fromisoformat(end) - now).days)
            for name, end in node.describe()["certificates_end"].items()
        }
        return render(
            "overview.html",
            person,
            title="Proposals",
            headers={"Refresh": str(_REFRESH_S)},
            rows=rows,
            members=node.list_members(),
            ends=ends,
            message=message,
        )

    @router.get("")
    def overview(request: Request) -> Any:
        return show_overview(request)

    @router.post("/members/{name}")
    async def trust(request: Request, name: str) -> Any:
        person, form = await read_own_form(request)
        pin = form.get("pin", "")
        # The hub may have reported another key since the person saw the page.
        if pin != node.members.get(name, {}).get("pin"):
            return show_overview(request, f"The key of {clean(name, LINE)} has changed again.")
        refusal = decide(person, "trust", f"{name} {pin}", lambda: node.trust(name, pin))
        return show_overview(request, refusal) if refusal else _go_to("/console")

    @router.get("/data/{name}")
    def show_data(request: Request, name: str) -> Any:
        person = sessions.find_person(request)
        data = check_alone(lambda: node.describe_data(name))
        policy = to_toml({"policy": data["policy"]}) if data["policy"] else ""
        return render("data.html", person, title=name, data=data, policy=policy)

    def show_proposal(
        request: Request,
        number: str,
        message: str = "",
        *,
        again: bool = False,
        stops: bool = False,
    ) -> Any:
        person, whole = sessions.find_person(request), node.find(number)
        row = _find_row(node, whole)
        may_vote = _may_vote(node, row)
        again = again and "approve" in RIGHTS[person.role]
        if may_vote or again:
            checks.begin(whole, again=again)
        result = checks.read(whole)
        leaves, is_ready = result if result is not None else (None, False)
        # A person approves what the page shows.
        actions = ["approve"] if may_vote and is_ready else []
        actions += ["deny"] if may_vote else []
        goes_on = row["state"] in ("queued", "running")
        actions += ["stop"] if goes_on and stops else []
        refresh, folder = {}, node.get_run_folder(whole).parent
        if leaves is None:
            # The address without ?check=1, which would begin another check.
            refresh = {"Refresh": f"{_CHECK_S}; url=/console/proposals/{whole}"}
        elif not may_vote and not stops and row["state"] not in ENDED:
            # A page with a form would lose the reason that a person writes.
            refresh = {"Refresh": str(_REFRESH_S)}
        return render(
            "proposal.html",
            person,
            title=row["name"],
            headers=refresh,
            row=row,
            folder=folder if folder.exists() else "",
            recipe=to_toml(node.read_recipe(whole)),
            actions=[action for action in actions if action in RIGHTS[person.role]],
            can_stop=goes_on and not stops and "stop" in RIGHTS[person.role],
            leaves=leaves,
            is_ready=is_ready,
            message=message,
            has_report=node.find_report(whole) is not None,
            log=node.read_log(whole, 8192) if row["state"] in ("failed", "stopped") else "",
        )

    @router.get("/proposals/{number}")
    def proposal(request: Request, number: str, check: int = 0, stop: int = 0) -> Any:
        return show_proposal(request, number, again=bool(check), stops=bool(stop))

    @router.get("/proposals/{number}/run")
    def show_run(request: Request, number: str, pause: int = 0) -> Any:
        person, whole = sessions.find_person(request), node.find(number)
        row, progress = _find_row(node, whole), node.read_progress(whole)
        last, runs = row["last"], row["state"] == "running"
        return render(
            "run.html",
            person,
            title=row["name"],
            headers={"Refresh": str(_REFRESH_S)} if runs and not pause else {},
            row=row,
            runs=runs,
            pause=bool(pause),
            last=clean(format_line({"message": last["event"], **last}), LINE) if last else "",
            progress=progress,
            charts=_make_charts(progress["curves"]),
            has_report=node.find_report(whole) is not None,
        )

    @router.get("/proposals/{number}/report")
    def report(request: Request, number: str) -> Response:
        sessions.find_person(request)
        path = node.find_report(node.find(number))
        if path is None:
            raise HTTPException(404, "there is no report of this run")
        headers = {**_HEADERS, "Content-Security-Policy": _REPORT_POLICY}
        return HTMLResponse(path.read_bytes(), headers=headers)

    @router.post("/proposals/{number}")
    async def act(request: Request, number: str) -> Any:
        person, form = await read_own_form(request)
        action, why, whole = form.get("action", ""), form.get("why", ""), node.find(number)

        def do() -> None:
            if action == "approve":
                node.approve(whole)
            elif action == "deny":
                node.vote(whole, "deny", why)
            else:
                node.vote(whole, "stop", why)

        if action not in _APPROVER:
            raise HTTPException(400, "there is no such action")
        refusal = await asyncio.to_thread(decide, person, action, whole, do)
        if refusal:
            return show_proposal(request, number, refusal, stops=action == "stop")
        return _go_to(f"/console/proposals/{whole}")

    return router


def _go_to(path: str) -> Response:
    return RedirectResponse(path, 303, _HEADERS)


def _find_row(node: Node, number: str) -> dict[str, Any]:
    (row,) = node.list_proposals(number)
    return row


def _make_charts(curves: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns a chart for each phase and metric, with a line for each split."""
    charts: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for curve in curves:
        charts.setdefault((curve["phase"], curve["metric"]), []).append(curve)
    return [
        {"phase": phase, "metric": metric, **_draw_lines(lines)}
        for (phase, metric), lines in charts.items()
    ]


def _draw_lines(curves: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the lines of a chart in its coordinates, and the ranges of both axes."""
    rounds = [round_ for curve in curves for round_, _ in curve["points"]]
    values = [value for curve in curves for _, value in curve["points"]]
    first, last, low, high = min(rounds), max(rounds), min(values), max(values)
    lines = []
    for curve in curves:
        points = curve["points"]
        thinned = [*points[:: -(-len(points) // _MAX_POINTS)], points[-1]]
        places = (
            (
                _WIDTH * (round_ - first) / ((last - first) or 1),
                _HEIGHT * (high - value) / ((high - low) or 1),
            )
            for round_, value in thinned
        )
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        lines.append({"split": curve["split"], "points": text, "value": points[-1][1]})
    return {"lines": lines, "first": first, "last": last, "low": low, "high": high}


def _may_vote(node: Node, row: Mapping[str, Any]) -> bool:
    """Returns whether a proposal waits for the vote of this member."""
    name = node.settings.name
    voted = row["voted"] or name in row["votes"]
    return row["state"] == "open" and name in row["parties"] and not voted

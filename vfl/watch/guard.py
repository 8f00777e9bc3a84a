"""Controls access to a page: it needs the link, and a browser that uses this machine's own name.

Pure ASGI, around the application: a refused request never reaches it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# DNS rebinding uses other names for this machine: only these are accepted.
_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
_SITES = frozenset({b"same-origin", b"none"})
# No content from other sites, nothing inline, no frames, and no requests to other sites.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_ALWAYS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
TOKEN = "token"  # noqa: S105 - the name of the parameter


class Guard:
    """Passes a request to ``app`` if it has the token: in the link, which is answered with a
    cookie and a link without the token; or in that cookie.

    Args:
        app: the guarded application.
        token: the secret; text of ASCII characters.
        port: the page's port, for the cookie's name, as all ports share cookies.
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._cookie = f"vfl-watch-{port}"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers one request; see ASGI."""
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            # The page has no WebSockets.
            await send({"type": "websocket.close"})
            return
        headers = dict(scope["headers"])
        refusal = _refusal(scope, headers)
        if refusal is not None:
            await _say(send, *refusal)
        elif self._in_link(scope):
            await _answer(send, HTTPStatus.SEE_OTHER, self._welcome())
        elif self._in_cookie(headers):
            await self._app(scope, receive, _with_headers(send))
        else:
            text = "Open the link that `vfl watch` has printed: it has the token of this page."
            await _say(send, HTTPStatus.FORBIDDEN, text)

    def _in_link(self, scope: Message) -> bool:
        if scope["path"] != "/":
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=5)
        return any(self._is_token(value) for value in query.get(TOKEN, ()))

    def _in_cookie(self, headers: Mapping[bytes, bytes]) -> bool:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return self._cookie in cookies and self._is_token(cookies[self._cookie].value)

    def _is_token(self, text: str) -> bool:
        # The comparison takes constant time.
        return secrets.compare_digest(text.encode("utf-8", "surrogateescape"), self._token)

    def _welcome(self) -> dict[str, str]:
        cookie = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Lax"
        return {"location": "/", "set-cookie": cookie}


def _refusal(scope: Message, headers: Mapping[bytes, bytes]) -> tuple[HTTPStatus, str] | None:
    """Returns why a request is refused for everyone; None if it is not."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name, _, port = host.rpartition(":")
    if not (host in _HOSTS or (name in _HOSTS and port.isdigit())):
        text = "This page is served to 127.0.0.1 and localhost only: open it by such an address."
        return HTTPStatus.MISDIRECTED_REQUEST, text
    # A page of another site, or of another port, sends our cookie, too.
    site = headers.get(b"sec-fetch-site", b"none")
    if site not in _SITES and scope["path"] != "/":
        return HTTPStatus.FORBIDDEN, "The request comes from another site."
    if scope["method"] not in ("GET", "HEAD"):
        return HTTPStatus.METHOD_NOT_ALLOWED, "This page is read-only."
    return None


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            more = _raw({key: value for key, value in _ALWAYS.items() if key.encode() not in names})
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return sending


async def _say(send: Send, status: HTTPStatus, text: str) -> None:
    await _answer(send, status, {"content-type": "text/plain; charset=utf-8"}, text)


async def _answer(
    send: Send, status: HTTPStatus, headers: Mapping[str, str], text: str = ""
) -> None:
    body = f"{text}\n".encode() if text else b""
    every = _raw({**headers, **_ALWAYS, "content-length": str(len(body))})
    await send({"type": "http.response.start", "status": status.value, "headers": every})
    await send({"type": "http.response.body", "body": body})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

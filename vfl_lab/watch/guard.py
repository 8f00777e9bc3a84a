"""Controls access to the page: a request needs the token of the link, and a host name of this
machine.

The guard is an ASGI middleware, so a refused request does not reach the application.
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

# Only these host names are accepted. Other names are a sign of a DNS rebinding attack.
_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
_SITES = frozenset({b"same-origin", b"none"})
# This policy allows no content from other sites, no inline scripts or styles, and no frames.
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
# The security headers of every response.
_SECURITY_HEADERS = {
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
TOKEN = "token"  # noqa: S105 - this is the name of the parameter


class Guard:
    """Passes a request to the application if the request has the token.

    A request with the token in the link is redirected to a link without the token, and gets a
    cookie that contains it. Later requests have the token in the cookie.

    Args:
        app: The application.
        token: The secret, in ASCII characters.
        port: The port of the page. It is part of the cookie's name, because browsers share cookies
            between ports.
    """

    def __init__(self, app: App, token: str, port: int) -> None:
        self._app, self._token = app, token.encode()
        self._cookie = f"vfl-watch-{port}"

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Handles one request, as an ASGI application."""
        if scope["type"] == "lifespan":
            return
        if scope["type"] != "http":
            # The page has no WebSockets.
            await send({"type": "websocket.close"})
            return
        headers = dict(scope["headers"])
        refusal = _check_request(scope, headers)
        if refusal is not None:
            await _send_text(send, *refusal)
        elif self._has_token_in_link(scope):
            await _answer(send, HTTPStatus.SEE_OTHER, self._make_redirect())
        elif self._has_token_in_cookie(headers):
            await self._app(scope, receive, _with_headers(send))
        else:
            text = "The token is missing or wrong. Open the link that `vfl watch` has printed."
            await _send_text(send, HTTPStatus.FORBIDDEN, text)

    def _has_token_in_link(self, scope: Message) -> bool:
        if scope["path"] != "/":
            return False
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=5)
        return any(self._is_token(value) for value in query.get(TOKEN, ()))

    def _has_token_in_cookie(self, headers: Mapping[bytes, bytes]) -> bool:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return self._cookie in cookies and self._is_token(cookies[self._cookie].value)

    def _is_token(self, text: str) -> bool:
        # A comparison in constant time does not leak the token through timing.
        return secrets.compare_digest(text.encode("utf-8", "surrogateescape"), self._token)

    def _make_redirect(self) -> dict[str, str]:
        cookie = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Lax"
        return {"location": "/", "set-cookie": cookie}


def _check_request(scope: Message, headers: Mapping[bytes, bytes]) -> tuple[HTTPStatus, str] | None:
    """Checks host, site and method of a request. Returns status and text of a refusal, or None."""
    host = headers.get(b"host", b"").decode("latin-1").lower()
    name, _, port = host.rpartition(":")
    if not (host in _HOSTS or (name in _HOSTS and port.isdigit())):
        text = "This page accepts only the hosts 127.0.0.1 and localhost. Open it with one of them."
        return HTTPStatus.MISDIRECTED_REQUEST, text
    # A browser also sends the cookie with requests from pages of other sites or ports.
    site = headers.get(b"sec-fetch-site", b"none")
    if site not in _SITES and scope["path"] != "/":
        return HTTPStatus.FORBIDDEN, "The request comes from another site."
    if scope["method"] not in ("GET", "HEAD"):
        return HTTPStatus.METHOD_NOT_ALLOWED, "This page is read-only."
    return None


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            missing = {
                key: value for key, value in _SECURITY_HEADERS.items() if key.encode() not in names
            }
            message["headers"] = [*message["headers"], *_encode_headers(missing)]
        await send(message)

    return send_with_headers


async def _send_text(send: Send, status: HTTPStatus, text: str) -> None:
    await _answer(send, status, {"content-type": "text/plain; charset=utf-8"}, text)


async def _answer(
    send: Send, status: HTTPStatus, headers: Mapping[str, str], text: str = ""
) -> None:
    body = f"{text}\n".encode() if text else b""
    raw_headers = _encode_headers(
        {**headers, **_SECURITY_HEADERS, "content-length": str(len(body))}
    )
    await send({"type": "http.response.start", "status": status.value, "headers": raw_headers})
    await send({"type": "http.response.body", "body": body})


def _encode_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]

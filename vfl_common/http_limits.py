"""The HTTP protocol with timeouts for idle and stalled connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for a whole request to arrive, and for a caller to read its answer.
REQUEST_S, STALLED_S = 10.0, 60.0


# The maximum number of bytes of a request.
MAX_BODY = 2**18


def limit_bodies(app: FastAPI) -> None:
    """Refuses requests of an application that are too large, or do not arrive in time."""

    @app.middleware("http")
    async def limit_body(request: Request, answer: Callable[..., Any]) -> Any:
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not length.isdecimal():
            return JSONResponse({"detail": "the request has no length"}, 411)
        if int(length) > MAX_BODY:
            return JSONResponse({"detail": "the request is too large"}, 413)
        try:
            # The application gets this body.
            await asyncio.wait_for(request.body(), REQUEST_S)
        except (TimeoutError, ClientDisconnect):
            answer_to = JSONResponse({"detail": "the request did not arrive in time"}, 408)
            answer_to.headers["connection"] = "close"
            return answer_to
        return await answer(request)


class Patient(H11Protocol):
    """Closes idle connections and connections that do not read, since their number is limited."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._await_request(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._idle_timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        # The next line may already start the next request.
        last = self.cycle
        super().on_response_complete()
        self._await_request(last)

    def _await_request(self, last: Any) -> None:
        """Starts the timeout for the request after ``last``; None: for the first request."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._idle_timer = self.loop.call_later(REQUEST_S, self._close_idle, last)

    def _close_idle(self, last: Any) -> None:
        # No request has arrived since.
        if self.cycle is last:
            self.transport.abort()

    def pause_writing(self) -> None:
        self._stall_timer = self.loop.call_later(STALLED_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        super().resume_writing()

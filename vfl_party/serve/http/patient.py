"""The HTTP protocol with timeouts for idle and stalled connections."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

# For a request to come whole, and for a reader to take what waits for it.
REQUEST_S, STALLED_S = 10.0, 60.0


class Patient(H11Protocol):
    """Closes idle connections and those that do not read, since both occupy a place."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silence: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._await_request(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._silence, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        # The next request may be here already, and begin in there.
        last = self.cycle
        super().on_response_complete()
        self._await_request(last)

    def _await_request(self, last: Any) -> None:
        """Gives the connection its time for the request after ``last``; None: for the first."""
        if self._silence is not None:
            self._silence.cancel()
        self._silence = self.loop.call_later(REQUEST_S, self._close_idle, last)

    def _close_idle(self, last: Any) -> None:
        # No further request has come whole.
        if self.cycle is last:
            self.transport.abort()

    def pause_writing(self) -> None:
        self._stall = self.loop.call_later(STALLED_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

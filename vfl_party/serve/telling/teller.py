"""Tells of requests that have ended: to the access log, and to a tracing system."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vfl_common.process.logs import open_separate_log
from vfl_common.process.tracing import RequestSpans, trace_requests
from vfl_party.serve.telling.request import RequestTrace


class Teller:
    """Any thread may tell.

    Args:
        log: of the requests; None for none.
        spans: of the requests; None for none.
    """

    def __init__(self, log: logging.Logger | None, spans: RequestSpans | None) -> None:
        self._log, self._spans = log, spans

    def ended(self, request: RequestTrace, status: int) -> None:
        """Tells of a request. ``status``: of HTTP, also for gRPC."""
        ended_ns = time.time_ns()
        facts: dict[str, str | int] = {
            "protocol": request.protocol,
            "route": request.route,
            "caller": request.caller,
            "model": request.model,
            "run": request.run_id,
            "rows": request.rows,
            "status": status,
        }
        if self._log is not None:
            took_ms = round((ended_ns - request.began_ns) / 1e6, 3)
            self._log.info("request", extra={"event": "request", **facts, "ms": took_ms})
        if self._spans is not None:
            times = request.began_ns, ended_ns
            self._spans.tell("request", times, facts, request.stages, request.parent)


@contextmanager
def telling(path: Path | None, party: str) -> Iterator[Teller | None]:
    """Yields a ``Teller`` if there is an access log or the environment enables traces. Raises
    InputError.

    ``path``: of the access log; None for none.
    """
    with trace_requests("vfl-party", party) as spans:
        log = open_separate_log(path, party=party) if path is not None else None
        try:
            yield Teller(log, spans) if log is not None or spans is not None else None
        finally:
            for handler in log.handlers if log is not None else ():
                handler.close()

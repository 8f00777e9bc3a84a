"""Traces of requests: caller, model and stages, for the access log and for OpenTelemetry.

A context variable holds the current request. The thread that scores a batch records the stages of
its requests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from vfl_common.process.logs import open_separate_log
from vfl_common.process.tracing import RequestSpans, trace_requests

# A stage's name, start and end, in nanoseconds since 1970.
Stage = tuple[str, int, int]
# The stages in their order.
QUEUE, OWN, PARTIES, TOP = "wait in queue", "own embedding", "ask parties", "top"


@dataclass
class RequestTrace:
    """A request.

    Args:
        protocol: ``http`` or ``grpc``.
        route: A path with placeholders in braces, or a gRPC method; no text of the caller.
        parent: The caller's ``traceparent``; '' for none.
        caller: The name of the caller's token; '' for none.
        model, run_id: The requested model and run.
        rows: The number of rows.
    """

    protocol: str
    route: str
    parent: str = ""
    caller: str = ""
    model: str = ""
    run_id: str = ""
    rows: int = 0
    began_ns: int = field(default_factory=time.time_ns)
    stages: list[Stage] = field(default_factory=list)

    def set_subject(self, model: str, run_id: str, caller: str, rows: int) -> None:
        """Sets the model, run, caller and number of rows."""
        self.model, self.run_id, self.caller, self.rows = model, run_id, caller, rows


_CURRENT_REQUEST: ContextVar[RequestTrace | None] = ContextVar("request", default=None)
_CURRENT_STAGES: ContextVar[list[Stage] | None] = ContextVar("stages", default=None)


def set_current_request(request: RequestTrace) -> None:
    """Sets the current request of this context."""
    _CURRENT_REQUEST.set(request)


def get_current_request() -> RequestTrace | None:
    """Returns the current request of this context; None if requests are not reported."""
    return _CURRENT_REQUEST.get()


@contextmanager
def record_stages(requests: Sequence[tuple[RequestTrace | None, int]]) -> Iterator[None]:
    """Records the stages within the block for the requests of a batch.

    ``requests``: each request with the start of its wait, in nanoseconds since 1970.
    """
    noted = [(request, since_ns) for request, since_ns in requests if request is not None]
    if not noted:
        yield
        return
    began_ns, stages = time.time_ns(), list[Stage]()
    token = _CURRENT_STAGES.set(stages)
    try:
        yield
    finally:
        _CURRENT_STAGES.reset(token)
        for request, since_ns in noted:
            request.stages += [(QUEUE, since_ns, began_ns), *stages]


@contextmanager
def record_stage(name: str) -> Iterator[None]:
    """Records the block as a stage of the current batch's requests."""
    stages = _CURRENT_STAGES.get()
    if stages is None:
        yield
        return
    began_ns = time.time_ns()
    try:
        yield
    finally:
        stages.append((name, began_ns, time.time_ns()))


class RequestReporter:
    """Reports finished requests to the access log and as spans. Any thread may call it.

    Args:
        log: The access log; None for none.
        spans: The exporter of spans; None for none.
    """

    def __init__(self, log: logging.Logger | None, spans: RequestSpans | None) -> None:
        self._log, self._spans = log, spans

    def report(self, request: RequestTrace, status: int) -> None:
        """Reports a finished request. ``status``: the HTTP status, also for gRPC."""
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
def open_request_reporter(path: Path | None, party: str) -> Iterator[RequestReporter | None]:
    """Yields a ``RequestReporter``, or None without an access log and traces. Raises InputError.

    ``path``: The path of the access log; None for none. The environment enables traces.
    """
    with trace_requests("vfl-party", party) as spans:
        log = open_separate_log(path, party=party) if path is not None else None
        try:
            yield RequestReporter(log, spans) if log is not None or spans is not None else None
        finally:
            for handler in log.handlers if log is not None else ():
                handler.close()

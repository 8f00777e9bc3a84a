"""Exports traces to OpenTelemetry if the environment asks for it: spans of a run, its phases and
rounds, and of requests to a served model.

``OTEL_TRACES_EXPORTER=otlp`` turns it on, and OpenTelemetry's other variables configure the
exporter. The id of the trace is derived from the run id, so the spans of all programs of a run are
in one trace without any extra message. Spans contain names of phases and parties, numbers of rounds
and error codes, but never message texts, ids or values of rows.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vfl_common.errors import Code, InputError, VflError
from vfl_common.process import logs

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span

# The environment variable that turns traces on.
ASKS = "OTEL_TRACES_EXPORTER"
# The maximum time to send the last spans, if the program ends by itself and if it is stopped.
_FLUSH_S, _STOP_S = 5.0, 1.0
# The log events that become events of the run's span.
_SPAN_EVENTS = frozenset(
    {"aligned", "away", "back", "interrupted", "joined", "left", "lost", "resumed", "server_away"}
    | {"server_back", "set_aside", "skipped", "standstill"}
)


@contextmanager
def trace_run(program: str, party: str) -> Iterator[None]:
    """Traces the block, in which a program takes part in a run, if the environment asks for it.

    Args:
        program: ``vfl-server`` or ``vfl-party``, which becomes OpenTelemetry's service name.
        party: The name of this party or server.

    Raises InputError (CONFIG_INVALID) if the environment asks for an exporter that is not
    available.
    """
    exporter = _make_exporter(os.environ.get(ASKS, "").strip())
    if exporter is None:
        yield
        return
    with export_run(exporter, program, party):
        yield


@contextmanager
def export_run(exporter: SpanExporter, program: str, party: str) -> Iterator[None]:
    """Exports the spans of the block to ``exporter``: see ``trace_run``."""
    ids = _Ids()
    provider = _make_provider(exporter, program, party, ids)
    spans = Spans(provider, ids)
    root, event_logger = logging.getLogger(), logging.getLogger(logs.__name__)
    # A server learns of rounds only from events of progress, which are logged at level DEBUG.
    previous_level = event_logger.level
    event_logger.setLevel(logging.DEBUG)
    root.addHandler(spans)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        root.removeHandler(spans)
        event_logger.setLevel(previous_level)
        spans.end(error)
        was_stopped = error is not None and not isinstance(error, Exception)
        _flush(provider, _STOP_S if was_stopped else _FLUSH_S)


@contextmanager
def trace_requests(program: str, party: str) -> Iterator[RequestSpans | None]:
    """Yields a tracer of requests if the environment asks for it, otherwise None. Arguments and
    errors are those of ``trace_run``.
    """
    exporter = _make_exporter(os.environ.get(ASKS, "").strip())
    if exporter is None:
        yield None
        return
    with export_requests(exporter, program, party) as spans:
        yield spans


@contextmanager
def export_requests(exporter: SpanExporter, program: str, party: str) -> Iterator[RequestSpans]:
    """Yields a tracer that exports the spans of requests to ``exporter``."""
    provider = _make_provider(exporter, program, party, _Ids())
    try:
        yield RequestSpans(provider)
    finally:
        _flush(provider, _FLUSH_S)


class RequestSpans:
    """Creates spans for requests that have ended. Any thread may call it."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("vfl", logs.version())

    def tell(
        self,
        name: str,
        times: tuple[int, int],
        facts: Mapping[str, str | int],
        stages: Sequence[tuple[str, int, int]],
        parent: str = "",
    ) -> None:
        """Creates the span of a request, with a child span for each of its stages.

        Args:
            times: The times at which the request began and ended, in nanoseconds since 1970.
            facts: The span's attributes. Empty values are left out.
            stages: (name, begin, end) of each stage, in nanoseconds since 1970.
            parent: The caller's W3C ``traceparent``. If it is empty or invalid, a new trace begins.
        """
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        caller = TraceContextTextMapPropagator().extract({"traceparent": parent})
        attributes = {f"vfl.{key}": value for key, value in facts.items() if value != ""}
        span = self._tracer.start_span(
            name, caller, kind=SpanKind.SERVER, start_time=times[0], attributes=attributes
        )
        request_context = set_span_in_context(span)
        for stage, began_ns, ended_ns in stages:
            self._tracer.start_span(stage, request_context, start_time=began_ns).end(ended_ns)
        if int(facts.get("status", 0)) >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(times[1])


class Spans(logging.Handler):
    """Creates nested spans from the log's events: ``run``, its ``phase`` spans, and their ``round``
    spans.

    A round begins when the previous round ends, or when the run was started, resumed or aligned. A
    server gets progress at a limited rate, so one of its ``round`` spans may cover several rounds.
    """

    def __init__(self, provider: TracerProvider, ids: _Ids) -> None:
        super().__init__(logging.DEBUG)
        self._tracer, self._ids = provider.get_tracer("vfl", logs.version()), ids
        # The times at which the run and the next span began.
        self._began_ns = self._mark_ns = time.time_ns()
        self._generation = 0
        self._run_id, self._phase_name, self._round = "", "", 0
        self._run: Span | None = None
        self._phase: Span | None = None

    def emit(self, record: logging.LogRecord) -> None:
        facts = record.__dict__
        event = facts.get("event")
        if event == "started":
            self._start(facts["run_id"], facts["generation"])
        elif event in ("round", "progress") and self._run is not None:
            self._finish_rounds(facts["phase"], facts["round"], facts["rounds"])
        elif event in _SPAN_EVENTS and self._run is not None:
            self._run.add_event(event)
            if event == "interrupted":
                self._end_phase()
            self._mark_ns = time.time_ns()

    def _start(self, run_id: str, generation: int) -> None:
        self._end_phase()
        if run_id != self._run_id or self._run is None:
            if self._run is not None:
                self._run.end()
            self._open(run_id)
        self._generation, self._mark_ns = generation, time.time_ns()

    def _open(self, run_id: str) -> Span:
        self._ids.run_id, self._run_id = run_id, run_id
        facts = {"vfl.run": run_id} if run_id else {}
        self._run = self._tracer.start_span("run", start_time=self._began_ns, attributes=facts)
        return self._run

    def _finish_rounds(self, phase: str, round_: int, rounds: int) -> None:
        """Creates a span for the rounds up to ``round_``, and a phase span if a phase begins."""
        if phase != self._phase_name:
            self._end_phase()
        if self._phase is None:
            self._phase = self._start_within(
                self._run,
                "phase",
                {"vfl.phase": phase, "vfl.generation": self._generation, "vfl.rounds": rounds},
            )
            # A resumed run begins with a later round than the first.
            self._phase_name, self._round = phase, max(0, round_ - 1)
        if round_ > self._round:
            first = self._round + 1
            self._start_within(
                self._phase,
                "round",
                {"vfl.phase": phase, "vfl.first_round": first, "vfl.round": round_},
            ).end()
            self._round, self._mark_ns = round_, time.time_ns()

    def _start_within(self, parent: Span | None, name: str, facts: dict[str, str | int]) -> Span:
        """Begins a child span of ``parent`` that starts at the end of the previous round or
        event.
        """
        from opentelemetry.trace import set_span_in_context

        context = set_span_in_context(parent) if parent is not None else None
        return self._tracer.start_span(name, context, start_time=self._mark_ns, attributes=facts)

    def _end_phase(self) -> None:
        if self._phase is not None:
            self._phase.end()
        self._phase, self._phase_name, self._round = None, "", 0

    def end(self, error: BaseException | None) -> None:
        """Ends all spans. ``error``: the exception with which the program ends, or None."""
        from opentelemetry.trace import StatusCode

        self._end_phase()
        # A program that was refused has no run id, so its span gets a separate trace.
        run = self._run if self._run is not None else self._open("")
        if isinstance(error, Exception):
            code = error.code if isinstance(error, VflError) else Code.INTERNAL
            run.set_status(StatusCode.ERROR, code.name)
        elif error is not None:
            run.add_event("stopped")
        run.end()


class _Ids:
    """Generates ids of traces and spans. ``run_id``: the run of the next trace, or ''."""

    run_id = ""

    def generate_trace_id(self) -> int:
        return derive_trace_id(self.run_id) if self.run_id else secrets.randbits(128) | 1

    def generate_span_id(self) -> int:
        return secrets.randbits(64) | 1

    def is_trace_id_random(self) -> bool:
        return False


def derive_trace_id(run_id: str) -> int:
    """Returns the id of a run's trace, which is the same in all programs of the run."""
    return int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:16]) | 1


def _make_provider(exporter: SpanExporter, program: str, party: str, ids: _Ids) -> TracerProvider:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    facts = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or program}
    facts |= {"service.version": logs.version(), "service.instance.id": party, "vfl.party": party}
    provider = TracerProvider(
        resource=Resource.create(facts),
        id_generator=ids,  # type: ignore[arg-type]  # its base class is not imported here
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _flush(provider: TracerProvider, timeout_s: float) -> None:
    # A thread is needed, because force_flush ignores its own timeout while the collector does not
    # answer.
    flusher = threading.Thread(target=provider.force_flush, name="traces", daemon=True)
    flusher.start()
    flusher.join(timeout_s)


def _make_exporter(wanted: str) -> SpanExporter | None:
    """Creates the exporter that the environment asks for; None if it asks for none. Raises
    InputError.
    """
    if wanted in ("", "none"):
        return None
    if wanted != "otlp":
        raise InputError(
            Code.CONFIG_INVALID,
            f"{ASKS}: must be otlp or none (got {wanted!r}). Choose one of them.",
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{ASKS}: traces need the extra otel, which is not installed. Run `pip install "
            "'.[otel]'` in the clone of vfl, or unset the variable.",
        ) from None
    return OTLPSpanExporter()

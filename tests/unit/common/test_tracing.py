"""Spans of a run, its phases and its rounds, from what a program logs."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError, VflError
from vfl_common.process.logs import Console
from vfl_common.process.signals import Stopped
from vfl_common.process.tracing import ASKS, derive_trace_id, export_run, trace_run

log = logging.getLogger("vfl_party.test")
DEPTHS = ("run", "phase", "round")


@contextmanager
def spans(program: str = "vfl-party") -> Iterator[list[ReadableSpan]]:
    """All spans of the block, once it has ended."""
    exporter, found = InMemorySpanExporter(), list[ReadableSpan]()
    root, level = logging.getLogger(), logging.getLogger().level
    root.setLevel(logging.INFO)
    try:
        with export_run(exporter, program, "bank"):
            yield found
    finally:
        root.setLevel(level)
        found += exporter.get_finished_spans()


def begin(run_id: str, generation: int) -> None:
    Console("vfl-party", json_lines=True).emit("started", run_id=run_id, generation=generation)


def round_done(phase: str, round_: int, rounds: int) -> None:
    facts = {"event": "round", "phase": phase, "round": round_, "rounds": rounds}
    log.info("round done", extra=facts)


def shape(found: list[ReadableSpan]) -> list[tuple[str, ...]]:
    """(name of the parent, name, what of it) of each span, by its beginning."""
    names = {each.context.span_id: named(each) for each in found if each.context}
    ordered = sorted(found, key=lambda each: (each.start_time, DEPTHS.index(each.name)))
    return [(names[each.parent.span_id] if each.parent else "", named(each)) for each in ordered]


def named(span: ReadableSpan) -> str:
    facts = span.attributes or {}
    words = [facts.get(key) for key in ("vfl.phase", "vfl.generation", "vfl.round")]
    return " ".join(str(word) for word in (span.name, *words) if word is not None)


def test_a_party_s_rounds_lie_in_their_phases_and_these_in_the_run() -> None:
    with spans() as found:
        begin("r1", 1)
        for phase, rounds in (("fedhssl", 1), ("splitnn", 2)):
            for number in range(rounds):
                round_done(phase, number + 1, rounds)
    assert shape(found) == [
        ("", "run"),
        ("run", "phase fedhssl 1"),
        ("phase fedhssl 1", "round fedhssl 1"),
        ("run", "phase splitnn 1"),
        ("phase splitnn 1", "round splitnn 1"),
        ("phase splitnn 1", "round splitnn 2"),
    ]
    ends = {named(each): (each.start_time or 0, each.end_time or 0) for each in found}
    assert ends["round splitnn 1"][1] <= ends["round splitnn 2"][0]
    assert ends["run"][0] <= ends["phase fedhssl 1"][0] <= ends["phase splitnn 1"][1]
    assert ends["phase splitnn 1"][1] <= ends["run"][1]
    (run,) = (each for each in found if each.name == "run")
    assert run.resource.attributes["service.name"] == "vfl-party"
    assert run.resource.attributes["vfl.party"] == "bank"
    assert run.status.status_code is StatusCode.UNSET


def test_a_server_hears_of_rounds_by_reports_of_progress() -> None:
    with spans("vfl-server") as found:
        console = Console("vfl-server", json_lines=True)
        console.emit("started", run_id="r1", generation=1, checkpoint="")
        for round_, batch in ((0, 3), (1, 0), (1, 2), (4, 0)):
            console.emit("progress", phase="splitnn", round=round_, rounds=4, batch=batch)
    assert shape(found)[2:] == [
        ("phase splitnn 1", "round splitnn 1"),
        ("phase splitnn 1", "round splitnn 4"),
    ]
    assert (found[1].attributes or {})["vfl.first_round"] == 2


def test_progress_reaches_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with spans():
        pass
    with caplog.at_level(logging.INFO):
        Console("vfl-server", json_lines=True).emit("progress", phase="splitnn", round=1)
    assert caplog.records == []


def test_all_programs_of_a_run_are_in_one_trace_and_other_runs_in_others() -> None:
    traces = []
    for program, run_id in (("vfl-server", "r1"), ("vfl-party", "r1"), ("vfl-party", "r2")):
        with spans(program) as found:
            begin(run_id, 1)
            round_done("splitnn", 1, 1)
        (each,) = {span.context.trace_id for span in found if span.context}
        traces.append(each)
    assert traces == [derive_trace_id("r1"), derive_trace_id("r1"), derive_trace_id("r2")]
    assert traces[0] != traces[2]


def test_an_interruption_ends_the_phase_and_the_run_goes_on() -> None:
    with spans() as found:
        begin("r1", 1)
        round_done("splitnn", 1, 3)
        log.warning("interrupted: bank was lost", extra={"event": "interrupted"})
        begin("r1", 2)
        log.info("resuming", extra={"event": "resumed"})
        for number in (2, 3):
            round_done("splitnn", number, 3)
    assert shape(found) == [
        ("", "run"),
        ("run", "phase splitnn 1"),
        ("phase splitnn 1", "round splitnn 1"),
        ("run", "phase splitnn 2"),
        ("phase splitnn 2", "round splitnn 2"),
        ("phase splitnn 2", "round splitnn 3"),
    ]
    (run,) = (each for each in found if each.name == "run")
    assert [event.name for event in run.events] == ["interrupted", "resumed"]


def test_a_run_that_is_set_aside_is_followed_by_another_one() -> None:
    with spans() as found:
        begin("r1", 1)
        begin("r2", 1)
    runs = {(each.attributes or {})["vfl.run"] for each in found if each.name == "run"}
    assert runs == {"r1", "r2"}


def ended_by(error: BaseException, run_id: str = "r1") -> list[ReadableSpan]:
    """The spans of a program that ends with ``error``, in the run or before it."""
    ends = spans()
    with contextlib.suppress(type(error)), ends as found:
        if run_id:
            begin(run_id, 1)
        raise error
    return found


def test_a_failure_has_its_code_and_no_text() -> None:
    failing = VflError(Code.DATA_INVALID, "/home/bank/customers.csv: a secret")
    for error, code in ((failing, "DATA_INVALID"), (ValueError("a secret"), "INTERNAL")):
        (run,) = ended_by(error)
        assert (run.status.status_code, run.status.description) == (StatusCode.ERROR, code)
        assert "secret" not in run.to_json()


def test_who_is_stopped_has_not_failed_and_who_is_refused_has_no_run() -> None:
    (run,) = ended_by(Stopped())
    assert [event.name for event in run.events] == ["stopped"]
    assert run.status.status_code is StatusCode.UNSET
    (run,) = ended_by(InputError(Code.UNREACHABLE, "no server"), run_id="")
    assert "vfl.run" not in (run.attributes or {})
    assert run.status.description == "UNREACHABLE"


class Stuck(InMemorySpanExporter):
    """A collector that does not answer."""

    def __init__(self, answer: threading.Event) -> None:
        super().__init__()
        self._answer = answer

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._answer.wait()
        return super().export(spans)


def test_a_collector_that_does_not_answer_holds_no_program_up() -> None:
    answer, began_s = threading.Event(), time.monotonic()
    with contextlib.suppress(Stopped), export_run(Stuck(answer), "vfl-party", "bank"):
        raise Stopped
    answer.set()
    assert time.monotonic() - began_s < 4.0


def test_without_a_wish_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(logging.getLogger().handlers)
    for wish in ("", "none"):
        monkeypatch.setenv(ASKS, wish)
        with trace_run("vfl-party", "bank"):
            assert logging.getLogger().handlers == before
    monkeypatch.delenv(ASKS)
    with trace_run("vfl-party", "bank"):
        assert logging.getLogger().handlers == before


def test_a_wish_that_cannot_be_met_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ASKS, "zipkin")
    with raises(InputError, Code.CONFIG_INVALID, names="zipkin"), trace_run("vfl-party", "bank"):
        pass
    monkeypatch.setenv(ASKS, "otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with raises(InputError, Code.CONFIG_INVALID, names=".[otel]"), trace_run("vfl-party", "bank"):
        pass

"""What an operator's tools see of a run: its log on standard output, its health and metrics after its
end, its spans at a collector.
"""

from __future__ import annotations

import json
import signal
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.harness import cases
from tests.harness.federation import Federation, Program
from tests.harness.scrape import key, scrape
from tests.harness.waiting import wait_until
from vfl_common.process.tracing import ASKS, derive_trace_id

# Nobody waits for it: a signal ends it.
LINGER = ("--metrics", "127.0.0.1:0", "--metrics-linger", "600")
EPOCHS = 3


def federation(folder: Path, **options: Any) -> Federation:
    loses_a_party = options.pop("loses_a_party", False)
    run = {"join_deadline_s": 1.0} if options.pop("alone", False) else {}
    run |= {"rejoin_deadline_s": 0.5} if loses_a_party else {}
    phase = {"epochs": 10_000 if loses_a_party else EPOCHS}
    data = cases.columns("sklearn:breast_cancer", 2, limit=100)
    tables = cases.recipe(2, task={"kind": "binary"}, run=run, phase=phase)
    return Federation(folder, tables, data, **options)


def health(address: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}/healthz", timeout=10) as found:
            return found.status, found.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def metrics_of(program: Program) -> str:
    """Where a program has its metrics; read from its log on standard output, or its event."""
    return str(program.wait_for("metrics")["address"])


def ended(program: Program) -> bool:
    return program.process.poll() is not None


def test_health_and_metrics_outlive_a_run_that_is_complete(tmp_path: Path) -> None:
    with federation(tmp_path, server_options=LINGER) as run:
        server = run.start_server()
        at = [next(e["address"] for e in server.events if e["event"] == "metrics")]
        assert health(at[0]) == (200, "waiting\n")
        active = run.start_party("p0", *LINGER)
        at.append(metrics_of(active))
        passive = run.start_party("p1")
        # Without the option it ends with the run.
        assert passive.wait() == 0
        for program, address in zip((server, active), at, strict=True):
            program.wait_for("completed")
            assert health(address) == (200, "completed\n")
            found = scrape(address)
            assert found[key("vfl_run_state", state="completed")] == 1
            assert found[key("vfl_round", phase="splitnn")] == EPOCHS
            assert not ended(program)
        # All is written, and both are done: they only wait to be read.
        assert json.loads((run.run_folder / "p0" / "run.json").read_text())["finished"]
        for program in (server, active):
            program.signal(signal.SIGTERM)
        run.finish()
        assert "stopped" not in server.stderr + active.stderr


def test_health_and_metrics_outlive_a_run_that_has_failed(tmp_path: Path) -> None:
    with federation(tmp_path, loses_a_party=True, server_options=LINGER) as run:
        server = run.start_server()
        address = next(e["address"] for e in server.events if e["event"] == "metrics")
        active = run.start_party("p0", *LINGER)
        at_active = metrics_of(active)
        passive = run.start_party("p1")
        server.wait_for("started")
        passive.kill()
        for each in (address, at_active):
            until_failed(each)
            assert health(each) == (503, "failed\n")
            assert scrape(each)[key("vfl_run_state", state="failed")] == 1
        assert not ended(server)
        # What is left to do is to be read.
        wait_until(lambda: "error" in server.stderr and "error" in active.stderr)
        server.signal(signal.SIGTERM)
        active.signal(signal.SIGTERM)
        assert (server.wait(), active.wait()) == (3, 3)
        assert server.stderr.count("\n") == 1


def test_a_party_that_fails_itself_is_unhealthy(tmp_path: Path) -> None:
    with federation(tmp_path) as run:
        run.start_server()
        run.start_party("p0")
        run.data["p1"]["limit"] = 90
        fewer = run.start_party("p1", *LINGER)
        address = metrics_of(fewer)
        until_failed(address)
        assert health(address) == (503, "failed\n")
        assert scrape(address)[key("vfl_run_state", state="failed")] == 1
        # A signal before it has said why would be a stop.
        wait_until(lambda: "error: " in fewer.stderr)
        fewer.signal(signal.SIGTERM)
        assert fewer.wait() in (2, 4)
        assert run.programs["server"].wait() == 2


def until_failed(address: str) -> None:
    wait_until(lambda: health(address)[1], "failed\n".__eq__, timeout_s=60.0)


def test_a_program_that_lingers_ends_by_itself(tmp_path: Path) -> None:
    options = ("--metrics", "127.0.0.1:0", "--metrics-linger", "0.5")
    with federation(tmp_path, alone=True, server_options=options) as run:
        server = run.start_server()
        assert server.wait() == 3


def test_a_run_that_is_stopped_is_not_waited_for(tmp_path: Path) -> None:
    with federation(tmp_path, server_options=LINGER) as run:
        server = run.start_server()
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 130


def test_the_log_on_standard_output_is_the_log(tmp_path: Path) -> None:
    options = ("--log-stdout",)
    with federation(tmp_path, server_options=options) as run:
        run.start_server()
        for name in run.names:
            run.start_party(name, *options)
        run.finish()
        for name, program in run.programs.items():
            seen = program.seen()
            path = run.run_folder / name / "log.jsonl"
            kept = [json.loads(line) for line in path.read_text().splitlines()]
            # The first ones were said before the file was there.
            assert kept[0]["event"] == "program"
            assert [each for each in seen if "run" in each] == kept_since(seen, kept)
            for line in seen:
                assert {"time", "level", "version", "message"} <= set(line), line
            last = [each for each in seen if each.get("event") == "completed"]
            assert [each["party"] for each in last] == [name]
            rounds = [each for each in seen if each.get("event") == "round"]
            assert len(rounds) == (0 if name == "server" else EPOCHS)


def test_a_prediction_has_its_log_there_too(tmp_path: Path) -> None:
    with federation(tmp_path) as run:
        run.start_all()
        run.finish()
        trained = f"runs/{run.run_folder.name}"
    run.programs.clear()
    run.server_options = ("--predict", "--log-stdout")
    with run:
        run.start_server()
        for name in run.names:
            words = ("predict", run.write_party(name).name, "--run", trained, "--log-stdout")
            run.start(name, "vfl-party", *words)
        for name, program in run.programs.items():
            assert program.wait(60) == 0, program.stderr
            last = program.seen()[-1]
            assert (last["event"], last["party"], last["level"]) == ("completed", name, "info")


def kept_since(seen: list[dict[str, Any]], kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the file that were written since it was there."""
    count = sum("run" in each for each in seen)
    return kept[-count:]


def test_a_failure_is_a_line_and_a_sentence(tmp_path: Path) -> None:
    with federation(tmp_path) as run:
        (tmp_path / "recipe.toml").write_text("nonsense = 1\n")
        program = run.start(
            "refused", "vfl-server", "run", "recipe.toml", "--log-stdout", "--listen", "127.0.0.1:0"
        )
        assert program.wait() == 2
        (line,) = program.seen()
        assert (line["level"], line["event"], line["code"]) == ("error", "failed", "CONFIG_INVALID")
        assert program.stderr == f"error: {line['message']}\n"


class Collector:
    """A collector of spans. ``spans``: (service, party, span) of all that it was given."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str, Any]] = []
        self.address = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.address = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield
            finally:
                server.shutdown()
                thread.join()

    def take(self, request: ExportTraceServiceRequest) -> None:
        for each in request.resource_spans:
            facts = {pair.key: pair.value.string_value for pair in each.resource.attributes}
            self.spans += [
                (facts["service.name"], facts["vfl.party"], span)
                for scope in each.scope_spans
                for span in scope.spans
            ]


@pytest.mark.slow
def test_all_programs_of_a_run_give_their_spans_to_a_collector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = Collector()
    with collector.serving():
        monkeypatch.setenv(ASKS, "otlp")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.address)
        with federation(tmp_path, fresh=True) as run:
            run.start_all()
            run.finish()
            run_id = run.run_folder.name
    counts = Counter((party, span.name) for _, party, span in collector.spans)
    assert counts["server", "run"] == counts["p0", "run"] == counts["p1", "run"] == 1
    assert counts["p0", "phase"] == counts["p1", "phase"] == counts["server", "phase"] == 1
    assert counts["p0", "round"] == counts["p1", "round"] == EPOCHS
    assert 1 <= counts["server", "round"] <= EPOCHS
    assert {int.from_bytes(span.trace_id) for _, _, span in collector.spans} == {
        derive_trace_id(run_id)
    }
    assert {service for service, _, _ in collector.spans} == {"vfl-server", "vfl-party"}
    parents = {span.span_id: span.name for _, _, span in collector.spans}
    within = {(span.name, parents.get(span.parent_span_id, "")) for _, _, span in collector.spans}
    assert within == {("run", ""), ("phase", "run"), ("round", "phase")}


@pytest.mark.slow
def test_a_collector_that_is_away_disturbs_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ASKS, "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with federation(tmp_path, fresh=True) as run:
        run.start_all()
        assert run.finish()["metrics"]["validation"]

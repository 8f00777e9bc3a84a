"""The access log and the spans of requests: who, what, how long; never an id."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")
pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.harness.served_here import Here, score, serving
from tests.harness.waiting import wait_until
from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_common.process.logs import open_separate_log
from vfl_common.process.tracing import ASKS, export_requests
from vfl_serve.telling import (
    OWN,
    QUEUE,
    TOP,
    RequestReporter,
    RequestTrace,
    open_request_reporter,
    record_stage,
)
from vfl_serve.tokens import add_token

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
# In ids, in a path, in what is no request.
FILE = "access.jsonl"
MARK = "somebody"


class Counting(RequestReporter):
    """Counts what it has told: after the answer, so the next request may end first."""

    told = 0

    def report(self, request: RequestTrace, status: int) -> None:
        super().report(request, status)
        self.told += 1


def staged(ids: Any, least: Any, columns: Any) -> Any:
    with record_stage(OWN):
        pass
    with record_stage(TOP):
        if f"a-{MARK}-fails" in ids:
            raise RuntimeError(MARK)
        return score(ids, least, columns)


def infer(*ids: str) -> pb.ModelInferRequest:
    found = pb.ModelInferRequest(model_name="case")
    tensor = found.inputs.add(name="ids", datatype="BYTES", shape=[len(ids)])
    tensor.contents.bytes_contents.extend(each.encode() for each in ids)
    return found


@contextmanager
def told(folder: Path) -> Iterator[tuple[Here, str, Counting, list[ReadableSpan]]]:
    """A served model, a token, what tells, and the spans, once the block has ended."""
    token = add_token(folder / "tokens.json", "shop-app", rows_a_day=9)
    exporter, found = InMemorySpanExporter(), list[ReadableSpan]()
    log = open_separate_log(folder / FILE, party="bank")
    with (
        export_requests(exporter, "vfl-party", "bank") as spans,
        serving(folder / "tokens.json", staged, reporter := Counting(log, spans)) as here,
    ):
        yield here, token, reporter, found
    for each in log.handlers:
        each.close()
    found += exporter.get_finished_spans()


def test_each_request_is_told_of(tmp_path: Path) -> None:
    with told(tmp_path) as (here, token, reporter, spans):
        bearer = {"authorization": f"Bearer {token}"}
        ids = [f"a-{MARK}", MARK]
        fails = {"ids": [f"a-{MARK}-fails"]}
        requested: list[Callable[[], object]] = [
            lambda: here.ask("/v1/predict", {"ids": ids}, **bearer, traceparent=PARENT),
            lambda: here.ask("/v1/predict", {"ids": ids}),
            lambda: here.ask(f"/v1/predict/{MARK}", {"ids": ids}, **bearer),
            lambda: here.ask(f"/v2/models/{MARK}/infer", {"inputs": []}, **bearer),
            lambda: here.ask("/v1/predict", fails, **bearer, traceparent=MARK),
            lambda: here.call("ModelInfer", infer(*ids), token),
            lambda: here.refused("ModelInfer", infer(*ids * 9), token),
        ]
        for number, ask in enumerate(requested, 1):
            ask()
            wait_until(lambda: reporter.told, number.__eq__)
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    keys = ("protocol", "route", "caller", "model", "run", "rows", "status")
    assert [tuple(line[key] for key in keys) for line in lines] == [
        ("http", "POST /v1/predict", "shop-app", "case", "run", 2, 200),
        ("http", "POST /v1/predict", "", "", "", 0, 401),
        ("http", "POST", "", "", "", 0, 404),
        ("http", "POST /v2/models/{name}/infer", "", "", "", 0, 422),
        ("http", "POST /v1/predict", "shop-app", "case", "run", 1, 500),
        ("grpc", "ModelInfer", "shop-app", "case", "run", 2, 200),
        ("grpc", "ModelInfer", "", "", "", 0, 413),
    ]
    assert all(line["ms"] > 0 and line["party"] == "bank" for line in lines)
    requests = [each for each in spans if each.name == "request"]
    assert len(requests) == len(lines)
    first = requests[0]
    assert (first.kind, first.parent and first.parent.span_id) == (
        SpanKind.SERVER,
        int(PARENT.split("-")[2], 16),
    )
    assert all(each.parent is None for each in requests[1:])
    assert first.attributes == {
        "vfl.protocol": "http", "vfl.route": "POST /v1/predict", "vfl.caller": "shop-app",
        "vfl.model": "case", "vfl.run": "run", "vfl.rows": 2, "vfl.status": 200,
    }  # fmt: skip
    failed = [each.status.status_code is StatusCode.ERROR for each in requests]
    assert failed == [False, False, False, False, True, False, False]
    for each in requests:
        stages = [one for one in spans if one.parent and one.parent == each.context]
        asked = each.attributes and each.attributes.get("vfl.rows")
        assert [one.name for one in stages] == ([QUEUE, OWN, TOP] if asked else [])
        for one in stages:
            assert (each.start_time or 0) <= (one.start_time or 0) <= (one.end_time or 0)
            assert (one.end_time or 0) <= (each.end_time or 0)
    said = (tmp_path / FILE).read_text() + "".join(each.to_json() for each in spans)
    assert MARK not in said


def test_nothing_is_told_unless_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ASKS, raising=False)
    with open_request_reporter(None, "bank") as nobody:
        assert nobody is None
    assert not (tmp_path / FILE).exists()
    with open_request_reporter(tmp_path / FILE, "bank") as found, serving(reporter=found) as here:
        assert here.ask("/v1/predict", {"ids": ["ada"]})[0] == 200
    assert len((tmp_path / FILE).read_text().splitlines()) == 1

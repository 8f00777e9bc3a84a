"""What the HTTP port does before it reads a request, and with connections that ask for nothing."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest

from tests.harness.serving import catalog, made_served
from tests.harness.waiting import wait_until
from vfl_common.config.party import ServeSettings
from vfl_common.errors import Code, UnwritableError
from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_serve.scored import Counts, RequestPart, ServedScores
from vfl_serve.tokens import Tokens, add_token

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.harness.served_here import serving
from vfl_common import http_limits as patient
from vfl_serve.http import app as http_app
from vfl_serve.http.app import listening

JSON = {"content-type": "application/json"}
BODY = b'{"ids": ["a"]}'


def score(ids: Any, least: float | None, columns: Any) -> ServedScores:
    if "broken" in ids:
        raise ValueError("broken")
    n = len(ids)
    given = np.array([repr((least, columns))] * n)
    return ServedScores(
        {"given": given}, ["scored"] * n, [RequestPart(("bank",), {})], np.zeros(n, int)
    )


@dataclass(frozen=True)
class Port:
    """Where it listens, and what it has answered."""

    host: str
    port: int
    counts: Counts

    @property
    def address(self) -> tuple[str, int]:
        return self.host, self.port


@contextlib.contextmanager
def port(tokens: Path | None = None) -> Iterator[Port]:
    counts = Counts()
    served = made_served(score, tokens=Tokens(tokens))
    made = http_app.make_app(catalog(Tokens(tokens), counts, served), None)
    with listening(made, ServeSettings(http="127.0.0.1:0")) as listens:
        where = urlsplit(listens.url)
        yield Port(where.hostname or "", where.port or 0, counts)
    served.batcher.close()


def ask(at: Port, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    line = http.client.HTTPConnection(at.host, at.port, timeout=30)
    with contextlib.closing(line):
        line.request("POST", path, body, JSON | headers)
        answer = line.getresponse()
        return answer.status, json.loads(answer.read())


@pytest.mark.parametrize("path", ["/v1/predict", "/v2/models/case/infer", "/invocations", "/x"])
@pytest.mark.parametrize("body", [BODY, b"{", b"[" * 9_000, b""])
def test_a_stranger_has_nothing_parsed(tmp_path: Path, path: str, body: bytes) -> None:
    add_token(tmp_path / "tokens.json", "ended", until=date(2020, 1, 1))
    with port(tmp_path / "tokens.json") as at:
        for given in ({}, {"authorization": "Bearer vfl_wrong"}, {"authorization": "Basic \xff"}):
            status, answer = ask(at, path, body, **given)
            assert (status, list(answer)) == (401, ["error"])
        assert at.counts.requests == {401: 3}


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b'{"ids": ["a", "\xc3\xa4"]}'),
        (200, b'{"ids": [["a", "b"], "c"]}'),
        (200, b'{"ids": ["a"], "ids": ["b"], "columns": {"c": [0.1]}}'),
        (200, b'{"ids": ["a"], "columns": {"c": [1e400], "d": [-0.0], "e": [NaN]}}'),
        (200, b'{"ids": ["a"], "columns": {"c": [true], "d": [1], "e": [1.0], "f": [null]}}'),
        (
            200,
            b'{"ids": ["a"], "columns": {"c": ["1"], "d": [0.30000000000000004], "e": [5e-324]}}',
        ),
        (200, b'{"ids": ["a"], "columns": {"c": [123456789012345678901234567890]}}'),
        (422, b'{"ids": ["a"], "columns": {"c": [1, 2]}}'),
        (422, b'{"ids": ["a"], "columns": {"c": [{}]}}'),
        (200, b'{"ids": ["a"], "min_quality": 0.5}'),
        (422, b'{"ids": ["a"], "min_quality": "0.5"}'),
        (422, b'{"ids": ["a"], "min_quality": true}'),
        (422, b'{"ids": ["a"], "min_quality": NaN}'),
        (422, b'{"ids": ["a"], "min_quality": -Infinity}'),
        (422, b'{"ids": ["a"], "min_quality": 1e400}'),
        (422, b'{"ids": ["a"], "more": 1}'),
        (422, b'{"ids": ["\\ud800"]}'),
        (422, b'{"ids": ["' + b"a" * 2_000 + b'"]}'),
        (422, b'{"ids": []}'),
        (422, b'{"ids": [1]}'),
        (422, b'{"ids": "a"}'),
        (400, b"[" * 9_000),
        (400, b"\xff"),
        (422, b"null"),
        (422, b""),
        (413, b'{"ids": ["a"' + b', "a"' * 10 + b"]}"),
        (500, b'{"ids": ["broken"]}'),
    ],
)
def test_the_short_way_answers_as_the_long_one(status: int, body: bytes) -> None:
    with port() as at:
        short = ask(at, "/v1/predict", body)
        # The framework reads it, and the short way does not.
        long = ask(at, "/v1/predict", body, **{"content-type": "application/case+json"})
        assert short == long
        assert short[0] == status
        assert at.counts.requests == {status: 2}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"ids": [17]}', "ids.0: must be text, in quotes"),
        (b'{"ids": ["a", ["b", 3]]}', "ids.1.1: must be text, in quotes"),
        (b'{"ids": "a"}', "ids: must be a list"),
        (b'{"ids": []}', "ids: must not be empty"),
        (b'{"customer": ["a"]}', "ids: is missing; customer: is not a field of a request"),
        (
            b'{"ids": ["a"], "columns": {"c": [{}]}}',
            "columns.c.0: must be a number, text, true, false or null",
        ),
        (
            b'{"ids": ["a"], "columns": [1]}',
            "columns: must be an object: a list of values for each column",
        ),
        (b'{"ids": ["a"], "min_quality": "high"}', "min_quality: must be a number"),
        (b'{"ids": ["a"], "min_quality": NaN}', "min_quality: must be a finite number"),
    ],
)
def test_a_wrong_body_gets_plain_words(body: bytes, said: str) -> None:
    with port() as at:
        status, answer = ask(at, "/v1/predict", body)
        assert (status, answer["error"]) == (422, said)


def test_a_body_that_is_not_said_to_be_json_is_refused() -> None:
    with port() as at:
        status, answer = ask(at, "/v1/predict", BODY, **{"content-type": "text/plain"})
        assert status == 422
        assert "content-type: application/json" in answer["error"]
        found = ask(at, "/v1/predict", BODY, **{"content-type": "Application/JSON; charset=utf-8"})
        assert found[0] == 200


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """The head and the body of an answer are sent apart: the body came 40 ms after the head."""
    with port() as at, contextlib.closing(socket.create_connection(at.address)) as line:
        line.sendall(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
        assert line.recv(1000)
        mine = line.getsockname()
        ends = psutil.Process().net_connections("tcp")
        (fd,) = [each.fd for each in ends if each.raddr == mine]
        with socket.socket(fileno=os.dup(fd)) as theirs:
            assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_bodies_under_way_are_bounded_together() -> None:
    with patch.object(http_app, "MAX_HELD_BYTES", 100), port() as at:
        half = socket.create_connection(at.address)
        with half:
            half.sendall(b"POST /v1/predict HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n")
            half.sendall(b" " * 95)
            wait_until(lambda: ask(at, "/v1/predict", BODY)[0] == 503)
        # It is gone, and its bytes with it; it was no request.
        wait_until(lambda: ask(at, "/v1/predict", BODY)[0] == 200)
        assert set(at.counts.requests) == {200, 503}


def test_connections_without_a_request_hold_no_place() -> None:
    with patch.object(patient, "REQUEST_S", 0.2), port() as at, contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(at.address)) for _ in range(20)]
        for each in held[::2]:
            # A first request, then half of another.
            each.sendall(b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\nGET /ping HTTP/1.1\r\nhos")
        for number, each in enumerate(held):
            each.settimeout(10)
            found = b""
            with contextlib.suppress(ConnectionResetError):
                while data := each.recv(1000):
                    found += data
            assert (b"200 OK" in found) == (number % 2 == 0)
        assert ask(at, "/v1/predict", BODY)[0] == 200


@pytest.mark.parametrize("why", ["", "encoder: a row has other bits among 1 rows than among 64"])
def test_the_port_says_whether_rows_are_exact(why: str) -> None:
    served = made_served(score, inexact=why)
    with contextlib.closing(served.batcher):
        made = http_app.make_app(catalog(Tokens(None), Counts(), served), None)
        with listening(made, ServeSettings(http="127.0.0.1:0")) as listens:
            url = listens.url
            want = {"exact": not why, "why_inexact": why or None}
            (model,) = get(url, "/v1/models")["models"]
            (version,) = model["versions"]
            for told in (get(url, "/healthz"), version):
                assert {key: told[key] for key in want} == want


def get(url: str, path: str) -> Any:
    line = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    with contextlib.closing(line):
        line.request("GET", path)
        return json.loads(line.getresponse().read())


def test_a_file_that_cannot_be_written_is_no_fault_of_the_caller() -> None:
    """The caller may try again, and reads no path of this machine."""
    secret = "/var/lib/vfl/bank/lines.jsonl: cannot be written"

    def score(_ids: Any, _least: Any, _columns: Any) -> Any:
        public = UnwritableError(Code.FILE_INVALID, "its files cannot be written")
        raise public.privately(secret)

    with serving(scoring=score) as here:
        status, body, _ = here.ask("/v1/predict", {"ids": ["anna"]})
        assert status == 503
        assert b"/var" not in body
        asked = pb.ModelInferRequest(model_name="case")
        asked.inputs.add(name="ids", datatype="BYTES", shape=[1]).contents.bytes_contents.append(
            b"anna"
        )
        code, said = here.refused("ModelInfer", asked)
        assert code == "UNAVAILABLE"
        assert "/var" not in said

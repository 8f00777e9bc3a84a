"""What callers of both ports may try: each gets the documented status, and harms nobody else."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.harness.pki import company, dns, written
from tests.harness.served_here import SERVICE, Here, score, serving
from tests.harness.waiting import wait_until
from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_common.rpc import inference
from vfl_serve import scorer
from vfl_serve.scorer import Busy
from vfl_serve.tokens import add_token

MODELS = ("ModelReady", "ModelMetadata", "ModelInfer")
PATHS = {
    "/v1/predict": lambda ids: {"ids": ids},
    "/invocations": lambda ids: {"inputs": ids},
    "/v2/models/case/infer": lambda ids: {
        "inputs": [{"name": "ids", "shape": [len(ids)], "datatype": "BYTES", "data": ids}]
    },
}
ODD = ["'; DROP TABLE answers; --", "\x00", "a\x1f", "../../etc/passwd", "%s%n", "${jndi:x}", "İ"]


@pytest.fixture(scope="module")
def here() -> Iterator[Here]:
    with serving() as found:
        yield found


def infer(*ids: str) -> pb.ModelInferRequest:
    found = pb.ModelInferRequest(model_name="case")
    tensor = found.inputs.add(name="ids", datatype="BYTES", shape=[len(ids)])
    tensor.contents.bytes_contents.extend(each.encode() for each in ids)
    return found


def fine(here: Here) -> None:
    """Somebody else is answered on both ports."""
    assert here.ask("/v1/predict", {"ids": ["ada"]})[0] == 200
    assert here.call("ModelInfer", infer("ada")).outputs


def test_tokens_open_what_they_are_for(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    ended = add_token(path, "ended", until=date(2020, 1, 1))
    other = add_token(path, "other", models=("fraud",))
    few = add_token(path, "few", models=("case",), rows_a_day=2)
    with serving(path) as here:
        for token, status, code in (
            ("", 401, "UNAUTHENTICATED"),
            ("vfl_wrong", 401, "UNAUTHENTICATED"),
            (ended, 401, "UNAUTHENTICATED"),
            (other, 403, "PERMISSION_DENIED"),
        ):
            for at, body in PATHS.items():
                found, answer, _ = here.ask(at, body(["ada"]), authorization=f"Bearer {token}")
                assert (found, list(json.loads(answer))) == (status, ["error"])
            for method in MODELS:
                # Nothing of it is read, so it may be anything.
                assert here.refused(method, b"\xff" * 9, token)[0] == code
        # What says nothing of a model needs none.
        assert here.call("ServerReady", pb.ServerReadyRequest()).ready
        assert here.call("ModelInfer", infer("ada"), few).outputs
        assert here.ask("/v1/predict", {"ids": ["ada"]}, authorization=f"Bearer {few}")[0] == 200
        assert here.refused("ModelInfer", infer("ada"), few)[0] == "RESOURCE_EXHAUSTED"
        assert here.ask("/v1/predict", {"ids": ["ada"]}, authorization=f"bearer {few}")[0] == 429


def test_rows_of_a_request_that_had_no_room_are_not_spent(tmp_path: Path) -> None:
    token = add_token(tmp_path / "tokens.json", "few", rows_a_day=2)
    with serving(tmp_path / "tokens.json") as here:
        with patch.object(here.served.batcher, "submit", side_effect=Busy):
            for _ in range(3):
                status, _, _ = here.ask(
                    "/v1/predict", {"ids": ["ada", "bob"]}, authorization=f"Bearer {token}"
                )
                assert status == 503
                assert here.refused("ModelInfer", infer("ada", "bob"), token)[0] == "UNAVAILABLE"
        assert here.call("ModelInfer", infer("ada", "bob"), token).outputs
        assert here.refused("ModelInfer", infer("ada"), token)[0] == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("path", PATHS)
def test_bodies_that_are_too_large(here: Here, path: str) -> None:
    began_s = time.monotonic()
    assert here.ask(path, b" " * 10_000_000)[0] == 413
    # Within four MiB: as many ids as that has room for.
    assert here.ask(path, PATHS[path](["a"] * 1_000_000))[0] == 413
    assert time.monotonic() - began_s < 10.0
    fine(here)


def test_messages_that_are_too_large(here: Here) -> None:
    assert here.refused("ModelInfer", infer("a" * 10_000_000))[0] == "RESOURCE_EXHAUSTED"
    assert here.refused("ModelInfer", infer(*["a"] * 1_000_000))[0] == "RESOURCE_EXHAUSTED"
    assert here.refused("ModelInfer", infer("a" * 1001))[0] == "INVALID_ARGUMENT"
    fine(here)


def test_what_is_compressed_is_refused(here: Here) -> None:
    """It may be a thousand times as large afterwards."""
    bomb = gzip.compress(b" " * 10_000_000)
    status, _, _ = here.ask("/v1/predict", bomb, content_encoding="gzip")
    assert status in (400, 422)
    squeezed = gzip.compress(json.dumps({"ids": ["ada"]}).encode())
    assert here.ask("/v1/predict", squeezed, content_encoding="gzip")[0] in (400, 422)
    with grpc.insecure_channel(here.grpc, compression=grpc.Compression.Gzip) as channel:
        ask = channel.unary_unary(SERVICE + "ModelInfer")
        with pytest.raises(grpc.RpcError) as refused:
            ask(infer(*["ada" * 300] * 9).SerializeToString(), timeout=20)
    assert refused.value.code().name in ("INVALID_ARGUMENT", "UNIMPLEMENTED")
    fine(here)


@pytest.mark.parametrize("path", PATHS)
def test_ids_of_any_text_are_unknown(here: Here, path: str) -> None:
    status, body, _ = here.ask(path, PATHS[path](ODD[:2] + ODD[3:]))
    assert status == 200
    assert b"scored" not in body
    answer = here.call("ModelInfer", infer(*ODD[:2], *ODD[3:]))
    state = next(each for each in answer.outputs if each.name == "state")
    assert set(state.contents.bytes_contents) == {b"unknown"}


def test_requests_one_after_the_other_without_waiting(here: Here) -> None:
    """Pipelining: all are answered, in their order."""
    host, port = urlsplit(here.url).netloc.split(":")
    body = b'{"ids": ["ada"]}'
    head = "POST /v1/predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    one = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
    last = one.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(one * 9 + last)
        found = b""
        while data := line.recv(65536):
            found += data
    assert found.count(b"HTTP/1.1 200") == 10
    # Two lengths are none.
    with socket.create_connection((host, int(port)), timeout=20) as line:
        line.sendall(one.replace(b"content-length: 16", b"content-length: 16\r\ncontent-length: 9"))
        assert b" 400 " in line.recv(65536).split(b"\r\n")[0]
    fine(here)


def test_half_a_call_holds_nobody_up() -> None:
    # All calls must arrive before the first one ends, also on a busy machine.
    with patch.object(inference, "_REQUEST_S", 3.0), serving() as here:
        # It begins, and says nothing.
        more = threading.Event()

        def nothing() -> Iterator[bytes]:
            more.wait(20.0)
            yield from ()

        with grpc.insecure_channel(here.grpc) as channel:
            ask = channel.stream_stream(SERVICE + "ModelInfer")
            calls = [ask(nothing(), timeout=20.0) for _ in range(80)]
            # Some more than may come at once; after their time there is room again.
            codes = {call.code().name for call in calls}
            more.set()
        assert codes == {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
        wait_until(lambda: here.call("ModelInfer", infer("ada")).outputs)
        assert 500 not in here.served.counts.requests


def test_connections_that_say_nothing_hold_nobody_up(here: Here) -> None:
    host, port = here.grpc.split(":")
    with contextlib.ExitStack() as stack:
        for number in range(50):
            line = stack.enter_context(socket.create_connection((host, int(port)), timeout=20))
            if number % 2:
                line.sendall(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n" if number % 3 else b"PRI * HTTP")
        fine(here)


def test_who_is_gone_is_not_scored() -> None:
    """The deadline of a call travels: what waits when it is over is dropped."""
    began, go_on = threading.Event(), threading.Event()
    scored: list[Any] = []

    def slow(ids: Any, least: Any, columns: Any) -> Any:
        scored.extend(ids)
        began.set()
        go_on.wait(20.0)
        return score(ids, least, columns)

    with serving(scoring=slow) as here:
        # All that score are busy.
        many = scorer._MAX_BATCHES
        busy = [here.served.batcher.submit([f"a{number}"], 0.1 * number) for number in range(many)]
        wait_until(lambda: len(scored) == many)
        with grpc.insecure_channel(here.grpc) as channel, pytest.raises(grpc.RpcError) as late:
            channel.unary_unary(SERVICE + "ModelInfer")(
                infer("alate").SerializeToString(), timeout=0.2
            )
        assert late.value.code().name == "DEADLINE_EXCEEDED"
        wait_until(lambda: here.served.counts.requests[499] == 1)
        go_on.set()
        for each in busy:
            each.result(20.0)
        assert here.served.batcher.submit(["alast"]).result(20.0)
        assert "alate" not in scored


def test_a_failure_is_told_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("K-17 is in the way")

    with serving(scoring=fails) as here:
        assert here.refused("ModelInfer", infer("ada")) == (
            "INTERNAL",
            "internal error; see the log",
        )
        status, body, _ = here.ask("/v2/models/case/infer", PATHS["/v2/models/case/infer"](["ada"]))
        assert status == 500
        assert b"K-17" not in body
        assert here.served.counts.requests[500] == 2
    assert "internal error" in caplog.text


def test_gRPC_has_the_certificate_of_HTTP(tmp_path: Path) -> None:  # noqa: N802 - their names
    root = company(tmp_path)
    files = written(tmp_path, "https", root.leaf(dns("localhost")))
    with serving(certificate=files.certificate, key=files.key) as here:
        credentials = grpc.ssl_channel_credentials(root.pem)
        options = [("grpc.ssl_target_name_override", "localhost")]
        with grpc.secure_channel(here.grpc, credentials, options=options) as channel:
            ask = channel.unary_unary(SERVICE + "ModelInfer")
            found = pb.ModelInferResponse.FromString(
                ask(infer("ada").SerializeToString(), timeout=20)
            )
            assert found.model_name == "case"
        with grpc.insecure_channel(here.grpc) as channel, pytest.raises(grpc.RpcError) as plain:
            channel.unary_unary(SERVICE + "ServerLive")(b"", timeout=20)
        assert plain.value.code().name == "UNAVAILABLE"
        context = ssl.create_default_context(cadata=root.pem.decode())
        host, port = urlsplit(here.url).netloc.split(":")
        line = socket.create_connection((host, int(port)), timeout=20)
        with context.wrap_socket(line, server_hostname="localhost") as secure:
            assert secure.version() in ("TLSv1.2", "TLSv1.3")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        for ciphers, is_accepted in (
            ("ECDHE-ECDSA-AES128-GCM-SHA256", True),
            ("ECDHE-ECDSA-AES256-SHA", False),
            ("AES256-GCM-SHA384", False),  # Without forward secrecy.
        ):
            context.set_ciphers(ciphers)
            expected = contextlib.nullcontext() if is_accepted else pytest.raises(OSError)
            line = socket.create_connection((host, int(port)), timeout=20)
            with expected, context.wrap_socket(line, server_hostname="localhost") as secure:
                assert secure.cipher()[0] == ciphers  # type: ignore[index]


def test_ids_are_in_no_answer_that_refuses(here: Here) -> None:
    marked = "secret-of-somebody"
    for at, body in PATHS.items():
        for wrong in (
            body([marked, None]),
            body([marked] * 11),
            {**body([marked]), "more": marked},
        ):
            status, answer, _ = here.ask(at, wrong)
            if status != 200:
                assert marked.encode() not in answer
    _, why = here.refused("ModelInfer", infer(*[marked] * 11))
    assert marked not in why
    assert np.all([each in (200, 413, 422, 400) for each in here.served.counts.requests])

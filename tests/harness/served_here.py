"""A served model without parties, in this process: who asks it gets 1 for each id."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np

from tests.harness.serving import catalog, made_served
from vfl_common.config.party import ServeSettings
from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_serve.http.app import listening, make_app
from vfl_serve.rpc import serve_grpc
from vfl_serve.scored import Counts, RequestPart, ServedScores
from vfl_serve.served import Served
from vfl_serve.telling import RequestReporter
from vfl_serve.tokens import Tokens

SERVICE = "/inference.GRPCInferenceService/"


def score(ids: Sequence[str], _least: float | None, _columns: Any) -> ServedScores:
    """Knows whoever has a name that begins with a."""
    parts = [RequestPart(("bank",), {}), RequestPart((), {"bank": "unknown id"})]
    of = np.array([0 if each.startswith("a") else 1 for each in ids])
    columns = {"score": np.full(len(ids), 0.1), "class": np.ones(len(ids), np.int64)}
    return ServedScores(
        columns, ["unknown" if each else "scored" for each in of.tolist()], parts, of
    )


@dataclass
class Here:
    """What is served, and where. ``columns``: those that were given with the last requests."""

    served: Served
    settings: ServeSettings
    url: str = ""
    grpc: str = ""
    columns: list[Any] = field(default_factory=list)

    def ask(
        self, path: str, body: bytes | Any, **headers: str
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Returns status, body and headers of the answer to a POST."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"content-type": "application/json"}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        line = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        with contextlib.closing(line):
            line.request("POST", path, data, given)
            answer = line.getresponse()
            return answer.status, answer.read(), answer.headers

    def call(self, method: str, asked: Any, token: str = "", **more: Any) -> Any:
        """Returns the answer to a call of gRPC. Raises grpc.RpcError."""
        kind = getattr(pb, f"{method}Response")
        data = asked if isinstance(asked, bytes) else asked.SerializeToString()
        metadata = [("authorization", f"Bearer {token}")] if token else []
        with grpc.insecure_channel(self.grpc) as channel:
            ask = channel.unary_unary(SERVICE + method)
            return kind.FromString(ask(data, timeout=30, metadata=metadata, **more))

    def refused(self, method: str, asked: Any, token: str = "") -> tuple[str, str]:
        """Returns the status code of a call that is refused, and why."""
        try:
            self.call(method, asked, token)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        raise AssertionError("the call is answered")


@contextlib.contextmanager
def serving(
    tokens: Path | None = None,
    scoring: Callable[..., ServedScores] = score,
    reporter: RequestReporter | None = None,
    **settings: Any,
) -> Iterator[Here]:
    """Serves over both ports; ``settings``: of the table ``serve``."""
    given = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"} | settings
    found = ServeSettings(**given)
    seen: list[Any] = []

    def scored(ids: Sequence[str], least: float | None, columns: Any) -> ServedScores:
        seen.append(columns)
        return scoring(ids, least, columns)

    known, counts = Tokens(tokens), Counts()
    columns = {"score": np.dtype(float), "class": np.dtype(int)}
    served = made_served(
        scored, columns=columns, parties=("bank", "shop"), tokens=known, counts=counts
    )
    models = catalog(known, counts, served)
    here = Here(served, found, columns=seen)
    with contextlib.ExitStack() as stack:
        stack.callback(served.batcher.close)
        app = make_app(models, None, reporter)
        here.url = stack.enter_context(listening(app, found)).url
        here.grpc = stack.enter_context(serve_grpc(models, found, reporter)) or ""
        yield here

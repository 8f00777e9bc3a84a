"""A feature service by the published schema of SecretFlow-Serving: ``BatchFeatureService``, its
``BatchFetchFeature`` over HTTP, with JSON as protobuf writes it.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATH = "/BatchFeatureService/BatchFetchFeature"
NOT_FOUND, INVALID_ARGUMENT = 5, 3
# FieldType, and the list of FeatureValue that has its values.
LISTS = {
    "FIELD_BOOL": "bs",
    "FIELD_INT32": "i32s",
    "FIELD_INT64": "i64s",
    "FIELD_FLOAT": "fs",
    "FIELD_DOUBLE": "ds",
    "FIELD_STRING": "ss",
}


@dataclass
class FeatureService:
    """Answers from ``rows``: {id: {feature: value}}.

    ``types``: {feature: its FieldType}, if it is another one than what is asked for. ``change``:
    changes an answer, which is a dict, or bytes. ``asked``: the requests. ``slow_s``: before each
    answer. ``closes``: whether a connection is closed after each answer.
    """

    rows: dict[str, dict[str, Any]]
    types: dict[str, str] = field(default_factory=dict)
    change: Callable[[dict[str, Any]], Any] = lambda answer: answer
    asked: list[dict[str, Any]] = field(default_factory=list)
    slow_s: float = 0.0
    closes: bool = False
    status: int = 200
    url: str = ""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        ids = request["param"]["query_datas"]
        if len(set(ids)) < len(ids):
            return {"status": {"code": INVALID_ARGUMENT, "msg": "query datas are duplicated."}}
        if not set(ids) <= set(self.rows):
            return {"status": {"code": NOT_FOUND, "msg": "not all ids are found"}}
        features = []
        for each in request["feature_fields"]:
            name, kind = each["name"], self.types.get(each["name"], each["type"])
            values = [_json(self.rows[one][name], kind) for one in ids]
            value = {LISTS[kind]: values}
            features.append({"field": {"name": name, "type": kind}, "value": value})
        return {"header": {"data": {}}, "status": {"code": 0, "msg": ""}, "features": features}


def _json(value: Any, kind: str) -> Any:
    """Writes a value as proto3's JSON does: 64 bits are a text, NaN is one, nothing is none."""
    if kind == "FIELD_STRING":
        return "" if value is None else str(value)
    if kind == "FIELD_INT64":
        return str(value)
    return "NaN" if value is None else value


@contextmanager
def serving(service: FeatureService, tls: ssl.SSLContext | None = None) -> Iterator[FeatureService]:
    """Serves it on loopback while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # The body does not wait until the headers have arrived.
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/json"
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            service.asked.append(request)
            time.sleep(service.slow_s)
            answer = service.change(service.answer(request))
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(service.status if self.path == PATH else 404)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            # Without a word to the other side, as a load balancer does.
            self.close_connection = service.closes

        def log_message(self, *_args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        scheme = "http" if tls is None else "https"
        service.url = f"{scheme}://localhost:{server.server_address[1]}{PATH}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield service
        finally:
            server.shutdown()

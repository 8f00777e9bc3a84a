"""The gRPC port of the active party: the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vfl_common.config.party import ServeSettings
from vfl_common.process.logs import version
from vfl_common.rpc.inference import (
    InferenceAnswer,
    InferenceRefusal,
    InferenceRequest,
    ModelDescription,
    run_inference_server,
)
from vfl_serve.http.catalog import Catalog
from vfl_serve.telling import RequestReporter, RequestTrace, set_current_request
from vfl_serve.tokens import Denied
from vfl_serve.v2 import (
    EXTENSIONS,
    choose_outputs,
    describe_model,
    make_outputs,
    read_columns,
    read_ids,
    read_min_quality,
)

# {HTTP status: gRPC code}. Both ports count requests by HTTP status.
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    413: "RESOURCE_EXHAUSTED",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
}
_STATUSES = {"OK": 200} | {code: status for status, code in reversed(_CODES.items())}


class InferenceModel:
    """Answers gRPC requests; see ``vfl_common.rpc.inference.InferenceBackend``."""

    def __init__(self, models: Catalog[Any], reporter: RequestReporter | None) -> None:
        self._models, self._reporter = models, reporter

    def begin_call(self, method: str, metadata: Mapping[str, str]) -> Callable[[str], None]:
        """Starts a request; returns a callback for its end, which takes the gRPC code."""
        request, reporter = (
            RequestTrace("grpc", method, metadata.get("traceparent", "")),
            self._reporter,
        )
        if reporter is not None:
            set_current_request(request)

        def end(code: str) -> None:
            self._models.counts.count_answered(_STATUSES[code])
            if reporter is not None:
                reporter.report(request, _STATUSES[code])

        return end

    def admit(self, authorization: str) -> None:
        """Raises InferenceRefusal if the caller may use none of the models."""
        with _convert_denials():
            self._models.allow(authorization)

    def ready(self) -> bool:
        """Returns whether requests can be answered."""
        return self._models.ready()

    def server(self) -> tuple[str, str, list[str]]:
        """Returns the server's name, version and extensions."""
        return "vfl", version(), EXTENSIONS

    def describe(self, name: str, version: str, authorization: str) -> ModelDescription:
        """Returns the inputs and outputs of a model. Raises InferenceRefusal."""
        with _convert_denials():
            served, _ = self._models.open(authorization, name, version or None)
        inputs, outputs = describe_model(served.columns, served.parties)
        return ModelDescription(served.name, self._models.versions(served), "vfl", inputs, outputs)

    async def infer(self, asked: InferenceRequest, authorization: str) -> InferenceAnswer:
        """Scores the ids of a request. Raises InferenceRefusal."""
        with _convert_denials():
            served, token = self._models.open(authorization, asked.model, asked.version or None)
            ids = read_ids(asked.inputs)
            columns = read_columns(asked.inputs, len(ids))
            scores = await served.score(ids, token, read_min_quality(asked.parameters), columns)
            outputs = choose_outputs(make_outputs(scores, served.parties), asked.outputs)
        return InferenceAnswer(served.name, served.run_id, outputs)


@contextmanager
def serve_grpc(
    models: Catalog[Any], settings: ServeSettings, reporter: RequestReporter | None = None
) -> Iterator[str | None]:
    """Answers gRPC while the block runs, if ``serve.grpc`` is set. Raises InputError.

    Yields the address, or None. ``reporter``: Logs each request; None: requests are not logged.
    """
    if settings.grpc is None:
        yield None
        return
    secret = None
    # The HTTP port has already checked both files.
    if settings.certificate is not None and settings.key is not None:
        secret = Path(settings.key).read_bytes(), Path(settings.certificate).read_bytes()
    with run_inference_server(InferenceModel(models, reporter), settings.grpc, secret) as address:
        yield address


@contextmanager
def _convert_denials() -> Iterator[None]:
    """Converts ``Denied`` with its HTTP status into ``InferenceRefusal`` with a gRPC code."""
    try:
        yield
    except Denied as why:
        raise InferenceRefusal(_CODES.get(why.status, "INTERNAL"), why.why) from None

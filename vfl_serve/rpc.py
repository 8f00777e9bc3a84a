"""The gRPC port of the active party: the Open Inference Protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from vfl_common.config.party import ServeSettings
from vfl_common.process.logs import version
from vfl_common.rpc.inference import (
    NUMBER,
    TEXT,
    TRUTH,
    WHOLE,
    InferenceAnswer,
    InferenceRefusal,
    InferenceRequest,
    ModelDescription,
    Tensor,
    TensorError,
    run_inference_server,
    values,
)
from vfl_party.data.id_rules import SEPARATOR
from vfl_serve.scored import ServedScores
from vfl_serve.served import Catalog
from vfl_serve.telling import RequestReporter, RequestTrace, set_current_request
from vfl_serve.tokens import Denied

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


IDS = "ids"


# Supported extensions of the protocol.
EXTENSIONS = ["binary_tensor_data"]


def read_ids(inputs: Sequence[Tensor]) -> list[str]:
    """Returns the ids of the input ``ids``: BYTES, [N] or [N, columns of an id]. Raises Denied."""
    names = [tensor.name for tensor in inputs]
    if names.count(IDS) != 1 or len(set(names)) != len(names):
        raise Denied(400, "inputs: must have the input ids, and each input once")
    tensor = inputs[names.index(IDS)]
    if tensor.datatype != TEXT:
        raise Denied(400, "inputs: ids: datatype must be BYTES")
    cells = _read_values(tensor)
    if not all(isinstance(cell, str) for cell in cells):
        raise Denied(400, "inputs: ids: data must be text")
    rows, *columns = tensor.shape or [0]
    per = columns[0] if columns else 1
    if per < 1:
        raise Denied(400, "inputs: ids: shape must be [N], or [N, columns of an id]")
    return [SEPARATOR.join(cells[at * per : (at + 1) * per]) for at in range(rows)]


def read_columns(inputs: Sequence[Tensor], n: int) -> dict[str, list[Any]] | None:
    """Returns all inputs except ``ids``, [N] or [N, 1]: the active party's columns of ``n`` rows.

    None if there are no such inputs. Raises Denied.
    """
    columns = {}
    for tensor in inputs:
        if tensor.name == IDS:
            continue
        if tuple(tensor.shape) not in ((n,), (n, 1)):
            raise Denied(400, f"inputs: {tensor.name}: shape must be [{n}], one value for each id")
        columns[tensor.name] = _read_values(tensor)
    return columns or None


def read_min_quality(parameters: Mapping[str, Any]) -> float | None:
    """Returns the requested minimum quality; None for any quality. Raises Denied."""
    value = parameters.get("min_quality")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Denied(400, "parameters: min_quality must be a finite number")
    return value


def _read_values(tensor: Tensor) -> list[Any]:
    try:
        return values(tensor)
    except TensorError as error:
        raise Denied(400, f"inputs: {error}") from None


def make_outputs(scores: ServedScores, parties: Sequence[str]) -> list[Tensor]:
    """Returns all outputs. ``parties``: all parties, in the recipe's order.

    ``state``, ``parties`` (names separated by commas) and ``run`` are text. ``present`` is bool [N,
    parties], whether each party took part. ``expected_quality`` is a number. Rows without a score
    have None or '' in the result columns.
    """
    n, has_score, numbers = len(scores), scores.has_score, scores.part_numbers.tolist()
    tensors = []
    for name, column in scores.columns.items():
        datatype = get_datatype(column.dtype)
        missing = "" if datatype == TEXT else None
        data = [
            value if has else missing for value, has in zip(column.tolist(), has_score, strict=True)
        ]
        tensors.append(Tensor(name, datatype, (n,), data))
    names, runs = (
        [",".join(part.parties) for part in scores.parts],
        [part.run for part in scores.parts],
    )
    took_part = [[name in part.parties for name in parties] for part in scores.parts]
    quality = [part.quality for part in scores.parts]
    return [
        *tensors,
        Tensor("state", TEXT, (n,), list(scores.state)),
        Tensor("parties", TEXT, (n,), [names[number] for number in numbers]),
        Tensor("run", TEXT, (n,), [runs[number] for number in numbers]),
        Tensor(
            "present",
            TRUTH,
            (n, len(parties)),
            [flag for number in numbers for flag in took_part[number]],
        ),
        Tensor("expected_quality", NUMBER, (n,), [quality[number] for number in numbers]),
    ]


def choose_outputs(outputs: Sequence[Tensor], names: Sequence[str]) -> list[Tensor]:
    """Returns the outputs with these names; all outputs without ``names``. Raises Denied."""
    by_name = {output.name: output for output in outputs}
    if any(name not in by_name for name in names):
        raise Denied(400, f"outputs: choose among {', '.join(by_name)}")
    return [by_name[name] for name in names] or list(outputs)


def describe_model(
    columns: Mapping[str, np.dtype[Any]], parties: Sequence[str]
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the inputs and outputs of a model without data; -1 stands for any size.

    The active party's columns are not listed: clients treat listed inputs as required.
    """
    outputs = [Tensor(name, get_datatype(dtype), (-1,), ()) for name, dtype in columns.items()]
    outputs += [
        Tensor("state", TEXT, (-1,), ()),
        Tensor("parties", TEXT, (-1,), ()),
        Tensor("run", TEXT, (-1,), ()),
        Tensor("present", TRUTH, (-1, len(parties)), ()),
        Tensor("expected_quality", NUMBER, (-1,), ()),
    ]
    return [Tensor(IDS, TEXT, (-1,), ())], outputs


def get_datatype(dtype: np.dtype[Any]) -> str:
    """Returns the protocol's datatype for a numpy dtype of a result column."""
    if np.issubdtype(dtype, np.integer):
        return WHOLE
    return NUMBER if np.issubdtype(dtype, np.floating) else TEXT

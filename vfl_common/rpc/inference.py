"""The Open Inference Protocol, version 2: its tensors, requests and answers, the gRPC service
``inference.GRPCInferenceService``, which checks access and limits the time of a request, and a
server for it in a thread with its own event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_common.rpc.channel import Handler, check_address
from vfl_common.text import clean

TEXT, TRUTH, WHOLE, NUMBER = "BYTES", "BOOL", "INT64", "FP64"
_DTYPES = {
    TRUTH: np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}
# The values for a missing element in datatypes without null.
_MISSING_VALUES: dict[str, Any] = {NUMBER: math.nan, WHOLE: -(2**63)}
# The length, before each element of a BYTES tensor.
_LENGTH_FORMAT = struct.Struct("<I")


class TensorError(ValueError):
    """A tensor of a request is not valid. The text gives the reason."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a request or an answer.

    Args:
        shape: The shape; empty for a requested output of any shape.
        data: The elements in row-major order, or their bytes as ``raw`` returns them.
        parameters: The protocol's parameters of the tensor.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any] | bytes
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of elements that the shape has."""
        return math.prod(self.shape)


def values(tensor: Tensor) -> list[Any]:
    """Returns the elements of a tensor: texts, numbers in the range of the datatype, or None for
    null. Raises TensorError.
    """
    name, datatype = tensor.name, tensor.datatype
    if datatype != TEXT and datatype not in _DTYPES:
        raise TensorError(f"{name}: datatype must be BYTES, {', '.join(_DTYPES)}")
    data = tensor.data
    elements = (
        _convert_raw(tensor, data) if isinstance(data, bytes) else _convert_list(tensor, data)
    )
    if len(elements) != tensor.count:
        raise TensorError(f"{name}: data must have as many elements as the shape")
    return elements


def _convert_list(tensor: Tensor, data: Sequence[Any]) -> list[Any]:
    if tensor.datatype == TEXT:
        return [_decode_text(tensor.name, element) for element in data]
    dtype = _DTYPES[tensor.datatype]
    kinds: tuple[type, ...] = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    present = [element for element in data if element is not None]
    # The second condition is needed because Python's bool is a subclass of int.
    if not all(isinstance(element, kinds) for element in present) or (
        bool not in kinds and any(isinstance(element, bool) for element in present)
    ):
        raise TensorError(f"{tensor.name}: data must be of datatype {tensor.datatype}")
    try:
        # A number that is too large for the float type becomes infinity.
        with np.errstate(over="ignore"):
            rounded = iter(np.array(present, dtype).tolist())
    except OverflowError:
        raise TensorError(
            f"{tensor.name}: data has a number that {tensor.datatype} cannot hold"
        ) from None
    return [None if element is None else next(rounded) for element in data]


def _convert_raw(tensor: Tensor, data: bytes) -> list[Any]:
    if tensor.datatype == TEXT:
        return [_decode_text(tensor.name, element) for element in _split_texts(tensor, data)]
    dtype = _DTYPES[tensor.datatype]
    if len(data) != tensor.count * dtype.itemsize:
        raise TensorError(
            f"{tensor.name}: shape and datatype need {tensor.count * dtype.itemsize:,} bytes (got "
            f"{len(data):,})"
        )
    if dtype.kind == "b":
        return [byte != 0 for byte in data]
    elements: list[Any] = np.frombuffer(data, dtype).tolist()
    return elements


def _split_texts(tensor: Tensor, data: bytes) -> list[bytes]:
    elements, end = list[bytes](), 0
    while end < len(data) and len(elements) <= tensor.count:
        start = end + _LENGTH_FORMAT.size
        if start > len(data):
            break
        end = start + _LENGTH_FORMAT.unpack_from(data, start - _LENGTH_FORMAT.size)[0]
        elements.append(data[start:end])
    if end != len(data) or len(elements) != tensor.count:
        raise TensorError(
            f"{tensor.name}: the bytes must hold as many elements as the shape, each after its "
            "length in 4 bytes"
        )
    return elements


def _decode_text(name: str, element: Any) -> Any:
    if isinstance(element, str) or element is None:
        return element
    if not isinstance(element, bytes):
        raise TensorError(f"{name}: data must be of datatype BYTES")
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise TensorError(f"{name}: text must be UTF-8") from None


def fill_missing(tensor: Tensor) -> Sequence[Any]:
    """Returns the elements of an output for clients. None becomes NaN, or the smallest INT64."""
    missing = _MISSING_VALUES.get(tensor.datatype)
    return [missing if element is None else element for element in tensor.data]


def raw(tensor: Tensor) -> bytes:
    """Returns the elements of a tensor as little-endian bytes. Each BYTES element follows its
    length in four bytes.
    """
    if tensor.datatype != TEXT:
        return np.array(fill_missing(tensor), _DTYPES[tensor.datatype]).tobytes()
    texts = [element.encode() for element in fill_missing(tensor)]
    return b"".join(part for text in texts for part in (_LENGTH_FORMAT.pack(len(text)), text))


# The maximum numbers of inputs and outputs of a request, because each takes work even if it is
# small.
_MAX_INPUTS, _MAX_OUTPUTS = 1_000, 1_000
# {datatype: the field of the protobuf message with its elements}.
_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


@dataclass(frozen=True)
class InferenceRequest:
    """A request for inference.

    Args:
        version: The model's version; '' for any version.
        id: The request's id, which the answer repeats.
        outputs: The names of the requested outputs; empty for all outputs.
        raw: Whether the tensors of the request, and so of the answer, are raw bytes.
    """

    model: str
    version: str
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False


@dataclass(frozen=True)
class InferenceAnswer:
    """An answer of one version of a model."""

    model: str
    version: str
    outputs: Sequence[Tensor]


@dataclass(frozen=True)
class ModelDescription:
    """The description of a model for its clients. Its tensors have no data; -1 in a shape means any
    size.
    """

    model: str
    versions: Sequence[str]
    platform: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def read_request(message: pb.ModelInferRequest) -> InferenceRequest:
    """Converts a gRPC message to a request. Raises TensorError if the message is not valid."""
    if len(message.inputs) > _MAX_INPUTS or len(message.outputs) > _MAX_OUTPUTS:
        raise TensorError(
            f"a request may have at most {_MAX_INPUTS:,} inputs and {_MAX_OUTPUTS:,} outputs"
        )
    raw_inputs = message.raw_input_contents
    if raw_inputs and len(raw_inputs) != len(message.inputs):
        raise TensorError("raw_input_contents: must have one element for each input")
    if raw_inputs and any(tensor.HasField("contents") for tensor in message.inputs):
        raise TensorError("inputs: must have contents or raw_input_contents, not both")
    inputs = [
        Tensor(
            tensor.name,
            tensor.datatype,
            _check_shape(tensor.name, tensor.shape),
            raw_inputs[number] if raw_inputs else _get_elements(tensor),
            _parse_parameters(tensor.parameters),
        )
        for number, tensor in enumerate(message.inputs)
    ]
    return InferenceRequest(
        message.model_name,
        message.model_version,
        message.id,
        inputs,
        [output.name for output in message.outputs],
        _parse_parameters(message.parameters),
        bool(raw_inputs),
    )


def _check_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > 2 or any(not 0 <= size < 2**31 for size in shape):
        raise TensorError(f"{name}: shape must be [N] or [N, number of id columns]")
    return tuple(shape)


def _get_elements(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    expected_field = _FIELDS.get(tensor.datatype)
    other_fields = [
        field.name for field, _ in tensor.contents.ListFields() if field.name != expected_field
    ]
    if other_fields:
        raise TensorError(f"{tensor.name}: datatype and {other_fields[0]} do not match")
    return list(getattr(tensor.contents, expected_field)) if expected_field is not None else []


def _parse_parameters(messages: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    kinds = {name: message.WhichOneof("parameter_choice") for name, message in messages.items()}
    return {name: getattr(messages[name], kind) for name, kind in kinds.items() if kind is not None}


def write_answer(asked: InferenceRequest, answer: InferenceAnswer) -> pb.ModelInferResponse:
    """Converts an answer to a gRPC message, with raw bytes or with typed fields as in the
    request.
    """
    message = pb.ModelInferResponse(
        model_name=answer.model, model_version=answer.version, id=asked.id
    )
    for output in answer.outputs:
        tensor = message.outputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        if asked.raw:
            message.raw_output_contents.append(raw(output))
            continue
        data = fill_missing(output)
        if output.datatype == "BYTES":
            data = [value.encode() for value in data]
        getattr(tensor.contents, _FIELDS[output.datatype]).extend(data)
    return message


def write_description(described: ModelDescription) -> pb.ModelMetadataResponse:
    """Converts a model's description to a gRPC message."""
    message = pb.ModelMetadataResponse(
        name=described.model, versions=described.versions, platform=described.platform
    )
    for tensor in described.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    for tensor in described.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    return message


SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
# The time limit for a request to arrive completely.
_REQUEST_S = 10.0
# The maximum number of requests that arrive at the same time, because each may take the memory of
# the largest message.
_MAX_ARRIVING = 64

log = logging.getLogger(__name__)


@dataclass
class InferenceRefusal(Exception):  # noqa: N818 - an answer to a caller, not a fault
    """A caller gets no answer. ``code``: the name of gRPC's status code. ``why``: the reason, for
    the caller.
    """

    code: str
    why: str


class InferenceBackend(Protocol):
    """The served model. Each method may raise InferenceRefusal.

    ``authorization``: the caller's metadata ``authorization``, or ''.
    """

    def admit(self, authorization: str) -> None:
        """Raises InferenceRefusal if the caller has no access. It is called before the request is
        read.
        """

    def ready(self) -> bool:
        """Returns whether requests can be answered."""
        ...

    def server(self) -> tuple[str, str, list[str]]:
        """Returns the name, the version and the extensions of this server."""
        ...

    def describe(self, name: str, version: str, authorization: str) -> ModelDescription:
        """Returns the description of a model for clients."""
        ...

    async def infer(self, asked: InferenceRequest, authorization: str) -> InferenceAnswer:
        """Scores the rows of a request."""
        ...

    def begin_call(self, method: str, metadata: Mapping[str, str]) -> Callable[[str], None]:
        """Records the start of a call, in the call's context. Returns a function that must be
        called with the status code when the call ends.
        """
        ...


RequestMessage = TypeVar("RequestMessage", bound=Message)
AnswerFunction = Callable[[RequestMessage, str], Awaitable[Message]]


class InferenceService:
    """Answers the calls of the service in an event loop."""

    def __init__(self, model: InferenceBackend) -> None:
        self._model = model
        self._num_arriving = 0

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        # A method with one message in each direction is also a stream: see
        # ``channel.stream_handler``.
        handlers = {
            "ServerLive": self._method("ServerLive", pb.ServerLiveRequest, self._live),
            "ServerReady": self._method("ServerReady", pb.ServerReadyRequest, self._ready),
            "ServerMetadata": self._method(
                "ServerMetadata", pb.ServerMetadataRequest, self._server
            ),
            "ModelReady": self._method("ModelReady", pb.ModelReadyRequest, self._model_ready),
            "ModelMetadata": self._method(
                "ModelMetadata", pb.ModelMetadataRequest, self._model_metadata
            ),
            "ModelInfer": self._method("ModelInfer", pb.ModelInferRequest, self._infer),
        }
        return grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _method(
        self, name: str, kind: type[RequestMessage], answer: AnswerFunction[RequestMessage]
    ) -> Any:
        async def serve(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            metadata = dict(context.invocation_metadata() or ())
            end_call = self._model.begin_call(name, metadata)
            try:
                answer_bytes = await self._answer(name, kind, answer, requests, metadata)
            except InferenceRefusal as refusal:
                end_call(refusal.code)
                # The text is cut, because it may quote a long request and a status must be short.
                await context.abort(grpc.StatusCode[refusal.code], clean(refusal.why))
            except asyncio.CancelledError:
                # The caller has left, or its deadline is over.
                end_call("CANCELLED")
                raise
            end_call("OK")
            yield answer_bytes

        return grpc.stream_stream_rpc_method_handler(serve)

    async def _answer(
        self,
        name: str,
        kind: type[RequestMessage],
        answer: AnswerFunction[RequestMessage],
        requests: AsyncIterator[bytes],
        metadata: Mapping[str, str],
    ) -> bytes:
        """Reads a request and answers it. Raises InferenceRefusal."""
        authorization = metadata.get("authorization", "")
        try:
            if not name.startswith("Server"):
                self._model.admit(authorization)
            message = kind.FromString(await self._read(requests))
            return (await answer(message, authorization)).SerializeToString()
        except DecodeError:
            raise InferenceRefusal(
                "INVALID_ARGUMENT", "the message is not a request of this method"
            ) from None
        except TensorError as error:
            raise InferenceRefusal("INVALID_ARGUMENT", str(error)) from None
        except (InferenceRefusal, grpc.RpcError):
            raise
        except Exception:
            log.exception("internal error", extra={"event": "failed"})
            raise InferenceRefusal("INTERNAL", "internal error; see the log") from None

    async def _read(self, requests: AsyncIterator[bytes]) -> bytes:
        """Reads the message of a request. Raises InferenceRefusal."""
        if self._num_arriving >= _MAX_ARRIVING:
            raise InferenceRefusal("UNAVAILABLE", "too many requests; try again later")
        self._num_arriving += 1
        try:
            return await asyncio.wait_for(anext(aiter(requests)), _REQUEST_S)
        except TimeoutError:
            raise InferenceRefusal(
                "DEADLINE_EXCEEDED", "the request did not arrive in time"
            ) from None
        except StopAsyncIteration:
            raise InferenceRefusal("INVALID_ARGUMENT", "the call has no request") from None
        finally:
            self._num_arriving -= 1

    async def _live(self, _asked: pb.ServerLiveRequest, _who: str) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def _ready(self, _asked: pb.ServerReadyRequest, _who: str) -> pb.ServerReadyResponse:
        # The check runs in a thread, because it may write to a disk.
        return pb.ServerReadyResponse(ready=await asyncio.to_thread(self._model.ready))

    async def _server(
        self, _asked: pb.ServerMetadataRequest, _who: str
    ) -> pb.ServerMetadataResponse:
        name, version, extensions = self._model.server()
        return pb.ServerMetadataResponse(name=name, version=version, extensions=extensions)

    async def _model_ready(self, asked: pb.ModelReadyRequest, who: str) -> pb.ModelReadyResponse:
        self._model.describe(asked.name, asked.version, who)
        return pb.ModelReadyResponse(ready=True)

    async def _model_metadata(
        self, asked: pb.ModelMetadataRequest, who: str
    ) -> pb.ModelMetadataResponse:
        return write_description(self._model.describe(asked.name, asked.version, who))

    async def _infer(self, message: pb.ModelInferRequest, who: str) -> pb.ModelInferResponse:
        asked = read_request(message)
        return write_answer(asked, await self._model.infer(asked, who))


# The maximum size of a request, as over HTTP.
_MAX_BYTES = 4 << 20
# The maximum number of concurrent calls, and of connections.
_MAX_AT_ONCE = 1_000
_CLOSE_S = 10.0
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", _MAX_BYTES),
    # Answers are not limited, because an answer may be larger than its request.
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", _MAX_AT_ONCE),
    ("grpc.max_concurrent_streams", 100),
    # The time limit for a caller to begin HTTP/2, with or without TLS.
    ("grpc.server_handshake_timeout_ms", 10_000),
    # Idle connections are closed. Clients reconnect automatically.
    ("grpc.max_connection_idle_ms", 60_000),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # gRPC reads only little of a request ahead of the service.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 64 << 10),
    # A compressed message may decompress to a thousand times its size.
    ("grpc.per_message_decompression", 0),
]
Bound = tuple[int, asyncio.AbstractEventLoop, asyncio.Event]


@contextmanager
def run_inference_server(
    model: InferenceBackend, address: str, secret: tuple[bytes, bytes] | None
) -> Iterator[str]:
    """Serves ``model`` while the block runs; yields the address with its real port.

    Args:
        address: The host:port; port 0 takes a free port.
        secret: The key and the certificate in PEM; None for a server without TLS.

    Raises InputError (ADDRESS_INVALID, ADDRESS_IN_USE).
    """
    check_address(address)
    bound: Future[Bound] = Future()
    server_task = _serve(InferenceService(model), address, secret, bound)
    thread = threading.Thread(
        target=asyncio.run, args=(server_task,), name="inference", daemon=True
    )
    thread.start()
    port, loop, stop = bound.result()
    try:
        yield f"{address.rpartition(':')[0]}:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=2 * _CLOSE_S)


async def _serve(
    service: InferenceService,
    address: str,
    secret: tuple[bytes, bytes] | None,
    bound: Future[Bound],
) -> None:
    stop = asyncio.Event()
    try:
        server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_AT_ONCE)
        server.add_generic_rpc_handlers((service.handler(),))
        port = _bind(server, address, secret)
        await server.start()
    except BaseException as error:
        bound.set_exception(error)
        raise
    bound.set_result((port, asyncio.get_running_loop(), stop))
    await stop.wait()
    await server.stop(_CLOSE_S)


def _bind(server: Any, address: str, secret: tuple[bytes, bytes] | None) -> int:
    if secret is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials([secret])
    return int(server.add_secure_port(address, credentials))

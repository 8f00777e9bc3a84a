"""The gRPC service ``inference.GRPCInferenceService``: checks access, limits the time of a request,
and refuses requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_common.rpc.channel import Handler
from vfl_common.rpc.inference.contents import (
    InferenceAnswer,
    InferenceRequest,
    ModelDescription,
    read_request,
    write_answer,
    write_description,
)
from vfl_common.rpc.inference.tensors import TensorError
from vfl_common.text import clean

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

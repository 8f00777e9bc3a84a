"""Requests and answers of the Open Inference Protocol, and their conversion to gRPC messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_common.rpc.inference.tensors import Tensor, TensorError, fill_missing, raw

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

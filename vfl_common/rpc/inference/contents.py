"""Requests and answers of the Open Inference Protocol, and their way into messages of gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vfl_common.pb.inference import open_inference_grpc_pb2 as pb
from vfl_common.rpc.inference.tensors import Tensor, TensorError, filled, raw

# Of a request; each costs work, whatever it has.
_MOST_INPUTS, _MOST_OUTPUTS = 1_000, 1_000
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
class Asked:
    """A request for inference.

    Args:
        version: of the model; '' for any.
        id: comes back with the answer.
        outputs: the names of those that are wanted; empty for all.
        raw: whether the answer has bytes, as the request has.
    """

    model: str
    version: str
    id: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    raw: bool = False


@dataclass(frozen=True)
class Answer:
    """An answer, by the model's name and version."""

    model: str
    version: str
    outputs: Sequence[Tensor]


@dataclass(frozen=True)
class Described:
    """A model, as its clients learn of it: tensors without data, -1 in a shape for any size."""

    model: str
    versions: Sequence[str]
    platform: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]


def read_request(message: pb.ModelInferRequest) -> Asked:
    """Reads a request. Raises TensorError."""
    if len(message.inputs) > _MOST_INPUTS or len(message.outputs) > _MOST_OUTPUTS:
        text = f"inputs, outputs: give at most {_MOST_INPUTS:,} and {_MOST_OUTPUTS:,}"
        raise TensorError(text)
    given = message.raw_input_contents
    if given and len(given) != len(message.inputs):
        raise TensorError("raw_input_contents: give one for each of the inputs")
    if given and any(each.HasField("contents") for each in message.inputs):
        raise TensorError("inputs: give contents or raw_input_contents, and not both")
    inputs = [
        Tensor(
            each.name,
            each.datatype,
            _shape(each.name, each.shape),
            given[at] if given else _typed(each),
            _parameters(each.parameters),
        )
        for at, each in enumerate(message.inputs)
    ]
    return Asked(
        message.model_name,
        message.model_version,
        message.id,
        inputs,
        [each.name for each in message.outputs],
        _parameters(message.parameters),
        bool(given),
    )


def _shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    if len(shape) > 2 or any(not 0 <= each < 2**31 for each in shape):
        raise TensorError(f"{name}: shape must be [N], or [N, columns of an id]")
    return tuple(shape)


def _typed(tensor: pb.ModelInferRequest.InferInputTensor) -> list[Any]:
    wanted = _FIELDS.get(tensor.datatype)
    more = [each.name for each, _ in tensor.contents.ListFields() if each.name != wanted]
    if more:
        text = f"{tensor.name}: datatype and {more[0]} do not fit each other"
        raise TensorError(text)
    return list(getattr(tensor.contents, wanted)) if wanted is not None else []


def _parameters(given: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    found = {name: each.WhichOneof("parameter_choice") for name, each in given.items()}
    return {name: getattr(given[name], kind) for name, kind in found.items() if kind is not None}


def write_answer(asked: Asked, answer: Answer) -> pb.ModelInferResponse:
    """Writes an answer, as bytes or in fields of its datatypes."""
    found = pb.ModelInferResponse(
        model_name=answer.model, model_version=answer.version, id=asked.id
    )
    for each in answer.outputs:
        tensor = found.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
        if asked.raw:
            found.raw_output_contents.append(raw(each))
            continue
        data = filled(each)
        if each.datatype == "BYTES":
            data = [value.encode() for value in data]
        getattr(tensor.contents, _FIELDS[each.datatype]).extend(data)
    return found


def write_description(found: Described) -> pb.ModelMetadataResponse:
    """Writes what clients learn of a model."""
    message = pb.ModelMetadataResponse(
        name=found.model, versions=found.versions, platform=found.platform
    )
    for each in found.inputs:
        message.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
    for each in found.outputs:
        message.outputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
    return message

"""Applies a coder to the tensors of a bundle, and to its spec."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, StepKey, TensorSpec
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.packing.bits import derive_subseed
from vfl_common.packing.coders import Array, Coder

# {dtype: numpy's name of the type of its buffers}.
_NUMPY_TYPES: dict[DType, str] = {
    DType.FLOAT32: "<f4",
    DType.FLOAT16: "<f2",
    # numpy has no bfloat16, so its values are the upper 16 bits of float32 values.
    DType.BFLOAT16: "<u2",
    DType.UINT8: "<u1",
}


def derive_seed(root: int, sender: str, step: StepKey, tensor: str) -> int:
    """Returns the seed of the random numbers for a tensor at a step. ``root``: the seed of this
    direction of the exchange.
    """
    return derive_subseed(root, sender, step.round, step.batch, tensor)


def get_part_name(tensor: str, suffix: str) -> str:
    """Returns the name on the wire of one part of a tensor."""
    return f"{tensor}.{suffix}" if suffix else tensor


def describe_parts(coder: Coder, spec: TensorSpec) -> dict[str, TensorSpec] | None:
    """Returns {suffix: spec} of the parts of a tensor; None if the tensor is sent unchanged."""
    return coder.parts(spec.shape) if spec.dtype is DType.FLOAT32 else None


def wire_spec(coder: Coder, spec: BundleSpec) -> BundleSpec:
    """Returns the spec of the encoded bundle. Raises InputError if two tensors get the same
    name.
    """
    specs: dict[str, TensorSpec] = {}
    for name, tensor in spec.tensors.items():
        for suffix, part in (describe_parts(coder, tensor) or {"": tensor}).items():
            wire_name = get_part_name(name, suffix)
            if wire_name in specs or (suffix and wire_name in spec.tensors):
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"codec {coder.text}: two tensors have the name {wire_name!r} on the wire. Use "
                    "another codec, or rename one of them.",
                )
            specs[wire_name] = part
    return BundleSpec(spec.kind, specs)


def encode(coder: Coder, bundle: Bundle, root: int, sender: str, step: StepKey) -> Bundle:
    """Encodes a bundle for the wire. Raises InputError (NON_FINITE) if a value cannot be
    encoded.
    """
    buffers: dict[str, Buffer] = {}
    for name, tensor in bundle.tensors.items():
        parts = describe_parts(coder, TensorSpec(tensor.dtype, tensor.shape))
        if parts is None:
            buffers[name] = tensor
            continue
        arrays = encode_tensor(
            coder, name, _to_array(tensor), derive_seed(root, sender, step, name)
        )
        buffers |= {
            get_part_name(name, suffix): _to_buffer(part, arrays[suffix])
            for suffix, part in parts.items()
        }
    return Bundle(bundle.kind, buffers)


def decode(coder: Coder, bundle: Bundle, spec: BundleSpec, *, party: str, step: StepKey) -> Bundle:
    """Decodes a bundle into one of ``spec``. Raises PeerError if ``encode`` cannot have returned
    such values.
    """
    buffers: dict[str, Buffer] = {}
    for name, tensor in spec.tensors.items():
        parts = describe_parts(coder, tensor)
        if parts is None:
            buffers[name] = bundle.tensors[name]
            continue
        arrays = {
            suffix: _to_array(bundle.tensors[get_part_name(name, suffix)]) for suffix in parts
        }
        buffers[name] = _to_buffer(
            tensor, decode_tensor(coder, name, arrays, tensor.shape, party=party, step=step)
        )
    return Bundle(spec.kind, buffers)


def encode_tensor(coder: Coder, name: str, x: Array, seed: int) -> dict[str, Array]:
    """Encodes a tensor into its parts, {suffix: array}. Raises InputError (NON_FINITE) if a value
    cannot be encoded.
    """
    try:
        return coder.encode(x, seed)
    except ValueError as error:
        raise InputError(
            Code.NON_FINITE,
            f"codec {coder.text}: cannot encode tensor {name!r}, because it {error}. Use another "
            "codec, or lower the learning rate.",
        ) from None


def decode_tensor(
    coder: Coder,
    name: str,
    parts: Mapping[str, Array],
    shape: tuple[int, ...],
    *,
    party: str,
    step: StepKey,
) -> Array:
    """Decodes a tensor from its parts. Raises PeerError that names the party, the tensor and the
    step if the codec cannot have written the parts.
    """
    try:
        return coder.decode(parts, shape)
    except ValueError as error:
        raise PeerError(
            Code.NON_FINITE if "NaN" in str(error) else Code.MALFORMED_MESSAGE,
            f"tensor {name[:40]!r} of {party} at {step} {error}, which codec {coder.text} never "
            "writes",
            party=party,
        ) from None


def _to_array(buffer: Buffer) -> Array:
    return np.frombuffer(buffer.data, dtype=_NUMPY_TYPES[buffer.dtype]).reshape(buffer.shape)


def _to_buffer(spec: TensorSpec, values: Array) -> Buffer:
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return Buffer(spec.dtype, spec.shape, raw.data if raw.nbytes else memoryview(b""))

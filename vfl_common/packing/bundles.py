"""Coders over the tensors of a bundle: what its spec becomes, and, for the server, the bundle
itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vfl_common.bundle import Buffer, Bundle, BundleSpec, DType, StepKey, TensorSpec
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.packing.coders import Array, Coder
from vfl_common.packing.dither import derive

_NUMPY: dict[DType, str] = {
    DType.FLOAT32: "<f4",
    DType.FLOAT16: "<f2",
    # Numpy has no such dtype: the upper half of a float32's bits.
    DType.BFLOAT16: "<u2",
    DType.UINT8: "<u1",
}


def seed_of(root: int, sender: str, step: StepKey, tensor: str) -> int:
    """Returns the seed of what is drawn for a tensor at a step; ``root``: of this direction of the
    exchange.
    """
    return derive(root, sender, step.round, step.batch, tensor)


def name_of(tensor: str, suffix: str) -> str:
    """Returns the name of a tensor's part on the wire."""
    return f"{tensor}.{suffix}" if suffix else tensor


def parts_of(coder: Coder, spec: TensorSpec) -> dict[str, TensorSpec] | None:
    """Returns what becomes of a tensor; None if it goes as it is."""
    return coder.parts(spec.shape) if spec.dtype is DType.FLOAT32 else None


def wire_spec(coder: Coder, spec: BundleSpec) -> BundleSpec:
    """Returns the spec of a bundle as it crosses. Raises InputError if two tensors would have one
    name.
    """
    found: dict[str, TensorSpec] = {}
    for name, each in spec.tensors.items():
        for suffix, part in (parts_of(coder, each) or {"": each}).items():
            whole = name_of(name, suffix)
            if whole in found or (suffix and whole in spec.tensors):
                text = f"codec {coder.text}: two tensors would be called {whole!r} on the wire"
                raise InputError(Code.CONFIG_INVALID, f"{text}; take another codec, or rename one")
            found[whole] = part
    return BundleSpec(spec.kind, found)


def encode(coder: Coder, bundle: Bundle, root: int, sender: str, step: StepKey) -> Bundle:
    """Returns a bundle as it crosses. Raises InputError (NON_FINITE) if a number cannot be
    written.
    """
    found: dict[str, Buffer] = {}
    for name, each in bundle.tensors.items():
        parts = parts_of(coder, TensorSpec(each.dtype, each.shape))
        if parts is None:
            found[name] = each
            continue
        arrays = encoded(coder, name, _array(each), seed_of(root, sender, step, name))
        found |= {
            name_of(name, suffix): _buffer(part, arrays[suffix]) for suffix, part in parts.items()
        }
    return Bundle(bundle.kind, found)


def decode(coder: Coder, bundle: Bundle, spec: BundleSpec, *, party: str, step: StepKey) -> Bundle:
    """Returns a bundle of ``spec``, undoing ``encode``. Raises PeerError if no ``encode`` gives
    such values.
    """
    found: dict[str, Buffer] = {}
    for name, each in spec.tensors.items():
        parts = parts_of(coder, each)
        if parts is None:
            found[name] = bundle.tensors[name]
            continue
        arrays = {suffix: _array(bundle.tensors[name_of(name, suffix)]) for suffix in parts}
        found[name] = _buffer(
            each, decoded(coder, name, arrays, each.shape, party=party, step=step)
        )
    return Bundle(spec.kind, found)


def encoded(coder: Coder, name: str, x: Array, seed: int) -> dict[str, Array]:
    """Returns the parts of a tensor. Raises InputError (NON_FINITE) if a number cannot be
    written.
    """
    try:
        return coder.encode(x, seed)
    except ValueError as error:
        text = f"codec {coder.text}: tensor {name!r} {error}, which it cannot write"
        raise InputError(
            Code.NON_FINITE, f"{text}; choose another codec, or lower the learning rate"
        ) from None


def decoded(
    coder: Coder,
    name: str,
    parts: Mapping[str, Array],
    shape: tuple[int, ...],
    *,
    party: str,
    step: StepKey,
) -> Array:
    """Returns a tensor from its parts. Raises PeerError that names party, tensor and step if they
    cannot be right.
    """
    try:
        return coder.decode(parts, shape)
    except ValueError as error:
        text = (
            f"tensor {name[:40]!r} of {party} at {step} {error}, which codec {coder.text} "
            "never writes"
        )
        raise PeerError(
            Code.NON_FINITE if "NaN" in str(error) else Code.MALFORMED_MESSAGE, text, party=party
        ) from None


def _array(buffer: Buffer) -> Array:
    return np.frombuffer(buffer.data, dtype=_NUMPY[buffer.dtype]).reshape(buffer.shape)


def _buffer(spec: TensorSpec, values: Array) -> Buffer:
    raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return Buffer(spec.dtype, spec.shape, raw.data if raw.nbytes else memoryview(b""))

"""Codecs, which encode numbers for the wire. ``CODECS`` at the end has each codec by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from vfl_common.bundle import BundleSpec, DType
from vfl_common.config.base import Section, parse
from vfl_common.errors import Code, InputError, VflError
from vfl_common.packing.bundles import (
    decode_tensor,
    derive_seed,
    describe_parts,
    encode_tensor,
    get_part_name,
    wire_spec,
)
from vfl_common.packing.coders import Bits, Coder, TopK, get_rows_and_width
from vfl_party.base.plugins import describe_failure
from vfl_party.outbound.declared import spec_of
from vfl_party.outbound.filter import NOWHERE, BuiltIns, Filter, Passage, Tensors

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Place:
    """The place in which a codec works: one direction of an exchange of a phase.

    ``seed``: the seed of the codec's random choices. ``answered``: whether the exchange has tensors
    in both directions, as in training. ``averaged``: whether the server averages the tensors.
    ``up``: whether the tensors go from the asking to the answering side.
    """

    seed: int = 0
    answered: bool = True
    averaged: bool = False
    up: bool = True


@dataclass(frozen=True)
class Codec(Generic[S]):
    """A codec with settings. ``CODECS`` has it, or a plug-in exports it, instead of a function that
    returns a filter.
    """

    settings: type[S]
    make: Callable[[S, Place], Filter]


def make(
    name: str, where: str, settings: Mapping[str, Any] | None = None, place: Place | None = None
) -> Filter:
    """Makes a codec by name. Raises InputError that names ``where`` if the codec is unknown, or its
    settings are wrong.
    """
    export = REGISTRY.load(name, where)
    if not isinstance(export, Codec):
        if settings:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: codec {name!r} has no settings (got {sorted(settings)[0]!r}). Remove "
                "it, or choose another codec.",
            )
        return REGISTRY.make(name, where, Filter)
    parsed = parse(export.settings, dict(settings or {}), f"{where}: codec {name}")
    try:
        return REGISTRY.check_type(export.make(parsed, place or Place()), name, where, Filter)
    except VflError as error:
        raise InputError(error.code, f"{where}: codec {name}: {error}") from None
    except Exception as error:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{where}: the codec {name!r} cannot be created: it failed {describe_failure(error)}. "
            "Correct the plug-in.",
        ) from error


def settings_of(name: str, where: str) -> type[Section] | None:
    """Returns the model of a codec's settings; None if the codec has no settings. Raises InputError
    if the codec is unknown.
    """
    export = REGISTRY.load(name, where)
    return export.settings if isinstance(export, Codec) else None


def has_settings(name: str, where: str) -> bool:
    """Returns whether a codec has settings. Raises InputError that names ``where`` if the codec is
    unknown.
    """
    return settings_of(name, where) is not None


class Identity(Filter):
    """Sends every tensor in the dtype that the phase declares."""

    text = "identity"


class TwoBytes(Filter):
    """Encodes float32 with two bytes per number, rounded to nearest, ties to even. Other dtypes
    stay unchanged.
    """

    repeats = True
    dtype: ClassVar[torch.dtype]
    wire: ClassVar[DType]

    def apply(self, tensors: Tensors) -> Tensors:
        """Raises InputError if a finite number is too large for the dtype."""
        return {
            name: self._narrow(name, x) if x.dtype is torch.float32 else x
            for name, x in tensors.items()
        }

    def undo(self, tensors: Tensors) -> Tensors:
        return {name: x.float() if x.dtype is self.dtype else x for name, x in tensors.items()}

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        specs = {
            name: replace(tensor_spec, dtype=self.wire)
            if tensor_spec.dtype is DType.FLOAT32
            else tensor_spec
            for name, tensor_spec in spec.tensors.items()
        }
        return BundleSpec(spec.kind, specs)

    def _narrow(self, name: str, x: torch.Tensor) -> torch.Tensor:
        narrowed = x.detach().to(self.dtype)
        if x.numel() and bool((narrowed.isinf() & x.isfinite()).any()):
            largest = x.detach().abs().max().item()
            raise InputError(
                Code.NON_FINITE,
                f"codec {self.text}: tensor {name!r} exceeds the largest {self.text} number, "
                f"{torch.finfo(self.dtype).max:.5g} (got {largest:.3g}). Choose another codec, or "
                "scale the model.",
            )
        return narrowed


class Float16(TwoBytes):
    """Rounds to the nearest float16: half the bytes, 11 bits of precision. Raises InputError for
    values beyond 65,504; values below 6e-8 become zero.
    """

    text = "float16"
    dtype, wire = torch.float16, DType.FLOAT16


class BFloat16(TwoBytes):
    """Rounds to the nearest bfloat16, ties to even, as torch does: half the bytes, 8 bits of
    precision. The range is the same as float32's, up to rounding.
    """

    text = "bfloat16"
    dtype, wire = torch.bfloat16, DType.BFLOAT16


class PackedCodec(Filter):
    """Encodes each float32 tensor with a coder, as several tensors. Other dtypes stay unchanged.

    Random choices are derived from ``seed``, sender, step and tensor. So a repeated step gives the
    same bytes, and a checkpoint has no state of the codec.
    """

    on_host = repeats = True

    def __init__(self, coder: Coder, seed: int) -> None:
        self.coder, self.text, self._seed = coder, coder.text, seed

    def apply_at(self, at: Passage, tensors: Tensors) -> Tensors:
        """Raises InputError (NON_FINITE) if the coder cannot encode a number."""
        packed: dict[str, Tensor] = {}
        for name, x in tensors.items():
            parts = describe_parts(self.coder, spec_of(x.dtype, *x.shape))
            if parts is None:
                packed[name] = x
                continue
            values = np.ascontiguousarray(x.detach().cpu().numpy())
            arrays = self._encode(name, values, derive_seed(self._seed, at.sender, at.step, name))
            packed |= {
                get_part_name(name, suffix): _array_to_tensor(arrays[suffix], part.dtype)
                for suffix, part in parts.items()
            }
        return packed

    def undo_at(self, at: Passage, tensors: Tensors, spec: BundleSpec) -> Tensors:
        """Raises PeerError if no ``apply_at`` can have made these tensors."""
        restored: dict[str, Tensor] = {}
        for name, tensor_spec in spec.tensors.items():
            parts = describe_parts(self.coder, tensor_spec)
            if parts is None:
                restored[name] = tensors[name]
                continue
            arrays = {
                suffix: _tensor_to_array(tensors[get_part_name(name, suffix)]) for suffix in parts
            }
            values = decode_tensor(
                self.coder, name, arrays, tensor_spec.shape, party=at.sender, step=at.step
            )
            device = next(iter(tensors.values())).device
            restored[name] = torch.from_numpy(values).to(device)
        return restored

    def apply(self, tensors: Tensors) -> Tensors:
        return self.apply_at(NOWHERE, tensors)

    def wire_spec(self, spec: BundleSpec) -> BundleSpec:
        return wire_spec(self.coder, spec)

    def _encode(self, name: str, values: Any, seed: int) -> dict[str, Any]:
        return encode_tensor(self.coder, name, values, seed)


def _array_to_tensor(values: Any, dtype: DType) -> Tensor:
    """Returns an array as a tensor. Numpy has no bfloat16, so its bits are in a uint16 array."""
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if dtype is DType.BFLOAT16 else tensor


def _tensor_to_array(sent: Tensor) -> Any:
    """Returns a tensor as an array; the inverse of ``_array_to_tensor``."""
    return (sent.view(torch.uint16) if sent.dtype is torch.bfloat16 else sent).cpu().numpy()


class FeedbackCodec(PackedCodec):
    """Adds a tensor's last rounding error to its next message, so that errors do not add up over
    the rounds (error feedback).

    The error e is 0 at first. The message is v = w + e, clipped to the range of each row of w. Then
    e becomes w + e minus the values that the receiver decodes. Clipping keeps a property that all
    numbers of w share, such as their sign. The party's checkpoints contain e, which has the shape
    of w.
    """

    repeats = False

    def __init__(self, coder: Bits, seed: int) -> None:
        super().__init__(coder, seed)
        self.text = f"{coder.text[:-1]}, error feedback)"
        self._errors: dict[str, Any] = {}

    def _encode(self, name: str, values: Any, seed: int) -> dict[str, Any]:
        error = self._errors.get(name)
        rows = values.reshape(get_rows_and_width(values.shape))
        low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
        # ``super()._encode`` refuses NaN and infinity, so warnings about them are silenced here.
        with np.errstate(over="ignore", invalid="ignore"):
            corrected = rows if error is None else np.clip(rows + error, low, high)
        sent = super()._encode(name, corrected, seed)
        decoded = self.coder.decode(sent, rows.shape)
        self._errors[name] = rows - decoded if error is None else (rows - decoded) + error
        return sent

    def state(self) -> dict[str, Any]:
        return {name: torch.from_numpy(error.copy()) for name, error in self._errors.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._errors = {name: error.cpu().numpy().copy() for name, error in state.items()}


class BitsSettings(Section):
    """Settings of ``bits``, which encodes float32 with 8, 4 or 2 bits per number, packed, and with
    a minimum and a step for each row.
    """

    bits: Literal[8, 4, 2]
    """The number of bits per number."""
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    """``stochastic`` rounding is unbiased; ``nearest`` halves the maximum error."""
    scales: Literal["float32", "bfloat16"] = "float32"
    """The type of each row's minimum and step."""
    error_feedback: bool = False
    """Whether rounding errors are added to the next message. Only for weights that parties send to
    the server for averaging.
    """


def _make_bits(settings: BitsSettings, place: Place) -> Filter:
    coder = Bits(settings.bits, settings.rounding == "stochastic", settings.scales == "bfloat16")
    if not settings.error_feedback:
        return PackedCodec(coder, place.seed)
    if not place.averaged:
        raise InputError(
            Code.CONFIG_INVALID,
            "error_feedback requires an exchange that the server averages, because other "
            "exchanges send different rows at each step. Remove error_feedback.",
        )
    if not place.up:
        raise InputError(
            Code.CONFIG_INVALID,
            "error_feedback applies only to what the parties send; the server keeps no state of "
            'an average. Set direction = "up" in the table.',
        )
    return FeedbackCodec(coder, place.seed)


class TopKSettings(Section):
    """Settings of ``topk``, which encodes float32 as the largest numbers of each row and their
    positions, packed. All other numbers arrive as zero.
    """

    keep: int | float
    """The numbers of a row that are sent: a count, or a share between 0 and 1, exclusive."""
    values: Literal["float32", "float16"] = "float32"
    """The type of the numbers that are sent."""

    @model_validator(mode="after")
    def _check(self) -> Any:
        share = isinstance(self.keep, float)
        if self.keep <= 0 or (share and self.keep >= 1):
            raise ValueError(
                "keep: must be a positive integer (a count of numbers per row) or a share between "
                f"0 and 1, exclusive (got {self.keep})"
            )
        return self


def _make_top_k(settings: TopKSettings, place: Place) -> Filter:
    return PackedCodec(TopK(settings.keep, half=settings.values == "float16"), place.seed)


class RandTopKSettings(TopKSettings):
    """Settings of ``randtopk``, which draws some of the sent numbers at random from the smaller
    ones (IJCAI 2023, arXiv 2305.18469).

    In an exchange without an answer, such as validation, it sends only the largest numbers.
    """

    alpha: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    """The probability, in training, that a sent number is drawn from the numbers that are not among
    the largest.
    """


def _make_random_top_k(settings: RandTopKSettings, place: Place) -> Filter:
    alpha = settings.alpha if place.answered else 0.0
    return PackedCodec(TopK(settings.keep, alpha, settings.values == "float16"), place.seed)


# The codecs by name: a function that returns a filter, or a ``Codec`` with settings.
CODECS: dict[str, Callable[[], Filter] | Codec[Any]] = {
    "identity": Identity,
    "float16": Float16,
    "bfloat16": BFloat16,
    "bits": Codec(BitsSettings, _make_bits),
    "topk": Codec(TopKSettings, _make_top_k),
    "randtopk": Codec(RandTopKSettings, _make_random_top_k),
}
REGISTRY = BuiltIns("vfl.codecs", "codec", CODECS, ours=tuple(CODECS))

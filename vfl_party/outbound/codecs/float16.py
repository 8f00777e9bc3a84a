"""Encodes float32 as float16: half the bytes, 11 bits of precision, values up to 65,504."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from vfl_common.bundle import BundleSpec, DType
from vfl_common.errors import Code, InputError
from vfl_party.outbound.filter import Filter, Tensors


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
    """Rounds to the nearest float16. Raises InputError for values beyond 65,504; values below 6e-8
    become zero.
    """

    text = "float16"
    dtype, wire = torch.float16, DType.FLOAT16


CODEC = Float16

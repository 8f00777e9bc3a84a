"""Describes a coder by its name and settings, as in an aggregation plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfl_common.bundle import DType
from vfl_common.packing.coders import Bits, Coder, Half

Name = Literal["identity", "float16", "bfloat16", "bits"]
Width = Literal[0, 2, 4, 8]
NAMES: tuple[Name, ...] = ("identity", "float16", "bfloat16", "bits")
# The possible numbers of bits per value; 0 for codecs without that setting.
BITS: tuple[Width, ...] = (0, 2, 4, 8)


@dataclass(frozen=True)
class Coding:
    """The encoding of one direction of an average. ``seed``: the seed of the coder's random
    numbers; 0 if it draws none.

    Top-k cannot be chosen for weights, because it would set most weights to zero.
    """

    name: Name = "identity"
    bits: Width = 0
    stochastic: bool = False
    seed: int = 0

    @property
    def coder(self) -> Coder | None:
        """The coder; None if tensors are sent unchanged."""
        if self.name == "bits":
            assert self.bits  # noqa: S101 - checked when a coding is read from a message
            return Bits(self.bits, self.stochastic)
        if self.name == "identity":
            return None
        return Half(DType.FLOAT16 if self.name == "float16" else DType.BFLOAT16)

    def __str__(self) -> str:
        return self.coder.text if self.coder is not None else self.name


PLAIN = Coding()

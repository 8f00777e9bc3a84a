"""Coding: a coder by name and settings, as a plan of aggregation carries it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfl_common.bundle import DType
from vfl_common.packing.coders import Bits, Coder, Half

Name = Literal["identity", "float16", "bfloat16", "bits"]
Width = Literal[0, 2, 4, 8]
NAMES: tuple[Name, ...] = ("identity", "float16", "bfloat16", "bits")
# 0: the codec has none.
BITS: tuple[Width, ...] = (0, 2, 4, 8)


@dataclass(frozen=True)
class Coding:
    """How one direction of an average is written. ``seed``: of what is drawn there; 0 if nothing
    is.

    The largest numbers of a row are no coding of weights: the others would become zero.
    """

    name: Name = "identity"
    bits: Width = 0
    stochastic: bool = False
    seed: int = 0

    @property
    def coder(self) -> Coder | None:
        """The coder; None if tensors go as they are."""
        if self.name == "bits":
            assert self.bits  # noqa: S101 - whoever reads a coding from outside has checked it
            return Bits(self.bits, self.stochastic)
        if self.name == "identity":
            return None
        return Half(DType.FLOAT16 if self.name == "float16" else DType.BFLOAT16)

    def __str__(self) -> str:
        return self.coder.text if self.coder is not None else self.name


PLAIN = Coding()

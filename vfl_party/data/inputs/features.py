"""Encoder inputs of all rows, and the codes of categories in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vfl_party.base.devices import index_on
from vfl_party.data.row_arrays import MappedArray, Space
from vfl_party.models import InputSpec

# Codes: a category not seen in training; no category; one that augmentation hides; the first
# category.
UNKNOWN, MISSING, HIDDEN, RESERVED = 0, 1, 2, 3

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Features:
    """Encoder inputs of all rows, on one device; in a mapped file if there are many.

    x: float32 [N, F] or [N, C, H, W]; categories: int64 [N, K] codes below ``cardinalities``, or
    None. Code 0 is a category not seen in training, 1 a missing one, 2 one that augmentation hides
    (self-supervised methods alone). arrays: the same as NumPy has them, if they are on the CPU.
    """

    x: torch.Tensor
    categories: torch.Tensor | None = None
    cardinalities: tuple[int, ...] = ()
    arrays: tuple[npt.NDArray[Any], ...] = ()

    @classmethod
    def of(
        cls, x: Floats, categories: Codes | None = None, cardinalities: tuple[int, ...] = ()
    ) -> Features:
        """Returns the encoder inputs in arrays, which are not copied."""
        codes = None if categories is None else torch.from_numpy(categories)
        arrays = (x,) if categories is None else (x, categories)
        return cls(torch.from_numpy(x), codes, cardinalities, arrays)

    @property
    def spec(self) -> InputSpec:
        return InputSpec(tuple(self.x.shape[1:]), self.cardinalities)

    def inputs(self, rows: torch.Tensor | npt.NDArray[np.int64]) -> tuple[torch.Tensor, ...]:
        """Returns the encoder's arguments for a batch, [B, …]: ``x``, and ``categories`` if there
        are any.
        """
        if self._mapped:
            wanted = np.asarray(rows)
            found = (
                each.rows(wanted) if isinstance(each, MappedArray) else each[wanted]
                for each in self.arrays
            )
            return tuple(map(torch.from_numpy, found))
        index = index_on(torch.as_tensor(rows), self.x.device)
        x_B = self.x.index_select(0, index)
        return (x_B,) if self.categories is None else (x_B, self.categories.index_select(0, index))

    @cached_property
    def _mapped(self) -> bool:
        """Whether rows are read from files when they are wanted."""
        return any(isinstance(each, MappedArray) for each in self.arrays)

    def followed_by(self, other: Features, space: Space) -> Features:
        """Returns these rows, then the rows of ``other``, which must be prepared alike. Raises
        InputError.
        """
        x, *categories = (
            space.concatenated(each) for each in zip(self.arrays, other.arrays, strict=True)
        )
        return Features.of(x, categories[0] if categories else None, self.cardinalities)

    def to(self, device: torch.device | str) -> Features:
        """Returns the same rows on a device."""
        if torch.device(device) == self.x.device:
            return self
        categories = None if self.categories is None else self.categories.to(device)
        return Features(self.x.to(device), categories, self.cardinalities)

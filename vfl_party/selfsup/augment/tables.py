"""Views of tables in which some features of each row are replaced (SCARF)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vfl_party.data.inputs.features import HIDDEN, Features
from vfl_party.selfsup.augment.draws import happens
from vfl_party.selfsup.augment.settings import AugmentSettings

# The number of rows that are read at once to find the ranges.
_AT_ONCE = 8192


class TableAugment:
    """Replaces each number, with probability ``corruption``, by that column's value in a random row
    of the pool.

    A column keeps its distribution but loses its relation to the others (FedHSSL, section VI).
    Columns of one-hot categories count as numbers. A category is replaced, with the same
    probability, by the code of a hidden one.

    ``exact_share``: the same number of features in every row, ``corruption`` times their number,
    rounded down; numbers and categories count alike (SCARF, algorithm 1). ``replacement =
    "uniform"``: numbers are drawn evenly between the least and the largest of their column in the
    pool. Both are FedHSSL's released code.

    features: the party's rows, [N, F]; pool_P: the row numbers of the pool, int64.
    """

    def __init__(self, settings: AugmentSettings, features: Features, pool_P: Tensor) -> None:
        self._settings = settings
        self._features = features
        self._pool_P = pool_P.cpu()
        self._range_2F = None if settings.replacement == "rows" else self._ranges()

    def _ranges(self) -> Tensor:
        """Returns the least and the largest number of each column in the pool, [2, F]."""
        ranges = [
            torch.stack([x_PF.amin(0), x_PF.amax(0)])
            for part_P in torch.split(self._pool_P, _AT_ONCE)
            for x_PF in self._features.inputs(part_P)[:1]
        ]
        lows_SF, highs_SF = torch.stack(ranges).unbind(1)
        return torch.stack([lows_SF.amin(0), highs_SF.amax(0)])

    def two_views(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns two views; see ``Augment``."""
        first = inputs if self._settings.corrupt == "one" else self._corrupt(inputs, generator)
        return first, self._corrupt(inputs, generator)

    def one_view(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        """Returns one view; see ``Augment``."""
        return self._corrupt(inputs, generator)

    def _corrupt(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        x_BF, *rest = inputs
        share, device = self._settings.corruption, x_BF.device
        if self._settings.exact_share:
            chosen = _exactly(share, inputs, generator)
        else:
            # Drawn lazily: numbers first, then their replacements, then categories.
            chosen = (happens(share, *tensor.shape, generator=generator) for tensor in inputs)
        replaced_BF = next(chosen).to(device)
        view = torch.where(replaced_BF, self._others(x_BF, generator), x_BF)
        return view, *(
            codes_BK.masked_fill(gone.to(device), HIDDEN)
            for codes_BK, gone in zip(rest, chosen, strict=True)
        )

    def _others(self, x_BF: Tensor, generator: torch.Generator) -> Tensor:
        """Draws the numbers that take the places of ``x_BF``."""
        if self._range_2F is not None:
            low_F, high_F = self._range_2F
            even_BF = torch.rand(x_BF.shape, generator=generator).to(x_BF.device)
            return torch.lerp(low_F, high_F, even_BF)
        rows_BF = self._pool_P[torch.randint(len(self._pool_P), x_BF.shape, generator=generator)]
        return self._features.cells(rows_BF.to(x_BF.device))


def _exactly(
    share: float, inputs: tuple[Tensor, ...], generator: torch.Generator
) -> Iterator[Tensor]:
    """Yields, for each input [B, C], which features are chosen: of each row the same number."""
    widths = [tensor.shape[1] for tensor in inputs]
    # 0.29 * 100 is a little less than 29 in floating point.
    count, at = math.floor(share * sum(widths) + 1e-9), 0
    # The rank of each feature in a random order.
    ranks = torch.rand(len(inputs[0]), sum(widths), generator=generator).argsort(1).argsort(1)
    for width in widths:
        yield ranks[:, at : at + width] < count
        at += width

"""Makes views of tables in which some features of each row are replaced (SCARF)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from vfl_party.data.inputs.features import HIDDEN, Features
from vfl_party.selfsup.augment.draws import draw_booleans
from vfl_party.selfsup.augment.settings import AugmentSettings

# The number of rows that are read at once to find the ranges.
_AT_ONCE = 8192


class TableAugment:
    """Replaces each number, with probability ``corruption``, by the value of its column in a random
    row of the pool.

    A replaced column keeps its distribution but loses its relation to the other columns (FedHSSL,
    section VI). Columns of one-hot categories count as numbers. A category is replaced, with the
    same probability, by the code for a hidden category.

    With ``exact_share``, the same number of features is replaced in every row: ``corruption`` times
    the number of features, rounded down, where numbers and categories count the same (SCARF,
    algorithm 1). With ``replacement = "uniform"``, numbers are drawn uniformly between the minimum
    and the maximum of their column in the pool. Both are as in FedHSSL's released code.

    features: The party's rows, [N, F]. pool_P: The row numbers of the pool, int64.
    """

    def __init__(self, settings: AugmentSettings, features: Features, pool_P: Tensor) -> None:
        self._settings = settings
        self._features = features
        self._pool_P = pool_P.cpu()
        self._range_2F = None if settings.replacement == "rows" else self._find_ranges()

    def _find_ranges(self) -> Tensor:
        """Returns the minimum and the maximum of each column in the pool, [2, F]."""
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
            masks = _draw_exact_masks(share, inputs, generator)
        else:
            # The generator expression is lazy, so the order of draws is: numbers, their
            # replacements, categories.
            masks = (draw_booleans(share, *tensor.shape, generator=generator) for tensor in inputs)
        replaced_BF = next(masks).to(device)
        view = torch.where(replaced_BF, self._draw_replacements(x_BF, generator), x_BF)
        return view, *(
            codes_BK.masked_fill(mask_BK.to(device), HIDDEN)
            for codes_BK, mask_BK in zip(rest, masks, strict=True)
        )

    def _draw_replacements(self, x_BF: Tensor, generator: torch.Generator) -> Tensor:
        """Draws the replacements for the numbers ``x_BF``, [B, F]."""
        if self._range_2F is not None:
            low_F, high_F = self._range_2F
            even_BF = torch.rand(x_BF.shape, generator=generator).to(x_BF.device)
            return torch.lerp(low_F, high_F, even_BF)
        rows_BF = self._pool_P[torch.randint(len(self._pool_P), x_BF.shape, generator=generator)]
        return self._features.cells(rows_BF.to(x_BF.device))


def _draw_exact_masks(
    share: float, inputs: tuple[Tensor, ...], generator: torch.Generator
) -> Iterator[Tensor]:
    """Yields, for each input [B, C], a mask of the features to replace. Each row has the same
    number of them.
    """
    widths = [tensor.shape[1] for tensor in inputs]
    # The small term corrects rounding: 0.29 * 100 is a little less than 29 in floating point.
    count, start = math.floor(share * sum(widths) + 1e-9), 0
    # The rank of each feature in a random order.
    ranks = torch.rand(len(inputs[0]), sum(widths), generator=generator).argsort(1).argsort(1)
    for width in widths:
        yield ranks[:, start : start + width] < count
        start += width

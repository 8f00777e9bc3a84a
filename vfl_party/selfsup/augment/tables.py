"""Views of tables: some features of each row replaced (SCARF)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vfl_party.data.inputs.features import HIDDEN
from vfl_party.selfsup.augment.draws import happens
from vfl_party.selfsup.augment.settings import AugmentSettings


class TableAugment:
    """Replaces each number, with probability ``corruption``, by that column's value in a random row
    of the pool.

    A column keeps its distribution but loses its relation to the others (FedHSSL, section VI;
    SCARF, algorithm 1, which replaces the same number of features in every row). Columns of one-hot
    categories count as numbers. A category is replaced, with the same probability, by the code of a
    hidden one. ``exact_share`` and ``replacement = "uniform"`` are FedHSSL's released code.

    x_NF: the party's rows; pool_P: the row numbers of the pool, int64.
    """

    def __init__(self, settings: AugmentSettings, x_NF: Tensor, pool_P: Tensor) -> None:
        self._settings = settings
        self._x_NF = x_NF
        self._pool_P = pool_P.cpu()
        # The least number and the range of each column of the pool.
        self._low_F = self._range_F = torch.empty(0)
        if settings.replacement == "uniform" and x_NF.shape[1]:
            low_F, high_F = x_NF[self._pool_P.to(x_NF.device)].aminmax(dim=0)
            self._low_F, self._range_F = low_F, high_F - low_F

    def two_views(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        first = inputs if self._settings.corrupt == "one" else self._corrupted(inputs, generator)
        return first, self._corrupted(inputs, generator)

    def one_view(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        return self._corrupted(inputs, generator)

    def _corrupted(
        self, inputs: tuple[Tensor, ...], generator: torch.Generator
    ) -> tuple[Tensor, ...]:
        x_BF, *rest = inputs
        share, device = self._settings.corruption, x_BF.device
        if self._settings.exact_share:
            chosen = _exactly(share, inputs, generator)
        else:
            # Drawn when it is asked for: numbers first, then their replacements, then categories.
            chosen = (happens(share, *each.shape, generator=generator) for each in inputs)
        replaced_BF = next(chosen).to(device)
        view = torch.where(replaced_BF, self._replacements(x_BF, generator), x_BF)
        return view, *(
            codes_BK.masked_fill(gone.to(device), HIDDEN)
            for codes_BK, gone in zip(rest, chosen, strict=True)
        )

    def _replacements(self, x_BF: Tensor, generator: torch.Generator) -> Tensor:
        """Returns a replacement of each number, [B, F]."""
        if self._settings.replacement == "uniform":
            share_BF = torch.rand(x_BF.shape, generator=generator).to(x_BF.device)
            return self._low_F + share_BF * self._range_F
        rows_BF = self._pool_P[torch.randint(len(self._pool_P), x_BF.shape, generator=generator)]
        return self._x_NF.gather(0, rows_BF.to(x_BF.device))


def _exactly(
    share: float, inputs: tuple[Tensor, ...], generator: torch.Generator
) -> Iterator[Tensor]:
    """Yields, for each input [B, C], which features are chosen: of each row the same number."""
    widths = [each.shape[1] for each in inputs]
    order = torch.rand(len(inputs[0]), sum(widths), generator=generator).argsort(dim=1)
    # The rank of each feature in a random order.
    ranks = order.argsort(dim=1)
    chosen, at = ranks < int(share * sum(widths)), 0
    for width in widths:
        yield chosen[:, at : at + width]
        at += width

"""Views of tables: some features of each row replaced (SCARF)."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_party.data.inputs.features import HIDDEN, Features
from vfl_party.selfsup.augment.draws import happens
from vfl_party.selfsup.augment.settings import AugmentSettings


class TableAugment:
    """Replaces each number, with probability ``corruption``, by that column's value in a random row
    of the pool.

    A column keeps its distribution but loses its relation to the others (FedHSSL, section VI;
    SCARF, algorithm 1, which replaces the same number of features in every row). Columns of one-hot
    categories count as numbers. A category is replaced, with the same probability, by the code of a
    hidden one.

    features: the party's rows, [N, F]; pool_P: the row numbers of the pool, int64.
    """

    def __init__(self, settings: AugmentSettings, features: Features, pool_P: Tensor) -> None:
        self._settings = settings
        self._features = features
        self._pool_P = pool_P.cpu()

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
        replaced_BF = happens(share, *x_BF.shape, generator=generator).to(device)
        rows_BF = self._pool_P[
            torch.randint(len(self._pool_P), x_BF.shape, generator=generator)
        ].to(device)
        view = torch.where(replaced_BF, self._features.cells(rows_BF), x_BF)
        hidden = (
            happens(share, *codes_BK.shape, generator=generator).to(device) for codes_BK in rest
        )
        return view, *(
            codes_BK.masked_fill(gone, HIDDEN) for codes_BK, gone in zip(rest, hidden, strict=True)
        )

"""The ``tabular`` encoder: an MLP over each category's embedding and the numeric columns."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from vfl_common.config.models import TabularSettings
from vfl_party.models.encoders.mlp import layers
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top


class TabularEncoder(nn.Module):
    """Holds the embedding tables of all columns in one table: one lookup instead of K."""

    # [K], the first row of each column in the table.
    offsets: Tensor

    def __init__(self, settings: TabularSettings, spec: InputSpec, embedding_size: int) -> None:
        super().__init__()
        (numeric,), cardinalities = spec.shape, spec.cardinalities
        self.table = (
            nn.Embedding(sum(cardinalities), settings.category_size) if cardinalities else None
        )
        offsets = [0, *accumulate(cardinalities)][:-1]
        self.register_buffer("offsets", torch.tensor(offsets, dtype=torch.int64), persistent=False)
        self.mlp = nn.Sequential(
            *layers(
                numeric + len(cardinalities) * settings.category_size,
                settings.hidden,
                embedding_size,
                batch_norm=settings.batch_norm,
                dropout=settings.dropout,
            )
        )

    def forward(self, x_BF: Tensor, categories_BK: Tensor | None = None) -> Tensor:
        """Embeds a batch. x_BF: [B, F], F may be 0; categories_BK: int64, column k within [0,
        cardinalities[k]).
        """
        if self.table is not None and categories_BK is not None:
            x_BF = torch.cat([x_BF, self.table(categories_BK + self.offsets).flatten(1)], dim=1)
        out: Tensor = self.mlp(x_BF)
        return out


def build_tabular(settings: TabularSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the encoder; its top is the last layer.

    x: [B, F]; categories: int64 [B, K] if the spec has K cardinalities; returns [B,
    embedding_size].
    """
    encoder = TabularEncoder(settings, spec, embedding_size)
    return mark_top(encoder, f"mlp.{len(encoder.mlp) - 1}")

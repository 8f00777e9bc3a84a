"""The ``tabular`` encoder: an MLP over each category's embedding and the numeric columns."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from vfl_common.config.models import TabularSettings
from vfl_party.models.encoders.mlp import build_layers
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top


class TabularEncoder(nn.Module):
    """An MLP on numeric columns and on embeddings of categorical columns.

    One table has the embeddings of all columns, so that a batch needs one lookup instead of K.
    """

    # [K], the row of ``table`` where the embeddings of each column begin.
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
            *build_layers(
                numeric + len(cardinalities) * settings.category_size,
                settings.hidden,
                embedding_size,
                batch_norm=settings.batch_norm,
                dropout=settings.dropout,
            )
        )

    def forward(self, x_BF: Tensor, categories_BK: Tensor | None = None) -> Tensor:
        """Embeds a batch.

        Args:
            x_BF: The numeric columns, float32 [B, F]. F may be 0.
            categories_BK: The codes, int64 [B, K]. Column k is in [0, cardinalities[k]).
        """
        if self.table is not None and categories_BK is not None:
            x_BF = torch.cat([x_BF, self.table(categories_BK + self.offsets).flatten(1)], dim=1)
        out: Tensor = self.mlp(x_BF)
        return out


def build_tabular(settings: TabularSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the ``tabular`` encoder. Its top is the last layer.

    The encoder takes x [B, F] and, if the spec has K cardinalities, categories int64 [B, K]. It
    returns [B, embedding_size].
    """
    encoder = TabularEncoder(settings, spec, embedding_size)
    return mark_top(encoder, f"mlp.{len(encoder.mlp) - 1}")

"""The active party's model on the combined embeddings."""

from __future__ import annotations

from torch import nn

from vfl_common.config.models import TopSettings
from vfl_party.models.encoders.mlp import layers


def build_top(settings: TopSettings, in_features: int, outputs: int) -> nn.Sequential:
    """Builds a linear layer or, if ``hidden`` is set, an MLP with ReLU. z: [B, in_features] ->
    logits [B, outputs].
    """
    return nn.Sequential(*layers(in_features, settings.hidden, outputs, dropout=settings.dropout))

"""The ``mlp`` encoder, and the fully connected layers that other encoders and top models use."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import nn

from vfl_common.config.models import MlpSettings
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


def build_layers(
    in_features: int,
    hidden: Sequence[int],
    out_features: int,
    *,
    activation: str = "relu",
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> list[nn.Module]:
    """Builds hidden layers (linear, batch norm, activation, dropout) and a last linear layer."""
    modules: list[nn.Module] = []
    for width in hidden:
        # Batch norm has a bias, so the linear layer before it needs none.
        modules.append(nn.Linear(in_features, width, bias=not batch_norm))
        if batch_norm:
            modules.append(nn.BatchNorm1d(width))
        modules.append(ACTIVATIONS[activation]())
        if dropout:
            modules.append(nn.Dropout(dropout))
        in_features = width
    return [*modules, nn.Linear(in_features, out_features)]


def build_mlp(settings: MlpSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the ``mlp`` encoder, which flattens x [B, *spec.shape] and returns [B,
    embedding_size].

    Its top is the last linear layer and, if there is one, the batch normalisation after this layer.
    """
    encoder = nn.Sequential(
        nn.Flatten(),
        *build_layers(
            math.prod(spec.shape),
            settings.hidden,
            embedding_size,
            activation=settings.activation,
            batch_norm=settings.batch_norm,
            dropout=settings.dropout,
        ),
    )
    last = len(encoder) - 1
    if settings.normed_output:
        encoder.extend([nn.BatchNorm1d(embedding_size), nn.ReLU()])
    return mark_top(encoder, *(str(place) for place in range(last, len(encoder))))

"""The ``cnn0`` and ``cnn1`` encoders: the convolutional networks of FedOnce (Wu et al. 2022, Fig.
4).
"""

from __future__ import annotations

import torch
from torch import nn

from vfl_common.config.models import Cnn0Settings, Cnn1Settings
from vfl_common.errors import Code, InputError
from vfl_party.models.encoders.mlp import build_layers
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top

# The minimum height and width of an image, so that one pixel remains after the last pooling layer.
MIN_SIDE = {"cnn0": 6, "cnn1": 14}


def build_fedonce(
    settings: Cnn0Settings | Cnn1Settings, spec: InputSpec, embedding_size: int
) -> nn.Module:
    """Builds convolutions and then linear layers with ReLU between them.

    The encoder takes [B, C, H, W] and returns [B, embedding_size]. The linear layers are its top.
    Raises InputError if the images are too small.
    """
    channels, height, width = spec.shape
    min_side = MIN_SIDE[settings.kind]
    if min(height, width) < min_side:
        raise InputError(
            Code.MODEL_INVALID,
            f"model.encoder: kind {settings.kind!r} requires images of at least {min_side} x "
            f"{min_side} pixels (got {width} x {height}). Provide larger images, or set kind = "
            "'cnn'.",
        )
    blocks = (
        _cnn0(channels, settings.dropout) if isinstance(settings, Cnn0Settings) else _cnn1(channels)
    )
    convolutions = nn.Sequential(*blocks, nn.Flatten())
    with torch.no_grad():
        features = convolutions.eval()(torch.zeros(1, *spec.shape)).shape[1]
    encoder = nn.Sequential(
        *convolutions.train(), *build_layers(features, settings.hidden, embedding_size)
    )
    return mark_top(encoder, *(str(place) for place in range(len(convolutions), len(encoder))))


def _cnn0(channels: int, dropout: float) -> list[nn.Module]:
    pooled = [nn.MaxPool2d(2), *([nn.Dropout(dropout)] if dropout else [])]
    return [nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), *pooled]


def _cnn1(channels: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, 16, 8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
    ]

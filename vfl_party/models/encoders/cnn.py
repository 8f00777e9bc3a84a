"""The ``cnn`` encoder."""

from __future__ import annotations

from torch import nn

from vfl_common.config.models import CnnSettings
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top


def build_cnn(settings: CnnSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds blocks of 3x3 convolution, batch norm, ReLU and 2x2 pooling, and a last linear layer.

    A block does not pool an image that is less than two pixels high or wide. The encoder takes
    [B, C, H, W] and returns [B, embedding_size]. Its top consists of the blocks after the first one
    and, with ``shared = "all"``, of the last linear layer.
    """
    channels, height, width = spec.shape
    modules: list[nn.Module] = []
    first_block = 0
    for out_channels in settings.channels:
        modules.append(
            nn.Conv2d(channels, out_channels, 3, padding=1, bias=not settings.batch_norm)
        )
        if settings.batch_norm:
            modules.append(nn.BatchNorm2d(out_channels))
        modules.append(nn.ReLU())
        if min(height, width) >= 2:
            modules.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
        channels = out_channels
        first_block = first_block or len(modules)
    encoder = nn.Sequential(
        *modules, nn.Flatten(), nn.Linear(channels * height * width, embedding_size)
    )
    last = len(encoder) if settings.shared == "all" else len(modules)
    return mark_top(encoder, *(str(layer) for layer in range(first_block, last)))

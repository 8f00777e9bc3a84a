"""The ``cnn`` encoder."""

from __future__ import annotations

from torch import nn

from vfl_common.config.models import CnnSettings
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top


def build_cnn(settings: CnnSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds blocks of convolution 3x3, batch norm, ReLU, pooling 2x2; then a linear layer.

    A block does not pool an image that is less than two pixels high or wide. x: [B, C, H, W];
    returns [B, embedding_size]. The top is all above the first block, or only the blocks there.
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

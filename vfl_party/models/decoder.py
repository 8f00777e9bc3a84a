"""The decoder of the model inversion attack, which reconstructs images from latents.

This is the decoder "L3" of MocoSFL, appendix A.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

# The number of channels in all blocks except the last.
CHANNELS = 64
# The number of residual blocks before the upsampling layers.
BLOCKS = 5


class DecoderBlock(nn.Module):
    """A residual block with BatchNorm before each convolution.

    x: [B, C, H, W] -> [B, channels, H, W].
    """

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        has_same_channels = in_channels == channels
        self.shortcut: nn.Module = (
            nn.Identity() if has_same_channels else nn.Conv2d(in_channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(functional.relu(self.norm1(x)))
        out: Tensor = self.conv2(functional.relu(self.norm2(h))) + self.shortcut(x)
        return out


class Decoder(nn.Module):
    """Decodes latents z [B, *latent] to images [B, *image] with values from 0 to 1.

    Transposed convolutions double the height and the width until they reach the image's size. If
    the result is larger than the image, bilinear interpolation shrinks it. Build this module inside
    ``seed_torch``.

    Args:
        latent: The shape (C, H, W) of a latent, or (width,) for a vector.
        image: The shape (C, H, W) of an image.
    """

    def __init__(self, latent: tuple[int, ...], image: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = latent if len(latent) == 3 else (latent[0], 1, 1)
        self._latent, self._size = (channels, height, width), image[1:]
        doublings = max(0, math.ceil(math.log2(max(image[1] / height, image[2] / width))))
        modules: list[nn.Module] = []
        for number in range(BLOCKS):
            modules += [DecoderBlock(CHANNELS if number else channels, CHANNELS), nn.ReLU()]
        for _ in range(doublings):
            upsample = nn.ConvTranspose2d(
                CHANNELS, CHANNELS, 3, stride=2, padding=1, output_padding=1
            )
            modules += [upsample, nn.BatchNorm2d(CHANNELS), nn.ReLU()]
        self.body = nn.Sequential(*modules)
        self.last = DecoderBlock(CHANNELS, image[0])

    def forward(self, z: Tensor) -> Tensor:
        h = self.body(z.reshape(len(z), *self._latent))
        if tuple(h.shape[2:]) != self._size:
            h = functional.interpolate(h, self._size, mode="bilinear", align_corners=False)
        return torch.sigmoid(self.last(h))

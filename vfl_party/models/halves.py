"""Cuts a network for images into a bottom model and a tail.

The parties that hold the images run the bottom model. The training party runs the tail. The decoder
of the model inversion attack reconstructs images from latents; it is "L3" of MocoSFL, appendix A.3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.config.models import NETWORKS, CnnSettings, EncoderSettings, NetworkSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.networks import NetworkPart, apply_stride, parts_of_cnn, parts_of_network

# The number of channels in all decoder blocks except the last.
CHANNELS = 64
# The number of residual blocks before the upsampling layers.
BLOCKS = 5


@dataclass(frozen=True)
class Bottleneck:
    """A convolution at the end of the bottom model that shrinks the latents (TAResSFL, A.4).

    A transposed convolution at the beginning of the tail restores their shape.
    """

    channels: int
    stride: int


class Tail(nn.Module):
    """The layers after the cut, average pooling, and a head of two layers for pretraining.

    ``latent``: The shape (C, H, W) of an input.
    """

    def __init__(
        self, body: nn.Module, latent: tuple[int, int, int], features: int, width: int
    ) -> None:
        super().__init__()
        self.body, self.latent = body, latent
        self.head = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width))

    def features(self, z: Tensor) -> Tensor:
        """Returns the features [B, E] of latents z [B, C, H, W]. A probe is trained on these."""
        return torch.flatten(functional.adaptive_avg_pool2d(self.body(z), 1), 1)

    def forward(self, z: Tensor) -> Tensor:
        """Returns the projections [B, P] of latents z [B, C, H, W]."""
        p_BP: Tensor = self.head(self.features(z))
        return p_BP


@dataclass(frozen=True)
class Halves:
    """A network and the place where it is cut.

    Args:
        settings: The settings of a ``cnn`` encoder or of a torchvision network.
        image: The shape (C, H, W) of an image.
        cut: The number of convolutions in the bottom model. For ResNet-18 the stem is 1, and the
            stem with one block is 3.
        bottleneck: The layers that shrink and restore the latents at the cut, or None.
    """

    settings: EncoderSettings
    image: tuple[int, int, int]
    cut: int
    bottleneck: Bottleneck | None = None

    def _parts(self) -> list[NetworkPart]:
        match self.settings:
            case CnnSettings():
                return list(parts_of_cnn(self.settings, self.image))
            case NetworkSettings():
                return list(parts_of_network(self.settings, self.image))
        kinds = ", ".join(f'"{kind}"' for kind in ("cnn", *NETWORKS))
        raise InputError(
            Code.MODEL_INVALID,
            f"recipe: model.encoder: kind {self.settings.kind!r} cannot be cut in two. Choose one "
            f"of {kinds}.",
        )

    def _split(self) -> tuple[list[NetworkPart], list[NetworkPart]]:
        """Returns the parts of the bottom model and of the tail.

        Raises InputError if the cut is not between two parts.
        """
        parts, convolutions = self._parts(), 0
        cuts = []
        for number, part in enumerate(parts[:-1], 1):
            convolutions += part.convolutions
            cuts.append(convolutions)
            if convolutions == self.cut:
                return parts[:number], parts[number:]
        choices = ", ".join(map(str, cuts))
        raise InputError(
            Code.MODEL_INVALID,
            f"recipe: phases: cut: must be between two parts of this {self.settings.kind} (got "
            f"{self.cut}). Choose one of {choices}, or give a cnn more channels."
            if cuts
            else f"recipe: phases: cut: this {self.settings.kind} has only one part (got "
            f"{self.cut}). Set more channels.",
        )

    @property
    def features(self) -> int:
        """The width E of the tail's features. Raises InputError if the network cannot be cut."""
        return self._parts()[-1].channels

    @property
    def latent(self) -> tuple[int, int, int]:
        """The shape (C, H, W) of the latents at the cut. Raises InputError if the cut is invalid.

        This is integer arithmetic, because torch's ``meta`` device would import sympy, which takes
        a second of processor time.
        """
        below, _ = self._split()
        _, *sides = self.image
        for part in below:
            sides = [part.side(side) for side in sides]
        channels, neck = below[-1].channels, self.bottleneck
        if neck is not None:
            channels, sides = neck.channels, [apply_stride(neck.stride, side) for side in sides]
        return channels, sides[0], sides[1]

    @property
    def fits(self) -> bool:
        """Whether the network supports images of this size.

        Group normalisation needs more than one value in each group.
        """
        below, above = self._split()
        _, *sides = self.image
        for number, part in enumerate([*below, *above]):
            if number == len(below) and self.bottleneck is not None:
                sides = [side * self.bottleneck.stride for side in self.latent[1:]]
            if part.channels == 1 and sides == [1, 1]:
                return False
            sides = [part.side(side) for side in sides]
        return True

    def bottom(self) -> nn.Sequential:
        """Builds the bottom model, x [B, C, H, W] -> z [B, *latent]. Call this in ``seed_torch``.

        Raises InputError if the network cannot be cut there.
        """
        below, _ = self._split()
        modules = [part.make() for part in below]
        if self.bottleneck is not None:
            channels, stride = self.bottleneck.channels, self.bottleneck.stride
            modules.append(nn.Conv2d(below[-1].channels, channels, 3, stride=stride, padding=1))
        return nn.Sequential(*modules)

    def tail(self, width: int) -> Tail:
        """Builds the tail with a head of layers of ``width``. Call this inside ``seed_torch``.

        Raises InputError if the network cannot be cut there.
        """
        below, above = self._split()
        modules = [part.make() for part in above]
        if self.bottleneck is not None:
            channels, stride = self.bottleneck.channels, self.bottleneck.stride
            restore = nn.ConvTranspose2d(
                channels, below[-1].channels, 3, stride=stride, padding=1, output_padding=stride - 1
            )
            modules.insert(0, restore)
        return Tail(nn.Sequential(*modules), self.latent, self.features, width)


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

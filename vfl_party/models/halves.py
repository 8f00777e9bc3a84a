"""A network for images, cut in two: the bottom for those who hold the images, the tail for who
trains with them.

Group normalisation and standardised weights take the place of BatchNorm, so that a row's latent
depends on no other row (MocoSFL, appendix A.1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.config.models import CnnSettings, EncoderSettings, ResNet18Settings
from vfl_common.errors import Code, InputError

CHANNELS_PER_GROUP = 4
_EPSILON = 1e-5
# (channels, stride) a block.
_RESNET18 = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))


@dataclass(frozen=True)
class Bottleneck:
    """A convolution at the end of the bottom, undone by a transposed one at the tail's beginning
    (TAResSFL, A.4).
    """

    channels: int
    stride: int


@dataclass(frozen=True)
class _Part:
    """A part of the network, in order. ``convolutions``: how many layers of the paper's count it
    is.
    """

    convolutions: int
    # That it gives.
    channels: int
    # An image's height or width after it.
    side: Callable[[int], int]
    make: Callable[[], nn.Module]


class StandardisedConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 for each output channel (Qiao et al.
    2019).
    """

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(var + _EPSILON)
        return functional.conv2d(x, weight, self.bias, self.stride, self.padding)


def group_norm(channels: int) -> nn.GroupNorm:
    """Returns the normalisation of four channels a group, or of as many as divide ``channels``
    evenly.
    """
    groups = next(
        each
        for each in range(max(1, channels // CHANNELS_PER_GROUP), 0, -1)
        if channels % each == 0
    )
    return nn.GroupNorm(groups, channels)


class ResidualBlock(nn.Module):
    """ResNet's basic block. x: [B, C, H, W] -> [B, channels, H / stride, W / stride]."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = StandardisedConv(
            in_channels, channels, 3, stride=stride, padding=1, bias=False
        )
        self.norm1 = group_norm(channels)
        self.conv2 = StandardisedConv(channels, channels, 3, padding=1, bias=False)
        self.norm2 = group_norm(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != channels:
            conv = StandardisedConv(in_channels, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, group_norm(channels))

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class Tail(nn.Module):
    """The upper half: the rest of the network, averaged over positions, and a head of two layers
    for pretraining.

    ``latent``: C, H and W of what it takes.
    """

    def __init__(
        self, body: nn.Module, latent: tuple[int, int, int], features: int, width: int
    ) -> None:
        super().__init__()
        self.body, self.latent = body, latent
        self.head = nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, width))

    def features(self, z: Tensor) -> Tensor:
        """Returns the features [B, E] of latents, which a probe gets."""
        return torch.flatten(functional.adaptive_avg_pool2d(self.body(z), 1), 1)

    def forward(self, z: Tensor) -> Tensor:
        """Returns the projections [B, P] of latents z [B, C, H, W]."""
        p_BP: Tensor = self.head(self.features(z))
        return p_BP


@dataclass(frozen=True)
class Halves:
    """A network and where it is cut.

    Args:
        settings: of the encoder: a ``cnn`` or a ``resnet18``.
        image: C, H and W of a row.
        cut: how many convolutions the bottom has; ResNet's stem is 1, stem and one block are 3.
        bottleneck: at the cut, if there is one.
    """

    settings: EncoderSettings
    image: tuple[int, int, int]
    cut: int
    bottleneck: Bottleneck | None = None

    def _parts(self) -> list[_Part]:
        channels, height, width = self.image
        parts: list[_Part] = []
        match self.settings:
            case CnnSettings():
                for out in self.settings.channels:
                    pools = min(height, width) >= 2
                    part = _Part(
                        1, out, _halved_down if pools else _same, _layer(channels, out, pools=pools)
                    )
                    parts.append(part)
                    height, width, channels = part.side(height), part.side(width), out
            case ResNet18Settings():
                small = self.settings.small_images
                parts.append(
                    _Part(1, 64, _same if small else _quartered, _stem(channels, small=small))
                )
                channels = 64
                for out, stride in _RESNET18:
                    parts.append(
                        _Part(2, out, partial(_strided, stride), _block(channels, out, stride))
                    )
                    channels = out
            case other:
                text = f"an encoder of kind {other.kind!r} cannot be cut in two"
                raise InputError(
                    Code.MODEL_INVALID, f'recipe: model.encoder: {text}; take "cnn" or "resnet18"'
                )
        return parts

    def _split(self) -> tuple[list[_Part], list[_Part]]:
        """Returns the parts of bottom and tail. Raises InputError if the cut is not between two
        parts.
        """
        parts, counted = self._parts(), 0
        places = []
        for number, part in enumerate(parts[:-1], 1):
            counted += part.convolutions
            places.append(counted)
            if counted == self.cut:
                return parts[:number], parts[number:]
        text = f"cut = {self.cut} is not between two parts of this {self.settings.kind}"
        known = ", ".join(map(str, places)) or "none: it needs more channels"
        more = (
            "; a cnn of more channels has more"
            if places and isinstance(self.settings, CnnSettings)
            else ""
        )
        raise InputError(Code.MODEL_INVALID, f"recipe: phases: {text}; possible are {known}{more}")

    @property
    def features(self) -> int:
        """The width E of the tail's features. Raises InputError."""
        return self._parts()[-1].channels

    @property
    def latent(self) -> tuple[int, int, int]:
        """C, H and W of what crosses the cut. Raises InputError.

        Computed with numbers: torch's ``meta`` device imports sympy, which takes a second of
        processor time.
        """
        below, _ = self._split()
        _, *sides = self.image
        for part in below:
            sides = [part.side(side) for side in sides]
        channels, neck = below[-1].channels, self.bottleneck
        if neck is not None:
            channels, sides = neck.channels, [_strided(neck.stride, side) for side in sides]
        return channels, sides[0], sides[1]

    @property
    def fits(self) -> bool:
        """Whether the network can take one such image: a normalisation needs groups of several
        values.
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
        """Builds the bottom: x [B, C, H, W] -> z [B, *latent]. Build inside ``seeded``. Raises
        InputError.
        """
        below, _ = self._split()
        modules = [part.make() for part in below]
        if self.bottleneck is not None:
            channels, stride = self.bottleneck.channels, self.bottleneck.stride
            modules.append(nn.Conv2d(below[-1].channels, channels, 3, stride=stride, padding=1))
        return nn.Sequential(*modules)

    def tail(self, width: int) -> Tail:
        """Builds the tail, whose head has layers of ``width``. Build inside ``seeded``. Raises
        InputError.
        """
        below, above = self._split()
        modules = [part.make() for part in above]
        if self.bottleneck is not None:
            channels, stride = self.bottleneck.channels, self.bottleneck.stride
            back = nn.ConvTranspose2d(
                channels, below[-1].channels, 3, stride=stride, padding=1, output_padding=stride - 1
            )
            modules.insert(0, back)
        return Tail(nn.Sequential(*modules), self.latent, self.features, width)


def _same(side: int) -> int:
    return side


def _halved_down(side: int) -> int:
    return side // 2


def _strided(stride: int, side: int) -> int:
    return -(-side // stride)


def _quartered(side: int) -> int:
    return _strided(2, _strided(2, side))


def _layer(channels: int, out: int, *, pools: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        modules = [
            StandardisedConv(channels, out, 3, padding=1, bias=False),
            group_norm(out),
            nn.ReLU(),
        ]
        return nn.Sequential(*modules, *([nn.MaxPool2d(2)] if pools else []))

    return make


def _stem(channels: int, *, small: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        if small:
            return nn.Sequential(
                StandardisedConv(channels, 64, 3, padding=1, bias=False), group_norm(64), nn.ReLU()
            )
        conv = StandardisedConv(channels, 64, 7, stride=2, padding=3, bias=False)
        return nn.Sequential(conv, group_norm(64), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))

    return make


def _block(channels: int, out: int, stride: int) -> Callable[[], nn.Module]:
    return lambda: ResidualBlock(channels, out, stride)

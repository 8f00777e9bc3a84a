"""Convolutional networks: encoders with the networks of torchvision, and ordered parts of networks
that can be cut between any two parts.

In the parts, group normalisation and standardised weights replace BatchNorm, so that the latent of
a row does not depend on other rows (MocoSFL, appendix A.1). Functions import torchvision only when
they need it, because it takes 170 MB in each process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.config.models import CnnSettings, NetworkSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.layers import InputSpec, mark_top

CHANNELS_PER_GROUP = 4
_EPSILON = 1e-5
# (channels, number of blocks, stride of the first block) for each stage, He et al. 2016, Table 1.
RESNETS = {
    "resnet18": ((64, 2, 1), (128, 2, 2), (256, 2, 2), (512, 2, 2)),
    "resnet50": ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)),
}
# The number of a bottleneck block's output channels divided by its inner channels.
EXPANSION = 4
# (expansion, channels, number of blocks, stride of the first block) for each stage, Sandler et al.
# 2018, Table 2.
MOBILENET = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
MOBILENET_STEM, MOBILENET_LAST = 32, 1280
# The channels of the two convolutions before each pooling layer, Simonyan and Zisserman 2015,
# configuration B.
VGG13 = (64, 128, 256, 512, 512)


def mobilenet_stages(*, small: bool) -> tuple[tuple[int, int, int, int], ...]:
    """Returns the stages of MobileNetV2. For small images the second stage has stride 1."""
    return tuple(
        (expansion, channels, blocks, 1 if small and number == 1 else stride)
        for number, (expansion, channels, blocks, stride) in enumerate(MOBILENET)
    )


@dataclass(frozen=True)
class NetworkPart:
    """A part of a convolutional network that is never cut."""

    # The number of layers in this part, as the network's paper counts layers.
    convolutions: int
    # The number of output channels.
    channels: int
    # Returns the height or width of this part's output from that of its input.
    side: Callable[[int], int]
    make: Callable[[], nn.Module]


def parts_of_cnn(settings: CnnSettings, image: tuple[int, int, int]) -> Iterator[NetworkPart]:
    """Yields the parts of a ``cnn`` encoder."""
    channels, height, width = image
    for out in settings.channels:
        pools = min(height, width) >= 2
        part = _conv_layer(channels, out, pools=pools)
        yield part
        height, width, channels = part.side(height), part.side(width), out


def parts_of_network(
    settings: NetworkSettings, image: tuple[int, int, int]
) -> Iterator[NetworkPart]:
    """Yields the parts of a torchvision network: the stem and the blocks, or the layers of VGG."""
    channels, small = image[0], settings.small_images
    match settings.kind:
        case "vgg13":
            yield from _vgg(image)
        case "mobilenet_v2":
            yield from _mobilenet(channels, small=small)
        case _:
            side = _keep_side if small else _quarter_side
            yield NetworkPart(1, 64, side, partial(_resnet_stem, channels, small=small))
            is_bottleneck, channels = settings.kind == "resnet50", 64
            for width, blocks, first_stride in RESNETS[settings.kind]:
                out = width * EXPANSION if is_bottleneck else width
                for number in range(blocks):
                    stride = 1 if number else first_stride
                    make = (
                        partial(BottleneckBlock, channels, width, stride)
                        if is_bottleneck
                        else partial(ResidualBlock, channels, width, stride)
                    )
                    yield NetworkPart(
                        3 if is_bottleneck else 2, out, partial(apply_stride, stride), make
                    )
                    channels = out


def _vgg(image: tuple[int, int, int]) -> Iterator[NetworkPart]:
    channels, height, width = image
    for out in VGG13:
        pools = min(height, width) >= 2
        for last in (False, True):
            part = _conv_layer(channels, out, pools=pools and last)
            yield part
            height, width, channels = part.side(height), part.side(width), out


def _mobilenet(channels: int, *, small: bool) -> Iterator[NetworkPart]:
    stride, out = 1 if small else 2, MOBILENET_STEM
    yield NetworkPart(
        1,
        out,
        partial(apply_stride, stride),
        partial(_conv_norm_activation, channels, out, 3, stride),
    )
    channels = out
    for expansion, out, blocks, first_stride in mobilenet_stages(small=small):
        for number in range(blocks):
            stride = 1 if number else first_stride
            make = partial(InvertedResidual, channels, out, stride, expansion)
            yield NetworkPart(2 if expansion == 1 else 3, out, partial(apply_stride, stride), make)
            channels = out
    yield NetworkPart(
        1,
        MOBILENET_LAST,
        _keep_side,
        partial(_conv_norm_activation, channels, MOBILENET_LAST, 1, 1),
    )


class StandardisedConv(nn.Conv2d):
    """A convolution whose weights have mean 0 and variance 1 per channel (Qiao et al. 2019).

    With ``group_norm`` it replaces BatchNorm, so that the latent of a row does not depend on other
    rows (MocoSFL, appendix A.1).
    """

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(var + _EPSILON)
        return functional.conv2d(
            x, weight, self.bias, self.stride, self.padding, groups=self.groups
        )


def group_norm(channels: int) -> nn.GroupNorm:
    """Returns a group normalisation with about four channels for each group.

    The number of groups always divides ``channels``.
    """
    groups = next(
        divisor
        for divisor in range(max(1, channels // CHANNELS_PER_GROUP), 0, -1)
        if channels % divisor == 0
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
        self.shortcut = _shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(h)) + self.shortcut(x))


class BottleneckBlock(nn.Module):
    """ResNet-50's block, with the stride in the 3x3 convolution as in torchvision.

    x: [B, C, H, W] -> [B, 4 * channels, H / stride, W / stride].
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out = channels * EXPANSION
        self.inner = nn.Sequential(
            *_conv_norm_activation(in_channels, channels, 1, 1, nn.ReLU),
            *_conv_norm_activation(channels, channels, 3, stride, nn.ReLU),
            StandardisedConv(channels, out, 1, bias=False),
            group_norm(out),
        )
        self.shortcut = _shortcut(in_channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.inner(x) + self.shortcut(x))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expansion, depthwise convolution, and a projection without activation.

    x: [B, C, H, W] -> [B, out, H / stride, W / stride].
    """

    def __init__(self, in_channels: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner_channels = in_channels * expansion
        depthwise = StandardisedConv(
            inner_channels,
            inner_channels,
            3,
            stride=stride,
            padding=1,
            groups=inner_channels,
            bias=False,
        )
        self.inner = nn.Sequential(
            *(_conv_norm_activation(in_channels, inner_channels, 1, 1) if expansion > 1 else ()),
            depthwise,
            group_norm(inner_channels),
            nn.ReLU6(),
            StandardisedConv(inner_channels, out, 1, bias=False),
            group_norm(out),
        )
        self._adds = stride == 1 and in_channels == out

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inner(x)
        return x + h if self._adds else h


def _shortcut(in_channels: int, channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == channels:
        return nn.Identity()
    conv = StandardisedConv(in_channels, channels, 1, stride=stride, bias=False)
    return nn.Sequential(conv, group_norm(channels))


def _conv_norm_activation(
    channels: int, out: int, size: int, stride: int, activation: type[nn.Module] = nn.ReLU6
) -> nn.Sequential:
    conv = StandardisedConv(channels, out, size, stride=stride, padding=size // 2, bias=False)
    return nn.Sequential(conv, group_norm(out), activation())


def _conv_layer(channels: int, out: int, *, pools: bool) -> NetworkPart:
    """Returns a part of a 3x3 convolution with ReLU and, if ``pools``, a 2x2 pooling layer."""

    def make() -> nn.Module:
        modules = _conv_norm_activation(channels, out, 3, 1, nn.ReLU)
        return modules.append(nn.MaxPool2d(2)) if pools else modules

    return NetworkPart(1, out, _halve_side if pools else _keep_side, make)


def _resnet_stem(channels: int, *, small: bool) -> nn.Module:
    if small:
        return _conv_norm_activation(channels, 64, 3, 1, nn.ReLU)
    stem = _conv_norm_activation(channels, 64, 7, 2, nn.ReLU)
    return stem.append(nn.MaxPool2d(3, stride=2, padding=1))


def _keep_side(side: int) -> int:
    return side


def _halve_side(side: int) -> int:
    return side // 2


def apply_stride(stride: int, side: int) -> int:
    """Returns an image's height or width after a padded convolution of this stride."""
    return -(-side // stride)


def _quarter_side(side: int) -> int:
    return apply_stride(2, apply_stride(2, side))


def build_network(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds a torchvision network with random weights.

    The encoder takes [B, C, H, W] and returns [B, embedding_size]. Its top consists of the layers
    after the first stage of blocks (``resnet18``, ``resnet50``), the upper half of the blocks
    (``mobilenet_v2``), or the layers after the third pooling (``vgg13``). Raises InputError if
    ``last_layer`` is false and ``embedding_size`` is not the width of the network's features.
    """
    build = {"mobilenet_v2": _build_mobilenet, "vgg13": _build_vgg}.get(
        settings.kind, _build_resnet
    )
    return build(settings, spec, embedding_size)


def _build_resnet(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds a ResNet (He et al. 2016).

    For small images the stem is a 3x3 convolution of stride 1 without pooling, as is usual on
    CIFAR.
    """
    from torchvision import models

    channels = spec.shape[0]
    model: nn.Module = getattr(models, settings.kind)(weights=None, num_classes=embedding_size)
    if settings.small_images:
        stem = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    _init_conv(stem)
    model.conv1 = stem
    if settings.last_layer:
        return mark_top(model, "layer2", "layer3", "layer4", "fc")
    last: nn.Linear = model.fc  # type: ignore[assignment]
    _check_width(settings, last, embedding_size)
    model.fc = nn.Identity()
    return mark_top(model, "layer2", "layer3", "layer4")


def _build_mobilenet(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds a MobileNetV2 (Sandler et al. 2018).

    For small images the stem and the second stage have stride 1.
    """
    from torchvision.models import mobilenet_v2

    stages = [list(stage) for stage in mobilenet_stages(small=settings.small_images)]
    model: nn.Module = mobilenet_v2(
        weights=None, num_classes=embedding_size, inverted_residual_setting=stages
    )
    stride = 1 if settings.small_images else 2
    stem = nn.Conv2d(spec.shape[0], MOBILENET_STEM, 3, stride=stride, padding=1, bias=False)
    _init_conv(stem)
    features: nn.Sequential = model.features  # type: ignore[assignment]
    features[0][0] = stem  # type: ignore[operator]
    upper = [f"features.{number}" for number in range(len(features) // 2, len(features))]
    if settings.last_layer:
        return mark_top(model, *upper, "classifier")
    classifier: nn.Sequential = model.classifier  # type: ignore[assignment]
    _check_width(settings, classifier[-1], embedding_size)
    model.classifier = nn.Identity()
    return mark_top(model, *upper)


def _build_vgg(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds a VGG network with batch normalisation (Simonyan and Zisserman 2015, configuration B).

    Pooling layers that would get an image of one pixel are left out.
    """
    from torchvision.models import vgg, vgg13_bn

    if settings.small_images:
        # The last three layers of torchvision's vgg13 have 120 million weights, so this model has
        # one linear layer instead.
        model: nn.Module = nn.Sequential()
        model.features = vgg.make_layers(vgg.cfgs["B"], batch_norm=True)
        model.avgpool, model.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
        model.classifier = nn.Sequential(nn.Linear(VGG13[-1], embedding_size))
        for conv in model.modules():
            if isinstance(conv, nn.Conv2d):
                _init_conv(conv)
    else:
        model = vgg13_bn(weights=None, num_classes=embedding_size)
    features: nn.Sequential = model.features  # type: ignore[assignment]
    classifier: nn.Sequential = model.classifier  # type: ignore[assignment]
    features[0] = nn.Conv2d(spec.shape[0], VGG13[0], 3, padding=1)
    _init_conv(features[0])
    pools = [place for place, layer in enumerate(features) if isinstance(layer, nn.MaxPool2d)]
    for number, place in enumerate(pools):
        if min(spec.shape[1:]) >> number < 2:
            features[place] = nn.Identity()
    upper = [f"features.{number}" for number in range(pools[2] + 1, len(features))]
    if settings.last_layer:
        return mark_top(model, *upper, "classifier")
    _check_width(settings, classifier[-1], embedding_size)
    classifier[-1] = nn.Identity()
    return mark_top(model, *upper, *(() if settings.small_images else ("classifier",)))


def _init_conv(conv: nn.Module) -> None:
    """Initialises the weights of a convolution as torchvision does."""
    if isinstance(conv, nn.Conv2d):
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)


def _check_width(settings: NetworkSettings, last: nn.Module, embedding_size: int) -> None:
    if isinstance(last, nn.Linear) and last.in_features != embedding_size:
        raise InputError(
            Code.MODEL_INVALID,
            f"model.encoder: embedding_size must be {last.in_features}, the width of "
            f'"{settings.kind}" without its last layer (got {embedding_size}). Change '
            "embedding_size, or set last_layer = true.",
        )

"""Encoders with the networks of torchvision.

Functions import torchvision only when they need it, because it takes 170 MB in each process.
"""

from __future__ import annotations

from torch import nn

from vfl_common.config.models import NetworkSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.blocks import MOBILENET_STEM, VGG13, mobilenet_stages
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top


def build_network(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds a torchvision network with random weights.

    The encoder takes [B, C, H, W] and returns [B, embedding_size]. Its top consists of the layers
    after the first stage of blocks (``resnet18``, ``resnet50``), the upper half of the blocks
    (``mobilenet_v2``), or the layers after the third pooling (``vgg13``). Raises InputError if
    ``last_layer`` is false and ``embedding_size`` is not the width of the network's features.
    """
    build = {"mobilenet_v2": _mobilenet, "vgg13": _vgg}.get(settings.kind, _resnet)
    return build(settings, spec, embedding_size)


def _resnet(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
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


def _mobilenet(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
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


def _vgg(settings: NetworkSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
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

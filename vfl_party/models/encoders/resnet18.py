"""The ``resnet18`` encoder: torchvision's, imported only on use (170 MB a process)."""

from __future__ import annotations

from torch import nn

from vfl_common.config.models import ResNet18Settings
from vfl_party.models.encoders.spec import InputSpec
from vfl_party.models.parts import mark_top


def build_resnet18(settings: ResNet18Settings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds ResNet-18 (He et al. 2016) with random weights.

    For small images the stem is a 3x3 convolution of stride 1, without pooling, as is usual on
    CIFAR. x: [B, C, H, W]; returns [B, embedding_size]. Its top is all above the first stage of
    blocks.
    """
    from torchvision.models import resnet18

    channels = spec.shape[0]
    model: nn.Module = resnet18(weights=None, num_classes=embedding_size)
    if settings.small_images:
        stem = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        stem = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    # As torchvision does.
    nn.init.kaiming_normal_(stem.weight, mode="fan_out", nonlinearity="relu")
    model.conv1 = stem
    return mark_top(model, "layer2", "layer3", "layer4", "fc")

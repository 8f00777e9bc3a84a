"""Applies colour jitter and grayscale with separate factors for each image.

Each step maps a pixel's channels x to A x + b. Only the offset of contrast depends on the image,
through its mean. So all steps together are one matrix and one offset for each image. Images may be
standardised, so values are not clamped to 0..1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl_party.selfsup.augment.draws import draw_booleans, draw_uniform
from vfl_party.selfsup.augment.settings import AugmentSettings

# The weights of red, green and blue in torchvision and PIL.
LUMA = (0.2989, 0.587, 0.114)
# The transform from RGB to YIQ: brightness and two colour axes.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def _hue_terms() -> tuple[Tensor, Tensor]:
    """Returns matrices C and S, [3, 3] each. A rotation of the colour plane by an angle a is I +
    (cos a - 1) C + sin a S.
    """
    yiq = torch.tensor(YIQ, dtype=torch.float64)
    plane = torch.diag(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    # A positive angle rotates red towards yellow, as in HSV.
    quarter = torch.tensor([[0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64)
    back = torch.linalg.inv(yiq)
    return (back @ plane @ yiq).float(), (back @ quarter @ yiq).float()


HUE_COS, HUE_SIN = _hue_terms()


def draw_colours(n: int, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Draws the colour changes of n images, [n, 5]: factors of brightness, contrast and saturation,
    the rotation of the hue as a share of the circle, and 1 if the image becomes grey.

    An image without jitter gets 1, 1, 1, 0.
    """
    spread = torch.tensor(
        [settings.brightness, settings.contrast, settings.saturation, settings.hue]
    )
    change_B4 = draw_uniform(-1, 1, n, 4, generator=generator) * spread
    change_B4 *= draw_booleans(settings.jitter, n, 1, generator=generator)
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0])
    return torch.cat(
        [change_B4 + neutral, draw_booleans(settings.grayscale, n, 1, generator=generator)], dim=1
    )


def recolour(images_BCHW: Tensor, colour_B5: Tensor) -> Tensor:
    """Applies brightness, contrast, saturation, hue and grayscale, in this order. Applies only the
    first two unless C = 3.

    Brightness multiplies. Contrast blends with the image's mean (of its luma if C = 3), and
    saturation with the pixel's luma, like torchvision without clamping. Hue rotates the colour
    plane of YIQ, which is a linear map. torchvision uses HSV instead, which is undefined for
    standardised values.
    """
    brightness_B, contrast_B, saturation_B, hue_B, gray_B = colour_B5.unbind(dim=1)
    factor_B, base_B = brightness_B * contrast_B, brightness_B * (1 - contrast_B)
    if images_BCHW.shape[1] != 3:
        mean_B = images_BCHW.mean(dim=(1, 2, 3))
        return torch.addcmul(
            (base_B * mean_B)[:, None, None, None], images_BCHW, factor_B[:, None, None, None]
        )
    luma = torch.tensor(LUMA, device=images_BCHW.device)
    mean_B = images_BCHW.mean(dim=(2, 3)) @ luma
    mix_B33 = _desaturate(gray_B, luma) @ _rotate_hue(hue_B) @ _desaturate(1 - saturation_B, luma)
    # The offset is the same in all channels.
    offset_B31 = mix_B33.sum(dim=2, keepdim=True) * (base_B * mean_B)[:, None, None]
    colours = torch.baddbmm(offset_B31, mix_B33 * factor_B[:, None, None], images_BCHW.flatten(2))
    return colours.view_as(images_BCHW)


def _desaturate(share_B: Tensor, luma: Tensor) -> Tensor:
    """Returns matrices [B, 3, 3] that move a colour towards its grey by ``share_B``."""
    eye = torch.eye(3, device=luma.device)
    return eye + share_B[:, None, None] * (luma.expand(3, 3) - eye)


def _rotate_hue(hue_B: Tensor) -> Tensor:
    """Returns matrices [B, 3, 3] that rotate the hue by a share of the circle."""
    angle_B11 = (2 * math.pi * hue_B)[:, None, None]
    cos, sin = HUE_COS.to(hue_B.device), HUE_SIN.to(hue_B.device)
    return torch.eye(3, device=hue_B.device) + (angle_B11.cos() - 1) * cos + angle_B11.sin() * sin

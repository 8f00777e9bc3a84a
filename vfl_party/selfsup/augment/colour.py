"""Colour jitter and grayscale with separate factors for each image.

Each step maps a pixel's channels x to A x + b; only the offset of contrast depends on the image, by
its mean. A whole jitter is therefore one matrix and one offset an image. Images may be
standardised: nothing is clamped to 0..1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl_party.selfsup.augment.draws import between, happens
from vfl_party.selfsup.augment.settings import AugmentSettings

# The weights of red, green and blue in torchvision and PIL.
LUMA = (0.2989, 0.587, 0.114)
# The transform from RGB to YIQ: brightness and two colour axes.
YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def _hue_terms() -> tuple[Tensor, Tensor]:
    """Returns C and S, [3, 3] each: a turn of the colour plane by an angle a is I + (cos a - 1) C +
    sin a S.
    """
    yiq = torch.tensor(YIQ, dtype=torch.float64)
    plane = torch.diag(torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64))
    # Red towards yellow, as in HSV.
    quarter = torch.tensor([[0, 0, 0], [0, 0, 1], [0, -1, 0]], dtype=torch.float64)
    back = torch.linalg.inv(yiq)
    return (back @ plane @ yiq).float(), (back @ quarter @ yiq).float()


HUE_COS, HUE_SIN = _hue_terms()


def draw_colours(n: int, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Draws [n, 5]: brightness, contrast and saturation factors, hue in turns, and 1 if the image
    loses its colours.

    An image without jitter gets 1, 1, 1, 0.
    """
    spread = torch.tensor(
        [settings.brightness, settings.contrast, settings.saturation, settings.hue]
    )
    change_B4 = between(-1, 1, n, 4, generator=generator) * spread
    change_B4 *= happens(settings.jitter, n, 1, generator=generator)
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0])
    return torch.cat(
        [change_B4 + neutral, happens(settings.grayscale, n, 1, generator=generator)], dim=1
    )


def recolour(images_BCHW: Tensor, colour_B5: Tensor) -> Tensor:
    """Applies brightness, contrast, saturation, hue, grayscale, in this order; only the first two
    unless C = 3.

    Brightness multiplies. Contrast blends with the image's mean (of its luma if C = 3), saturation
    with the pixel's luma, like torchvision without clamping. Hue turns the colour plane of YIQ, a
    linear map; torchvision uses HSV, which is undefined for standardised values.
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
    mix_B33 = _desaturate(gray_B, luma) @ _turn(hue_B) @ _desaturate(1 - saturation_B, luma)
    # The same in all channels.
    offset_B31 = mix_B33.sum(dim=2, keepdim=True) * (base_B * mean_B)[:, None, None]
    colours = torch.baddbmm(offset_B31, mix_B33 * factor_B[:, None, None], images_BCHW.flatten(2))
    return colours.view_as(images_BCHW)


def _desaturate(share_B: Tensor, luma: Tensor) -> Tensor:
    """Returns [B, 3, 3]: moves a colour by ``share`` towards its gray."""
    eye = torch.eye(3, device=luma.device)
    return eye + share_B[:, None, None] * (luma.expand(3, 3) - eye)


def _turn(hue_B: Tensor) -> Tensor:
    """Returns [B, 3, 3]: turns the hue by a share of the circle."""
    angle_B11 = (2 * math.pi * hue_B)[:, None, None]
    cos, sin = HUE_COS.to(hue_B.device), HUE_SIN.to(hue_B.device)
    return torch.eye(3, device=hue_B.device) + (angle_B11.cos() - 1) * cos + angle_B11.sin() * sin

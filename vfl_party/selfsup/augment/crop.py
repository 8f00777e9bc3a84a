"""Applies a random resized crop and a horizontal flip, with a separate box for each image."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from vfl_party.selfsup.augment.draws import draw_booleans, draw_uniform
from vfl_party.selfsup.augment.settings import AugmentSettings

# The number of boxes that are tried before the fallback, as in torchvision's RandomResizedCrop.
ATTEMPTS = 10


def draw_crops(
    n: int, height: int, width: int, settings: AugmentSettings, generator: torch.Generator
) -> Tensor:
    """Draws a box for each of n images, [n, 5]: top, left, height and width in whole pixels, and 1
    if the image is mirrored, else 0.

    Boxes have the same distribution as in torchvision's ``RandomResizedCrop``: the first of ten
    pairs of area and ratio that fits into the image, or else the middle of the image.
    """
    area = draw_uniform(*settings.crop_scale, n, ATTEMPTS, generator=generator).mul_(height * width)
    low, high = map(math.log, settings.crop_ratio)
    ratio = draw_uniform(low, high, n, ATTEMPTS, generator=generator).exp_()
    # The boxes of all attempts, [n, attempts, (height, width)].
    boxes = torch.stack([area / ratio, area * ratio], dim=2).sqrt_().round_()
    fits = ((boxes >= 1) & (boxes <= torch.tensor([height, width]))).all(dim=2)
    # The index of the first box that fits.
    first_fit = fits.int().argmax(dim=1)
    box_B2 = boxes[torch.arange(n), first_fit]
    box_B2 = torch.where(
        fits.any(dim=1, keepdim=True),
        box_B2,
        torch.tensor(_compute_middle_box(height, width, settings)),
    )
    room_B2 = torch.tensor([height, width]) - box_B2
    corner_B2 = (torch.rand(n, 2, generator=generator) * (room_B2 + 1)).floor_()
    corner_B2 = torch.where(fits.any(dim=1, keepdim=True), corner_B2, (room_B2 / 2).floor_())
    return torch.cat(
        [corner_B2, box_B2, draw_booleans(settings.flip, n, 1, generator=generator)], dim=1
    )


def crop(images_BCHW: Tensor, crop_B5: Tensor) -> Tensor:
    """Stretches each image's box to the size of the image (bilinear, no anti-aliasing), and mirrors
    it if its flag is 1.

    The result is the same as torchvision's ``resized_crop(..., antialias=False)``: no pixel outside
    the box is read.
    """
    _, _, H, W = images_BCHW.shape
    top_B, left_B, height_B, width_B, flip_B = crop_B5.unbind(dim=1)
    y_BH, x_BW = _make_positions(top_B, height_B, H), _make_positions(left_B, width_B, W)
    x_BW = torch.where(flip_B.bool()[:, None], x_BW.flip(1), x_BW)
    grid_BHW2 = torch.stack(
        [x_BW[:, None, :].expand(-1, H, W), y_BH[:, :, None].expand(-1, H, W)], dim=3
    )
    return functional.grid_sample(
        images_BCHW, grid_BHW2, padding_mode="border", align_corners=False
    )


def _make_positions(start_B: Tensor, length_B: Tensor, size: int) -> Tensor:
    """Returns the positions to read along an axis, [B, size], in the units of grid_sample, where -1
    and 1 are the image's outer edges.
    """
    centres = torch.arange(size, device=start_B.device) + 0.5
    # Positions in pixels of the box.
    inside = (centres * (length_B / size)[:, None] - 0.5).clamp_(min=0)
    inside = torch.minimum(inside, (length_B - 1)[:, None])
    return (inside + start_B[:, None] + 0.5) * (2 / size) - 1


def _compute_middle_box(height: int, width: int, settings: AugmentSettings) -> tuple[float, float]:
    """Returns the height and the width of the largest box with an allowed ratio."""
    low, high = settings.crop_ratio
    ratio = min(max(width / height, low), high)
    return float(max(1, min(height, round(width / ratio)))), float(
        max(1, min(width, round(height * ratio)))
    )

"""Random resized crop and horizontal flip with a separate box for each image."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from vfl_party.selfsup.augment.draws import between, happens
from vfl_party.selfsup.augment.settings import AugmentSettings

# Boxes tried before the fallback, as in torchvision's RandomResizedCrop.
ATTEMPTS = 10


def draw_crops(
    n: int, height: int, width: int, settings: AugmentSettings, generator: torch.Generator
) -> Tensor:
    """Draws [n, 5]: top, left, height and width of a box in whole pixels, and 1 if it is mirrored,
    else 0.

    Boxes are distributed as those of torchvision's ``RandomResizedCrop``: the first of ten pairs of
    area and ratio that fits into the image, or else the middle of the image.
    """
    area = between(*settings.crop_scale, n, ATTEMPTS, generator=generator).mul_(height * width)
    low, high = map(math.log, settings.crop_ratio)
    ratio = between(low, high, n, ATTEMPTS, generator=generator).exp_()
    # [n, attempts, (height, width)].
    boxes = torch.stack([area / ratio, area * ratio], dim=2).sqrt_().round_()
    fits = ((boxes >= 1) & (boxes <= torch.tensor([height, width]))).all(dim=2)
    # The first that fits.
    first = fits.int().argmax(dim=1)
    box_B2 = boxes[torch.arange(n), first]
    box_B2 = torch.where(
        fits.any(dim=1, keepdim=True), box_B2, torch.tensor(_middle(height, width, settings))
    )
    room_B2 = torch.tensor([height, width]) - box_B2
    corner_B2 = (torch.rand(n, 2, generator=generator) * (room_B2 + 1)).floor_()
    corner_B2 = torch.where(fits.any(dim=1, keepdim=True), corner_B2, (room_B2 / 2).floor_())
    return torch.cat([corner_B2, box_B2, happens(settings.flip, n, 1, generator=generator)], dim=1)


def crop(images_BCHW: Tensor, crop_B5: Tensor) -> Tensor:
    """Stretches each image's box to the size of the image (bilinear, no anti-aliasing); mirrors it
    if its flag is 1.

    Equal to torchvision's ``resized_crop(..., antialias=False)``: no pixel outside the box is read.
    """
    _, _, H, W = images_BCHW.shape
    top_B, left_B, height_B, width_B, flip_B = crop_B5.unbind(dim=1)
    y_BH, x_BW = _grid(top_B, height_B, H), _grid(left_B, width_B, W)
    x_BW = torch.where(flip_B.bool()[:, None], x_BW.flip(1), x_BW)
    grid_BHW2 = torch.stack(
        [x_BW[:, None, :].expand(-1, H, W), y_BH[:, :, None].expand(-1, H, W)], dim=3
    )
    return functional.grid_sample(
        images_BCHW, grid_BHW2, padding_mode="border", align_corners=False
    )


def _grid(start_B: Tensor, length_B: Tensor, size: int) -> Tensor:
    """Returns [B, size]: the positions to read along an axis, for grid_sample: -1 and 1 are the
    image's outer edges.
    """
    centres = torch.arange(size, device=start_B.device) + 0.5
    # In pixels of the box.
    inside = (centres * (length_B / size)[:, None] - 0.5).clamp_(min=0)
    inside = torch.minimum(inside, (length_B - 1)[:, None])
    return (inside + start_B[:, None] + 0.5) * (2 / size) - 1


def _middle(height: int, width: int, settings: AugmentSettings) -> tuple[float, float]:
    """Returns height and width of the largest box of an allowed ratio."""
    low, high = settings.crop_ratio
    ratio = min(max(width / height, low), high)
    return float(max(1, min(height, round(width / ratio)))), float(
        max(1, min(width, round(height * ratio)))
    )

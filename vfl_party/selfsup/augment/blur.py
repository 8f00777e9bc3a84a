"""Gaussian blur with a separate width for each image."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_party.selfsup.augment.draws import draw_booleans, draw_uniform
from vfl_party.selfsup.augment.settings import AugmentSettings

# The range of sigma in pixels (SimCLR, appendix A).
SIGMA = (0.1, 2.0)


def draw_blurs(n: int, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Draws a sigma in pixels for each of n images, [n]. A sigma of 0 leaves an image unchanged."""
    sigma_B = draw_uniform(*SIGMA, n, generator=generator)
    return sigma_B * draw_booleans(settings.blur, n, generator=generator)


def blur(images_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    """Blurs each image along both axes. The kernel's size is a tenth of the image (SimCLR), at
    least 3 pixels.

    Beyond its edges the image is mirrored, as in torchvision's ``gaussian_blur``.
    """
    H, W = images_BCHW.shape[2:]
    return (
        _make_blur_matrices(H, sigma_B)[:, None]
        @ images_BCHW
        @ _make_blur_matrices(W, sigma_B)[:, None].mT
    )


def get_radius(size: int) -> int:
    """Returns the number of the kernel's pixels on each side of its middle."""
    return min(max(1, round(size / 20)), size - 1)


def _make_blur_matrices(size: int, sigma_B: Tensor) -> Tensor:
    """Returns the blur along one axis as matrices, [B, size, size]. Row i contains the weights of
    the input pixels for output pixel i.
    """
    reach = get_radius(size)
    offsets_K = torch.arange(-reach, reach + 1, device=sigma_B.device)
    # A sigma of 1e-3 does not blur.
    weights_BK = torch.softmax(-0.5 * (offsets_K / sigma_B.clamp(min=1e-3)[:, None]) ** 2, dim=1)
    # The positions of the kernel's pixels, [size, K], mirrored at the first pixel …
    places = (torch.arange(size, device=sigma_B.device)[:, None] + offsets_K).abs()
    # … and at the last pixel.
    places = torch.where(places < size, places, 2 * (size - 1) - places)
    smear = torch.zeros(len(sigma_B), size, size, device=sigma_B.device)
    where = places.expand(len(sigma_B), -1, -1)
    return smear.scatter_add_(2, where, weights_BK[:, None, :].expand_as(where))

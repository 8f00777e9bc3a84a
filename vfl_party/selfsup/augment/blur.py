"""Gaussian blur with a separate width for each image."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_party.selfsup.augment.draws import between, happens
from vfl_party.selfsup.augment.settings import AugmentSettings

# The range of sigma in pixels (SimCLR, appendix A).
SIGMA = (0.1, 2.0)


def draw_blurs(n: int, settings: AugmentSettings, generator: torch.Generator) -> Tensor:
    """Draws sigma in pixels, [n]; 0 leaves an image as it is."""
    sigma_B = between(*SIGMA, n, generator=generator)
    return sigma_B * happens(settings.blur, n, generator=generator)


def blur(images_BCHW: Tensor, sigma_B: Tensor) -> Tensor:
    """Blurs each image along both axes; the kernel is a tenth of the image (SimCLR), at least 3
    pixels.

    Beyond its edges the image is mirrored, as in torchvision's ``gaussian_blur``.
    """
    H, W = images_BCHW.shape[2:]
    return _smear(H, sigma_B)[:, None] @ images_BCHW @ _smear(W, sigma_B)[:, None].mT


def radius(size: int) -> int:
    """Returns the kernel's pixels on either side of its middle."""
    return min(max(1, round(size / 20)), size - 1)


def _smear(size: int, sigma_B: Tensor) -> Tensor:
    """Returns [B, size, size]: row i holds the weights of the pixels that make pixel i."""
    reach = radius(size)
    offsets_K = torch.arange(-reach, reach + 1, device=sigma_B.device)
    # A sigma of 1e-3 does not blur.
    weights_BK = torch.softmax(-0.5 * (offsets_K / sigma_B.clamp(min=1e-3)[:, None]) ** 2, dim=1)
    # [size, K], mirrored at 0 …
    places = (torch.arange(size, device=sigma_B.device)[:, None] + offsets_K).abs()
    # … and at the end.
    places = torch.where(places < size, places, 2 * (size - 1) - places)
    smear = torch.zeros(len(sigma_B), size, size, device=sigma_B.device)
    where = places.expand(len(sigma_B), -1, -1)
    return smear.scatter_add_(2, where, weights_BK[:, None, :].expand_as(where))

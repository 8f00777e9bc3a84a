"""Similarity of reconstructed images to their originals: mean squared error, SSIM and PSNR.

Pixels are from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_party.models.metrics import functional

# Pixels from the middle of SSIM's window to its edge: 11 x 11 pixels, as Wang et al. (2004) have
# it.
_MAX_REACH = 5
# Standard deviation of the window's Gaussian per pixel of its reach: 1.5 for 11 x 11 pixels.
_SIGMA = 0.3


@dataclass(frozen=True)
class Likeness:
    """The similarity of images to their originals.

    ``mse``: over all pixels of all images. ``ssim``: the mean over the images. ``psnr``: dB, of
    that ``mse``; infinite if the images are equal.
    """

    mse: float
    ssim: float
    psnr: float


def likeness(images: Tensor, truth: Tensor) -> Likeness:
    """Measures images [N, C, H, W] against their originals, in float64 on the CPU."""
    images, truth = images.detach().cpu().double(), truth.detach().cpu().double()
    psnr = functional().image.peak_signal_noise_ratio(images, truth, data_range=1.0)
    return Likeness(F.mse_loss(images, truth).item(), ssim(images, truth).item(), psnr.item())


def window(height: int, width: int) -> int:
    """Returns the height and width of SSIM's window: 11 pixels; below 20 pixels about half of the
    image, at least 3.

    A window of 11 pixels covers a whole image of 8 x 8 pixels, most of it mirrored.
    """
    return 2 * _reach(height, width) + 1


def ssim(images: Tensor, truth: Tensor) -> Tensor:
    """Returns the mean structural similarity of images [B, C, H, W], a scalar with gradient.

    The window is Gaussian, at every pixel; beyond its edges the image is mirrored. Images have
    at least 2 x 2 pixels.
    """
    # Torchmetrics makes a window of int(3.5 sigma + 0.5) pixels of reach.
    sigma = _SIGMA * _reach(*images.shape[2:])
    structural_similarity = functional().image.structural_similarity_index_measure
    # The map of all pixels: which of them the mean counts differs between versions of torchmetrics.
    _, map_BCHW = structural_similarity(
        images, truth, sigma=sigma, data_range=1.0, return_full_image=True
    )
    mean: Tensor = map_BCHW.mean()
    return mean


def _reach(height: int, width: int) -> int:
    return min(_MAX_REACH, max(1, min(height, width) // 4))

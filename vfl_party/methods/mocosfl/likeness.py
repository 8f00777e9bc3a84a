"""Measures the similarity of reconstructed images to their originals: mean squared error, SSIM and
PSNR.

Pixels are from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_party.models.metrics import functional

# The maximum number of pixels from the middle of SSIM's window to its edge. It gives the window of
# 11 x 11 pixels of Wang et al. (2004).
_MAX_REACH = 5
# The standard deviation of the window's Gaussian, divided by the pixels from the middle to the
# edge: 1.5 for 11 x 11 pixels.
_SIGMA = 0.3


@dataclass(frozen=True)
class Likeness:
    """The similarity of images to their originals.

    ``mse``: the mean squared error over all pixels of all images. ``ssim``: the mean SSIM of the
    images. ``psnr``: the PSNR that follows from ``mse``, in dB; infinite if the images are equal.
    """

    mse: float
    ssim: float
    psnr: float


def measure_likeness(images: Tensor, truth: Tensor) -> Likeness:
    """Measures the similarity of images [N, C, H, W] to their originals, in float64 on the CPU."""
    images, truth = images.detach().cpu().double(), truth.detach().cpu().double()
    psnr = functional().image.peak_signal_noise_ratio(images, truth, data_range=1.0)
    return Likeness(F.mse_loss(images, truth).item(), ssim(images, truth).item(), psnr.item())


def get_window_size(height: int, width: int) -> int:
    """Returns the size of SSIM's square window: 11 pixels, or about half of an image that is
    smaller than 20 pixels, but at least 3.

    A window of 11 pixels would cover a whole image of 8 x 8 pixels, and much of its mirror image.
    """
    return 2 * _get_reach(height, width) + 1


def ssim(images: Tensor, truth: Tensor) -> Tensor:
    """Returns the mean structural similarity of images [B, C, H, W], a scalar with gradient.

    A Gaussian window is centered at every pixel, and the image is mirrored at its edges. Images
    must have at least 2 x 2 pixels.
    """
    # Torchmetrics derives the window from sigma: int(3.5 sigma + 0.5) pixels from the middle to the
    # edge.
    sigma = _SIGMA * _get_reach(*images.shape[2:])
    structural_similarity = functional().image.structural_similarity_index_measure
    # The full map is averaged here, because versions of torchmetrics average different parts of it.
    _, map_BCHW = structural_similarity(
        images, truth, sigma=sigma, data_range=1.0, return_full_image=True
    )
    mean: Tensor = map_BCHW.mean()
    return mean


def _get_reach(height: int, width: int) -> int:
    return min(_MAX_REACH, max(1, min(height, width) // 4))

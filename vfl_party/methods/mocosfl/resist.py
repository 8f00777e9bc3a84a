"""Trains a bottom model to resist model inversion, at a single party in pretraining: TAResSFL
(MocoSFL, appendix A.4). Measures the similarity of reconstructed images to their originals.

Pixels are from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Rate
from vfl_party.base.seeds import derive_seed
from vfl_party.models import seed_torch
from vfl_party.models.halves import Decoder
from vfl_party.models.metrics import functional
from vfl_party.models.training import build_optimizer

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


class ResistSettings(Section):
    """Settings of the penalty on the bottom model for images that a decoder can reconstruct."""

    weight: Annotated[float, Field(gt=0.0, le=1e6)] = 2.0
    """The weight of the penalty."""
    ssim: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.6
    """The similarity (SSIM) of reconstructions above which there is a penalty."""
    lr: Rate = 1e-3
    """The learning rate of the decoder, which Adam trains."""


class Resistance:
    """A decoder that is trained along with a bottom model, and the penalty for its reconstructions.

    Args:
        latent, image: The shapes (C, H, W) of the outputs and the inputs of the bottom model.
        seed: The seed of the decoder's initial weights.
        by_ssim: Whether the decoder maximises the SSIM, as in the released code, instead of
            minimising the squared error, as in the paper.
    """

    def __init__(
        self,
        settings: ResistSettings,
        latent: tuple[int, int, int],
        image: tuple[int, int, int],
        *,
        seed: int,
        device: torch.device,
        by_ssim: bool,
    ) -> None:
        self._settings, self._by_ssim = settings, by_ssim
        with seed_torch(derive_seed(seed, "init", "resist")):
            self._decoder = Decoder(latent, image)
        self._decoder.to(device)
        self._optimizer = build_optimizer(
            OptimizerSettings(lr=settings.lr), self._decoder.parameters()
        )

    def gradient(self, z: Tensor, images: Tensor) -> tuple[Tensor | None, float]:
        """Trains the decoder for one step, then computes the penalty. ``z`` stays unchanged.

        Args:
            z: The latents [B, C, H, W] of at least two rows.
            images: The inputs of the bottom model, [B, C, H, W], with pixels from 0 to 1.

        Returns the gradient of the penalty with respect to z, None without a penalty, and the SSIM
        of the reconstructions.
        """
        settings = self._settings
        self._train_decoder(z.detach(), images)
        # An attacker uses a decoder in eval mode, in which a reconstruction does not depend on
        # other rows.
        self._decoder.eval()
        leaf = z.detach().requires_grad_()
        loss, similarity = penalty(self._decoder, leaf, images, settings.weight, settings.ssim)
        if loss is None:
            return None, similarity
        (dz,) = torch.autograd.grad(loss, leaf)
        return dz, similarity

    def _train_decoder(self, z: Tensor, images: Tensor) -> None:
        self._decoder.train()
        self._optimizer.zero_grad()
        reconstructed = self._decoder(z)
        loss = -ssim(reconstructed, images) if self._by_ssim else F.mse_loss(reconstructed, images)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "decoder": dict(self._decoder.state_dict()),
            "optimizer": self._optimizer.state_dict(),
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._decoder.load_state_dict(tree["decoder"])
        self._optimizer.load_state_dict(tree["optimizer"])


def penalty(
    decoder: nn.Module, z: Tensor, images: Tensor, weight: float, threshold: float
) -> tuple[Tensor | None, float]:
    """Returns weight · (SSIM - threshold) of a decoder's reconstructions, a scalar with gradient,
    and the SSIM.

    ``z``: the latents [B, C, H, W]. ``images``: the original images. The penalty is None if the
    SSIM is at most the threshold.
    """
    similarity = ssim(decoder(z), images)
    value = similarity.item()
    return (weight * (similarity - threshold) if value > threshold else None), value

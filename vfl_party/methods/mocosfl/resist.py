"""Trains a bottom model to resist model inversion, at a single party in pretraining: TAResSFL
(MocoSFL, appendix A.4).
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.config.base import Section
from vfl_common.config.models import OptimizerSettings, Rate
from vfl_party.base.seeds import derive_seed
from vfl_party.methods.mocosfl.likeness import ssim
from vfl_party.models import seed_torch
from vfl_party.models.halves import Decoder
from vfl_party.models.training import build_optimizer


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
        loss = (
            -ssim(reconstructed, images)
            if self._by_ssim
            else functional.mse_loss(reconstructed, images)
        )
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

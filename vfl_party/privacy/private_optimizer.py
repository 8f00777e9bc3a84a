"""Subclasses opacus's optimizer. It imports opacus, so import this module late (see
``vfl_party.privacy.dpsgd``).
"""

from __future__ import annotations

from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch.optim import Optimizer

from vfl_party.outbound.noise import PrivateGaussian

__all__ = ["GradSampleHooks", "ModuleValidator", "PrivateOptimizer"]


class PrivateOptimizer(DPOptimizer):  # type: ignore[misc]  # opacus has no types
    """opacus's optimizer with noise from our own generator: equal on every device, unpredictable,
    in checkpoints.

    A step clips each row's gradient, sums them, adds noise and divides by the expected batch size.
    opacus's secure_mode (noise against attacks on the low bits of floating-point numbers, Mironov
    2012) is left out.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        noise: PrivateGaussian,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float,
    ) -> None:
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size,
            loss_reduction="mean",
        )
        self._noise = noise

    def add_noise(self) -> None:
        """Sets g̃ = Σ clip(g_i) + N(0, (noise_multiplier * max_grad_norm)²) (FedOnce, Algorithm 1,
        lines 12 and 27).
        """
        std = self.noise_multiplier * self.max_grad_norm
        for p in self.params:
            p.grad = (
                p.summed_grad
                if std == 0
                else p.summed_grad + (std * self._noise.like(p)).to(p.dtype)
            )

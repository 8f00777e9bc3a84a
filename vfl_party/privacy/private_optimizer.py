"""Defines an opacus optimizer with our own random generator. Import this module late, because
opacus takes 1.6 s and 110 MB.
"""

from __future__ import annotations

from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch.optim import Optimizer

from vfl_party.outbound.filter import PrivateGaussian

__all__ = ["GradSampleHooks", "ModuleValidator", "PrivateOptimizer"]


class PrivateOptimizer(DPOptimizer):  # type: ignore[misc]  # opacus has no types
    """The optimizer of opacus with noise from our own secret generator. The noise is the same on
    every device, and checkpoints hold the generator's state.

    A step clips each row's gradient, sums them, adds noise and divides by the expected batch size.
    It does not use opacus's ``secure_mode``, which protects against attacks on the low bits of
    floating-point noise (Mironov 2012).
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
        """Sets the gradient to Σ clip(g_i) + N(0, (noise_multiplier * max_grad_norm)²) (FedOnce,
        Algorithm 1, lines 12 and 27).
        """
        std = self.noise_multiplier * self.max_grad_norm
        for p in self.params:
            p.grad = (
                p.summed_grad
                if std == 0
                else p.summed_grad + (std * self._noise.like(p)).to(p.dtype)
            )

"""The variational information bottleneck: an encoder with random embeddings that leak little."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.files import load_or_create_secret
from vfl_party.base.dtypes import get_real_dtype

SECRET_BYTES = 32
# The minimum σ of each element, so that outlier rows get noise too.
MIN_SIGMA = 0.1


class _WithTerm(torch.autograd.Function):
    """Adds ``weight * term`` to the loss of a party that has only the gradient of z.

    The forward pass returns z. The backward pass gives ``term`` the gradient ``weight``.
    """

    @staticmethod
    def forward(ctx: Any, z_BD: Tensor, term: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(term)
        return z_BD.view_as(z_BD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (term,) = ctx.saved_tensors
        return grads[0], torch.full_like(term, ctx.weight), None


class StochasticEncoder(nn.Module):
    """Draws embeddings z = μ + σ·ε with σ = 0.1 + softplus(s − ½) and ε ~ N(0, 1).

    This is MID (Zou, Liu and Zhang 2023, arXiv 2301.01142). λ · KL(N(μ, σ²) ‖ N(0, 1)) in the
    party's loss bounds the information about the columns in z, as in Alemi et al. (2017). KL is
    summed over the embedding and averaged over the batch. Embeddings are also random in evaluation.
    The minimum of 0.1 is not in the paper; without it σ may become 0.

    ε is a function of a secret and of (μ, s) of the whole batch, so it needs no state. A resumed
    run sends the same messages again, and a receiver never gets two messages with the same noise.
    The secret comes from the operating system's random numbers. It is a buffer of this module, so
    checkpoints contain it. Before the first checkpoint it is in a file in the run's folder.

    Args:
        encoder: Returns μ and s, concatenated to [B, 2·width].
        width: The width of z.
        weight: The weight λ of the KL term.
    """

    def __init__(self, encoder: nn.Module, width: int, weight: float) -> None:
        super().__init__()
        self.encoder, self.width, self.weight = encoder, width, weight
        self.secret: Tensor
        self.register_buffer("secret", _tensor(secrets.token_bytes(SECRET_BYTES)))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns random embeddings [B, width] of the encoder's ``inputs``."""
        mean_and_s = self.encoder(*inputs).to(get_real_dtype())
        mean_BD, s_BD = mean_and_s[:, : self.width], mean_and_s[:, self.width :]
        sigma_BD = MIN_SIGMA + functional.softplus(s_BD - 0.5)
        z_BD: Tensor = mean_BD + sigma_BD * self._noise(mean_and_s)
        if not (self.training and torch.is_grad_enabled()):
            return z_BD
        kl = 0.5 * (mean_BD**2 + sigma_BD**2 - 1 - 2 * sigma_BD.log()).sum(dim=1).mean()
        z_with_kl_BD: Tensor = _WithTerm.apply(z_BD, kl, self.weight)
        return z_with_kl_BD

    def keep_secret(self, path: Path) -> None:
        """Loads the secret from a file, or writes this module's secret if there is no file.

        A restarted generation sends the embeddings of the same weights again. It must use the same
        noise, because an average over several draws reveals more than one draw. Raises InputError
        if the file cannot be read or written.
        """
        self.secret.copy_(_tensor(load_or_create_secret(path, bytes(self.secret.cpu().numpy()))))

    def _noise(self, mean_and_s: Tensor) -> Tensor:
        """Returns ε, float32 [B, width], as a function of the secret and of ``mean_and_s``."""
        secret = bytes(self.secret.cpu().numpy())
        message = mean_and_s.detach().cpu().contiguous().numpy().tobytes()
        key = int.from_bytes(hmac.digest(secret, message, hashlib.sha256)[:16], "big")
        random = np.random.Generator(np.random.Philox(key=key))
        return torch.from_numpy(
            random.standard_normal((len(mean_and_s), self.width), dtype=np.float32)
        ).to(mean_and_s.device)


def _tensor(secret: bytes) -> Tensor:
    return torch.tensor(list(secret), dtype=torch.uint8)


class _MeanEncoder(nn.Module):
    def __init__(self, stochastic: StochasticEncoder) -> None:
        super().__init__()
        self.encoder, self.width = stochastic.encoder, stochastic.width

    def forward(self, *inputs: Tensor) -> Tensor:
        mean_BD: Tensor = self.encoder(*inputs)[:, : self.width]
        return mean_BD


def deterministic(encoder: nn.Module) -> nn.Module:
    """Returns an encoder with the same weights that returns the mean μ instead of a random z.

    Its embeddings are only for the party itself and must never be sent.
    """
    return _MeanEncoder(encoder) if isinstance(encoder, StochasticEncoder) else encoder

"""An encoder that draws its embeddings, and tells little of its columns: the variational
information bottleneck.
"""

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
from vfl_party.base.dtypes import real

SECRET_BYTES = 32
# The minimum σ of each element, so that rows far from the others get noise, too.
MIN_SIGMA = 0.1


class _WithTerm(torch.autograd.Function):
    """Returns z; whatever gradient comes back to z, ``weight`` comes back to ``term``: it is added
    to the loss.
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
    """z = μ + σ·ε with σ = 0.1 + softplus(s − ½) and ε ~ N(0, 1); λ · KL(N(μ, σ²) ‖ N(0, 1)) is
    added to the loss.

    MID (Zou, Liu and Zhang 2023, arXiv 2301.01142), which bounds what z tells of the columns as
    Alemi et al. (2017) do. KL is summed over the embedding and averaged over the batch; it is of
    the party's own loss. Embeddings are drawn in evaluation too. The 0.1 is ours: without it σ may
    become 0.

    ε is a function of a secret and of (μ, s) of the whole batch, so it needs no state: a resumed
    run sends the same messages again, and no receiver gets two different messages under one noise.
    The secret comes from the operating system and stays among the party's own weights, where its
    checkpoints keep it, and its run's folder before there is one.

    Args:
        encoder: gives μ and s side by side, [B, 2·width].
        width: of z.
        weight: λ.
    """

    def __init__(self, encoder: nn.Module, width: int, weight: float) -> None:
        super().__init__()
        self.encoder, self.width, self.weight = encoder, width, weight
        self.secret: Tensor
        self.register_buffer("secret", _tensor(secrets.token_bytes(SECRET_BYTES)))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Embeds an encoder's ``inputs`` as [B, width]."""
        both = self.encoder(*inputs).to(real())
        mean_BD, s_BD = both[:, : self.width], both[:, self.width :]
        sigma_BD = MIN_SIGMA + functional.softplus(s_BD - 0.5)
        z_BD: Tensor = mean_BD + sigma_BD * self._noise(both)
        if not (self.training and torch.is_grad_enabled()):
            return z_BD
        kl = 0.5 * (mean_BD**2 + sigma_BD**2 - 1 - 2 * sigma_BD.log()).sum(dim=1).mean()
        drawn: Tensor = _WithTerm.apply(z_BD, kl, self.weight)
        return drawn

    def keep_secret(self, path: Path) -> None:
        """Takes the secret that is in the file; writes its own if there is none. Raises InputError.

        A generation that restarts has the same weights again, and must not send them under other
        noise: the mean of many draws tells more than one.
        """
        self.secret.copy_(_tensor(load_or_create_secret(path, bytes(self.secret.cpu().numpy()))))

    def _noise(self, both: Tensor) -> Tensor:
        """Draws ε, float32 [B, width]."""
        secret = bytes(self.secret.cpu().numpy())
        message = both.detach().cpu().contiguous().numpy().tobytes()
        key = int.from_bytes(hmac.digest(secret, message, hashlib.sha256)[:16], "big")
        random = np.random.Generator(np.random.Philox(key=key))
        return torch.from_numpy(
            random.standard_normal((len(both), self.width), dtype=np.float32)
        ).to(both.device)


def _tensor(secret: bytes) -> Tensor:
    return torch.tensor(list(secret), dtype=torch.uint8)


class _Mean(nn.Module):
    def __init__(self, of: StochasticEncoder) -> None:
        super().__init__()
        self.encoder, self.width = of.encoder, of.width

    def forward(self, *inputs: Tensor) -> Tensor:
        mean_BD: Tensor = self.encoder(*inputs)[:, : self.width]
        return mean_BD


def deterministic(encoder: nn.Module) -> nn.Module:
    """Returns an encoder that draws nothing, with the same weights: for its owner only, and never
    sent.
    """
    return _Mean(encoder) if isinstance(encoder, StochasticEncoder) else encoder

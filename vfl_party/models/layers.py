"""Parts that several encoders share: their input, the top that FedHSSL aggregates across parties,
fully connected layers, projectors, two towers, and random embeddings that leak little (MID).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.config.models import MlpSettings
from vfl_common.errors import Code, InputError
from vfl_common.files import load_or_create_secret
from vfl_party.base.devices import get_real_dtype

_ATTRIBUTE = "top_layers"
ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}
SECRET_BYTES = 32
# The minimum σ of each element, so that outlier rows get noise too.
MIN_SIGMA = 0.1


@dataclass(frozen=True)
class InputSpec:
    """The shape of one input row, without the batch dimension.

    Args:
        shape: ``(F,)`` for numeric features, ``(C, H, W)`` for images.
        cardinalities: The number of codes of each categorical column. If it is not empty, call the
            encoder as ``encoder(x, categories_BK)``. Code 0 is a category that did not occur in
            training, 1 a missing value, and 2 a value that augmentation masked.
    """

    shape: tuple[int, ...]
    cardinalities: tuple[int, ...] = ()


def mark_top(encoder: nn.Module, *layers: str) -> nn.Module:
    """Marks the submodules ``layers`` as the top of an encoder, and returns the encoder.

    A user's encoder sets the attribute ``top_layers`` itself.
    """
    # The names are neither tensors nor modules, so this bypasses nn.Module.__setattr__.
    encoder.__dict__[_ATTRIBUTE] = layers
    return encoder


def top_state(encoder: nn.Module) -> dict[str, Tensor]:
    """Returns {name in the encoder: tensor} for the parameters and buffers of the encoder's top.

    The tensors are not copied. Integer buffers such as BatchNorm's ``num_batches_tracked`` are left
    out. Raises InputError (MODEL_INVALID) if the encoder does not name the layers of its top.
    """
    layers = getattr(encoder, _ATTRIBUTE, ())
    layers = (layers,) if isinstance(layers, str) else tuple(layers)
    submodules = {name for name, _ in encoder.named_modules()}
    for layer in layers:
        if layer not in submodules:
            raise InputError(
                Code.MODEL_INVALID,
                f"top_layers: the encoder has no such submodule (got {layer!r}). Name a submodule "
                "of the encoder.",
            )
    state = {
        name: tensor
        for name, tensor in encoder.state_dict(keep_vars=True).items()
        if name.startswith(tuple(f"{layer}." for layer in layers)) and tensor.is_floating_point()
    }
    if not state:
        raise InputError(
            Code.MODEL_INVALID,
            "top_layers: the encoder names no layers to aggregate. Set the attribute top_layers to "
            "names of submodules, or set aggregate = false.",
        )
    return state


def build_layers(
    in_features: int,
    hidden: Sequence[int],
    out_features: int,
    *,
    activation: str = "relu",
    batch_norm: bool = False,
    dropout: float = 0.0,
) -> list[nn.Module]:
    """Builds hidden layers (linear, batch norm, activation, dropout) and a last linear layer."""
    modules: list[nn.Module] = []
    for width in hidden:
        # Batch norm has a bias, so the linear layer before it needs none.
        modules.append(nn.Linear(in_features, width, bias=not batch_norm))
        if batch_norm:
            modules.append(nn.BatchNorm1d(width))
        modules.append(ACTIVATIONS[activation]())
        if dropout:
            modules.append(nn.Dropout(dropout))
        in_features = width
    return [*modules, nn.Linear(in_features, out_features)]


def build_mlp(settings: MlpSettings, spec: InputSpec, embedding_size: int) -> nn.Module:
    """Builds the ``mlp`` encoder, which flattens x [B, *spec.shape] and returns [B,
    embedding_size].

    Its top is the last linear layer and, if there is one, the batch normalisation after this layer.
    """
    encoder = nn.Sequential(
        nn.Flatten(),
        *build_layers(
            math.prod(spec.shape),
            settings.hidden,
            embedding_size,
            activation=settings.activation,
            batch_norm=settings.batch_norm,
            dropout=settings.dropout,
        ),
    )
    last = len(encoder) - 1
    if settings.normed_output:
        encoder.extend([nn.BatchNorm1d(embedding_size), nn.ReLU()])
    return mark_top(encoder, *(str(place) for place in range(last, len(encoder))))


def build_projector(in_features: int, widths: Sequence[int]) -> nn.Sequential:
    """Builds a projector, h [B, in_features] -> [B, widths[-1]].

    For each width it has a linear layer and BatchNorm, with ReLU after all but the last. Without
    ``widths`` it is the identity. FedHSSL, appendix B uses [512, 512, 512] for SimSiam and BYOL and
    [512, 512, 128] for MoCo.
    """
    modules: list[nn.Module] = []
    for width in widths:
        modules += [nn.Linear(in_features, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        in_features = width
    return nn.Sequential(*modules[:-1])


def build_predictor(width: int, hidden: int) -> nn.Sequential:
    """Builds a predictor, z [B, width] -> [B, width], as in FedHSSL, appendix B.

    It has two linear layers, with BatchNorm and ReLU between them.
    """
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )


class TwoTowers(nn.Module):
    """Combines the embeddings of two encoders of the same inputs: their mean or concatenation.

    Args:
        cross: The cross-party encoder. For ``concat`` its width is half the recipe's width.
        local: The local encoder, of the same width as ``cross``.
        rule: The rule that combines the two embeddings.
    """

    def __init__(self, cross: nn.Module, local: nn.Module, rule: Literal["mean", "concat"]) -> None:
        super().__init__()
        self.cross, self.local, self.rule = cross, local, rule

    def forward(self, *inputs: Tensor) -> Tensor:
        """Returns the combined embeddings [B, D] of an encoder's ``inputs``."""
        cross_BD, local_BD = self.cross(*inputs), self.local(*inputs)
        if self.rule == "concat":
            return torch.cat([cross_BD, local_BD], dim=1)
        mean_BD: Tensor = (cross_BD + local_BD) / 2
        return mean_BD


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

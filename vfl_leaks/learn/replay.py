"""Reconstructs columns from the embeddings of an encoder whose initial weights are known, without
known rows, by gradient descent and replay.

The active party has computed every gradient. With a guess of a party's rows, it can therefore
replay all updates of that party's encoder. This gives the weights of later epochs. The embeddings
of these epochs then improve the guess. The attack uses the first epoch, then the first two epochs,
the first three, and so on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, replace_all_batch_norm_modules_, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from vfl_common.config.models import OptimizerSettings
from vfl_leaks.learn.fitting import AdamDescent
from vfl_party.models import generator
from vfl_party.models.training import backward, build_optimizer, build_schedule, clip

# The number of steps and the learning rate of each gradient descent.
_STEPS, _LR = 300, 0.05
# The number of first epochs that each gradient descent uses, in order.
_WIDENING = (1, 1, 2, 3, 4, 6, 8)
# Weight of the columns' prior density, compared with the error of the standardised embeddings.
_PRIOR = 0.05
_MIN_SPREAD = 1e-6

Weights = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class ReplayedBatch:
    """A training batch. ``at``: the positions of its rows in the list of all received rows, [B].
    ``z``, ``dz``: the embeddings and their gradients, [B, D].
    """

    at: Tensor
    z: Tensor
    dz: Tensor


@dataclass(frozen=True)
class ReplayCourse:
    """The recipe's settings of a party's training: its optimizer, and the epochs of the phase."""

    optimizer: OptimizerSettings
    epochs: int


def reconstruct_columns(
    encoder: nn.Module,
    epochs: Sequence[Sequence[ReplayedBatch]],
    shape: tuple[int, int],
    course: ReplayCourse,
    covariance_FF: Tensor,
) -> Tensor:
    """Returns the reconstructed columns, standardised, float32 of ``shape`` [N, F].

    After each gradient descent, the training is replayed with the reconstructed columns. The result
    is the reconstruction whose replay explains the embeddings best.

    Args:
        encoder: the encoder of rows [B, F] with its assumed initial weights. It is not changed.
        epochs: the batches of the first epochs, in order.
        course: the settings of the party's training.
        covariance_FF: the covariance of the columns; the identity matrix if it is unknown.

    Raises RuntimeError if the encoder cannot be called with several weights at once.
    """
    encoder = _prepare_encoder(encoder)
    scale_D = torch.cat([epoch.z for epoch in epochs[0]]).std(dim=0).clamp_min(_MIN_SPREAD)
    precision_FF = torch.linalg.inv(covariance_FF.double()).float()
    best_NF = x_NF = torch.zeros(shape)
    normalises = any(isinstance(module, _BatchNorm) for module in encoder.modules())
    # Batch normalisation divides by the spread of the rows, so they must not start equal.
    if normalises:
        best_NF = x_NF = 0.1 * torch.randn(shape, generator=generator(0))
    epochs = epochs[: _WIDENING[-1]]
    min_error, weights = math.inf, [[_copy_weights(encoder)] * len(epoch) for epoch in epochs]
    for count in [width for width in _WIDENING if width <= len(epochs)]:
        x_NF = _fit(encoder, epochs[:count], weights, x_NF, scale_D, precision_FF)
        weights = _replay(encoder, epochs, x_NF, course)
        error = _compute_error(encoder, epochs, weights, x_NF, scale_D)
        if error < min_error:
            best_NF, min_error = x_NF, error
    # Batch normalisation removes the scale of the columns, which is restored here: they are
    # standardised.
    return best_NF / best_NF.std().clamp_min(_MIN_SPREAD) if normalises else best_NF


def _prepare_encoder(encoder: nn.Module) -> nn.Module:
    """Returns a copy in training mode, without dropout and without running statistics of batch
    normalisation.
    """
    encoder = copy.deepcopy(encoder).train()
    replace_all_batch_norm_modules_(encoder)
    for module in encoder.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    return encoder


def _copy_weights(encoder: nn.Module) -> Weights:
    return {
        name: tensor.detach().clone()
        for name, tensor in (*encoder.named_parameters(), *encoder.named_buffers())
    }


def _replay(
    encoder: nn.Module,
    epochs: Sequence[Sequence[ReplayedBatch]],
    x_NF: Tensor,
    course: ReplayCourse,
) -> list[list[Weights]]:
    """Returns the weights before each step, if the party trained on the rows ``x_NF``."""
    model = copy.deepcopy(encoder)
    params = [*model.parameters()]
    optimizer = build_optimizer(course.optimizer, params)
    schedule = build_schedule(course.optimizer, optimizer, course.epochs)
    weights = []
    for epoch in epochs:
        of_epoch = []
        for batch in epoch:
            of_epoch.append(_copy_weights(model))
            optimizer.zero_grad()
            backward(model(x_NF[batch.at]), batch.dz)
            clip(course.optimizer, params)
            optimizer.step()
        schedule.step()
        weights.append(of_epoch)
    return weights


class _ForwardPasses:
    """Runs the forward passes of all steps of an epoch at once. Short batches are padded with rows
    of weight 0.
    """

    def __init__(
        self, encoder: nn.Module, epoch: Sequence[ReplayedBatch], weights: Sequence[Weights]
    ) -> None:
        size = max(len(batch.at) for batch in epoch)
        self._encoder = encoder
        self._at_TB = torch.stack([batch.at[torch.arange(size) % len(batch.at)] for batch in epoch])
        self._counts_TB = torch.stack(
            [(torch.arange(size) < len(batch.at)).float() for batch in epoch]
        )
        self._z_TBD = torch.stack([batch.z[torch.arange(size) % len(batch.z)] for batch in epoch])
        self._weights = {name: torch.stack([own[name] for own in weights]) for name in weights[0]}

    def error(self, x_NF: Tensor, scale_D: Tensor) -> Tensor:
        """Returns the sum over rows of the mean squared error of their embeddings, divided by
        ``scale_D``.
        """

        def embed(weights: Weights, x_BF: Tensor) -> Tensor:
            z_BD: Tensor = functional_call(self._encoder, weights, (x_BF,))
            return z_BD

        z_TBD = vmap(embed, randomness="same")(self._weights, x_NF[self._at_TB])
        error_TB = ((z_TBD - self._z_TBD) / scale_D).pow(2).mean(dim=2)
        return (error_TB * self._counts_TB).sum()


def _fit(
    encoder: nn.Module,
    epochs: Sequence[Sequence[ReplayedBatch]],
    weights: Sequence[Sequence[Weights]],
    x_NF: Tensor,
    scale_D: Tensor,
    precision_FF: Tensor,
) -> Tensor:
    """Returns the rows that explain the embeddings best, by gradient descent from ``x_NF``. The
    steps use the epochs in turn.
    """
    x_NF = x_NF.clone().requires_grad_()
    passes = [
        _ForwardPasses(encoder, epoch, own) for epoch, own in zip(epochs, weights, strict=False)
    ]
    descent = AdamDescent([x_NF], _LR)
    for step in range(_STEPS):
        density = ((x_NF @ precision_FF) * x_NF).mean(dim=1).sum()
        descent.step(passes[step % len(passes)].error(x_NF, scale_D) + _PRIOR * density)
    return x_NF.detach()


@torch.no_grad()
def _compute_error(
    encoder: nn.Module,
    epochs: Sequence[Sequence[ReplayedBatch]],
    weights: Sequence[Sequence[Weights]],
    x_NF: Tensor,
    scale_D: Tensor,
) -> float:
    """Returns the mean error of all embeddings in the replay, divided by ``scale_D``."""
    total = sum(
        _ForwardPasses(encoder, epoch, before).error(x_NF, scale_D).item()
        for epoch, before in zip(epochs, weights, strict=True)
    )
    return total / sum(len(batch.at) for epoch in epochs for batch in epoch)

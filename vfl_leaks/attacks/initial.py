"""Reconstructs columns from the embeddings of the first epochs, if the attacker can compute the
initial weights of the sender's encoder.

An attacker with the recipe knows the kind of the encoder and the recipe's seed. If the sender's
initial weights are derived from the seed, gradient descent finds the rows without any known row
(see ``reconstruct_columns``). If the weights are derived from a secret, the attacker computes
other weights, which are no better than random weights (chance). In that case there are also figures
for an attacker that knows the true weights. The attacker knows the number of columns and that they
are standardised. In further figures it also knows the covariance of the columns of a tenth of the
rows, as in the attack ``columns``.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, replace_all_batch_norm_modules_, vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from vfl_common.config.models import OptimizerSettings
from vfl_common.text import list_names
from vfl_leaks.attacks.columns import CHANCE, FOUND, yield_column_figures
from vfl_leaks.fitting import AdamDescent, r2_by_column
from vfl_leaks.pairs import count_known
from vfl_leaks.scene import Attack, Beginning, Figure, Intercepted, Scene, UnfitError
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.models import generator
from vfl_party.models.training import backward, build_optimizer, build_schedule, clip

# Maximum number of rows to reconstruct. With more rows, only the first batches of the first epoch
# are used.
_MAX_ROWS = 20_000
_MIN_ROWS = 100
# This number is added to each variance, because the covariance is estimated from few rows.
_SHRUNK = 0.05


def play_initial(scene: Scene) -> list[Figure]:
    """Returns R² of each numeric column and the mean R², for each party whose encoder is trained by
    the first phase.

    The mean is at least 0, because an attacker can always guess 0, the mean of a standardised
    column. Raises UnfitError if there is no such party.
    """
    figures, reasons = list[Figure](), list[str]()
    for sender, beginning in scene.beginnings.items():
        columns = scene.columns.get(sender)
        if columns is None or columns.image is not None or columns.codes is not None:
            reasons.append(f"{sender} has columns that are not numbers")
            continue
        sent = scene.embeddings[sender]()
        epochs = _split_epochs(
            batch
            for batch in sent
            if (batch.phase, batch.exchange) == (beginning.phase, "embedding")
        )
        rows = np.unique(
            np.concatenate(
                [np.empty(0, np.int64), *(batch.rows for epoch in epochs for batch in epoch)]
            )
        )
        if len(rows) < _MIN_ROWS:
            reasons.append(
                f"{sender} must send at least {_MIN_ROWS} rows in the first epochs (got "
                f"{len(rows)})"
            )
            continue
        figures += _yield_figures(scene, sender, beginning, epochs, rows)
    if not figures:
        raise UnfitError(
            list_names(reasons) if reasons else "no encoder is trained by split training first"
        )
    if reasons:
        figures[-1] = replace(figures[-1], note=f"not played: {'; '.join(reasons)}")
    return figures


def _split_epochs(sent: Iterator[Intercepted]) -> list[list[Intercepted]]:
    """Returns the batches of each epoch, up to the first round that was not recorded."""
    epochs: list[list[Intercepted]] = []
    rows_of_epoch, next_round = set[int](), 0
    for batch in sorted(sent, key=lambda batch: (batch.round, batch.batch)):
        if batch.round > next_round:
            break
        next_round = batch.round + 1
        rows = set(batch.rows.tolist())
        if not epochs or rows_of_epoch & rows:
            epochs.append([])
            rows_of_epoch = set()
        rows_of_epoch |= rows
        epochs[-1].append(batch)
    return epochs


def _add_gradients(
    epochs: Sequence[Sequence[Intercepted]], beginning: Beginning, rows: Rows
) -> list[list[ReplayedBatch]]:
    """Returns the batches with their gradients, up to the first batch without gradients."""
    replies = {
        (reply.round, reply.batch): reply.came
        for reply in beginning.replies()
        if reply.phase == beginning.phase
    }
    batches: list[list[ReplayedBatch]] = []
    for epoch in epochs:
        batches.append([])
        for sent in epoch:
            dz = replies.get((sent.round, sent.batch))
            if dz is None:
                return [epoch for epoch in batches if epoch]
            at = torch.from_numpy(np.searchsorted(rows, sent.rows))
            batches[-1].append(
                ReplayedBatch(at, sent.came.float().flatten(1), dz.float().flatten(1))
            )
    return batches


def _select_epochs(
    epochs: list[list[Intercepted]], beginning: Beginning
) -> list[list[Intercepted]]:
    """Returns the epochs that the attack uses: only the first epoch if it has too many rows,
    or if later epochs cannot be replayed.
    """
    sizes = itertools.accumulate(len(epoch.rows) for epoch in epochs[0])
    few = [epoch for epoch, size in zip(epochs[0], sizes, strict=True) if size <= _MAX_ROWS]
    return [few or epochs[0][:1]] if len(few) < len(epochs[0]) or not beginning.plain else epochs


def _yield_figures(
    scene: Scene, sender: str, beginning: Beginning, epochs: list[list[Intercepted]], rows: Rows
) -> Iterator[Figure]:
    used = _select_epochs(epochs, beginning)
    rows = np.intersect1d(rows, np.concatenate([batch.rows for epoch in used for batch in epoch]))
    batches = _add_gradients(used, beginning, rows)
    if not batches:
        raise UnfitError(f"{sender} got no gradients")
    columns = scene.columns[sender]
    truth_NF = columns.table(rows)
    order = np.random.default_rng(derive_seed(scene.seed, "auxiliary rows", sender)).permutation(
        len(rows)
    )
    known, judged = np.split(order, [count_known(len(rows))])
    identity_FF = torch.eye(truth_NF.shape[1])
    covariance_FF = torch.cov(truth_NF[known].T) + _SHRUNK * identity_FF
    roots = {"the recipe": beginning.known, "the true weights": beginning.true}
    if beginning.true == beginning.known:
        del roots["the true weights"]
    course = ReplayCourse(beginning.optimizer, beginning.epochs)
    for suffix, prior_FF in (
        ("", identity_FF),
        (f", covariance of {len(known)} rows", covariance_FF),
    ):

        def r2_of_judged(root: int, prior_FF: Tensor = prior_FF) -> list[float]:
            x_NF = reconstruct_columns(
                beginning.make(root), batches, (len(rows), len(identity_FF)), course, prior_FF
            )
            return r2_by_column(x_NF[judged], truth_NF[judged])

        chance = r2_of_judged(derive_seed(scene.seed, "random weights", sender))
        for knows, root in roots.items():
            r2 = _group_by_column(columns.names, r2_of_judged(root), chance, truth_NF[judged])
            only_mean = root != beginning.known
            mean, *others = yield_column_figures(
                sender, "column", r2, Figure("", f"{knows}{suffix}", "R²", 0.0), only_mean=only_mean
            )
            # If the true weights are secret, no attacker has them, so their figure is only for
            # comparison.
            yield replace(
                mean,
                value=max(0.0, mean.value),
                chance=max(0.0, mean.chance or 0.0),
                detail=only_mean,
            )
            yield from others


def _group_by_column(
    names: Sequence[str], r2: Sequence[float], chance: Sequence[float], truth_JF: Tensor
) -> dict[str, dict[str, float]]:
    """Returns {column: its R² with the weights, and with random weights}, without constant
    columns.
    """
    spread_F = truth_JF.double().var(dim=0, correction=0)
    return {
        name: {FOUND: r2[place], CHANCE: chance[place]}
        for place, name in enumerate(names)
        if spread_F[place] > 0
    }


INITIAL = Attack(
    "columns from an encoder whose first weights follow from the recipe",
    "active",
    play_initial,
    "splitnn",
)


# The number of steps and the learning rate of each gradient descent.
_STEPS, _LR = 300, 0.05


# The number of first epochs that each gradient descent uses, in order.
_WIDENING = (1, 1, 2, 3, 4, 6, 8)


# Weight of the columns' prior density, compared with the error of the standardised embeddings.
_PRIOR = 0.05


_MIN_SPREAD = 1e-6


Weights = dict[str, Tensor]


# The active party has computed every gradient. With a guess of a party's rows, it can therefore
# replay all updates of that party's encoder. This gives the weights of later epochs. The embeddings
# of these epochs then improve the guess. The attack uses the first epoch, then the first two
# epochs, the first three, and so on.
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

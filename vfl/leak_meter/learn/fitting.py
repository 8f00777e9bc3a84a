"""Models that attacks train: heads and decoders on few rows, and a self-supervised encoder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.config.models import OptimizerSettings
from vfl_party.base.seeds import batches, derive_seed
from vfl_party.models import seed_torch
from vfl_party.models.backward import backward
from vfl_party.models.optim import build_optimizer

Inputs = tuple[Tensor, ...]
_HEAD_STEPS, _TUNED_STEPS, _LR, _DECAY = 300, 150, 2e-3, 1e-3
# Penalties of a ridge regression, from 0.01 to 10,000.
_PENALTIES = tuple(10.0 ** (power / 2) for power in range(-4, 9))
_DECODER_STEPS, _PIXELS_STEPS, _PIXELS_BATCH = 400, 1500, 64
# Standard deviation below which an input counts as constant.
_MIN_SPREAD = 1e-6
_SSL_EPOCHS, _SSL_BATCH, _SSL_ROWS, _CORRUPTED = 10, 256, 10_000, 0.3


@dataclass(frozen=True)
class _Shape:
    """An MLP that decodes, and how it learns. ``patience``: steps without less error, after which
    training ends.
    """

    name: str
    width: int
    lr: float
    patience: int


_DECODER = _Shape("decoder", 128, 3e-3, _DECODER_STEPS)
_PIXELS = _Shape("pixels", 512, 1e-3, 200)


class AdamDescent:
    """Adam, by torch's fused kernel (see ``build_optimizer``): attackers take many small steps."""

    def __init__(self, weights: Iterable[Tensor], lr: float, decay: float = 0.0) -> None:
        self._optimizer = build_optimizer(
            OptimizerSettings(kind="adam", lr=lr, weight_decay=decay), weights
        )

    def step(self, loss: Tensor) -> None:
        """Updates the weights by the gradient of a loss."""
        self._optimizer.zero_grad()
        backward(loss)
        self._optimizer.step()


@torch.no_grad()
def embed(encoder: nn.Module, inputs: Inputs) -> Tensor:
    """Returns an encoder's embeddings [N, D] of many rows, in evaluation mode."""
    encoder.eval()
    return torch.cat(
        [
            encoder(*part)
            for part in zip(*(torch.split(input_, 1024) for input_ in inputs), strict=True)
        ]
    ).flatten(1)


def classify(
    encoder: nn.Module,
    known: Inputs,
    classes_K: Tensor,
    judged: Inputs,
    classes: int,
    seed: int,
    *,
    tuned: bool,
) -> Tensor:
    """Trains a linear head on an encoder with the classes of K rows; returns the logits of others,
    [N, classes].

    ``tuned``: also train a copy of the encoder; otherwise it is frozen.
    """
    encoder = copy.deepcopy(encoder).eval()
    mean_D, std_D = _spread(embed(encoder, known))
    with seed_torch(derive_seed(seed, "init", "head")):
        head = nn.Linear(len(mean_D), classes)
    model = _Headed(encoder, head.to(mean_D.device), mean_D, std_D)
    model.learn(known, lambda logits: functional.cross_entropy(logits, classes_K), tuned=tuned)
    return model.of(judged)


def estimate(
    encoder: nn.Module, known: Inputs, numbers_K: Tensor, judged: Inputs, *, tuned: bool
) -> Tensor:
    """Fits a linear head on an encoder to the numbers of K rows; returns its predictions for
    others, [N].

    The head is a ridge regression whose penalty is chosen by leave-one-out. ``tuned``: the head is
    then trained together with the encoder.
    """
    from sklearn.linear_model import RidgeCV

    encoder = copy.deepcopy(encoder).eval()
    z_KD = embed(encoder, known)
    mean_D, std_D = _spread(z_KD)
    mean, std = numbers_K.mean(), numbers_K.std().clamp_min(1e-6)
    y_K1 = ((numbers_K - mean) / std).float()[:, None]
    ridge = RidgeCV(alphas=_PENALTIES).fit(
        ((z_KD - mean_D) / std_D).cpu().numpy(), y_K1[:, 0].cpu().numpy()
    )
    # The random weights are replaced.
    with seed_torch(0), torch.no_grad():
        head = nn.Linear(len(mean_D), 1)
        head.weight.copy_(torch.from_numpy(ridge.coef_)[None])
        head.bias.fill_(float(ridge.intercept_))
    model = _Headed(encoder, head.to(mean_D.device), mean_D, std_D)
    if tuned:
        model.learn(known, lambda found_K1: functional.mse_loss(found_K1, y_K1), tuned=True)
    return model.of(judged)[:, 0] * std.cpu() + mean.cpu()


def _spread(z_KD: Tensor) -> tuple[Tensor, Tensor]:
    return z_KD.mean(dim=0), z_KD.std(dim=0).clamp_min(1e-6)


@dataclass(frozen=True, eq=False)
class _Headed:
    """An encoder with a linear head on its embeddings, standardised by those of the known rows."""

    encoder: nn.Module
    head: nn.Linear
    mean_D: Tensor  # noqa: N815 - the shape is part of the name
    std_D: Tensor  # noqa: N815

    def learn(self, known: Inputs, loss_of: Callable[[Tensor], Tensor], *, tuned: bool) -> None:
        """Trains the head, and with ``tuned`` the encoder, too."""
        weights = [*self.head.parameters(), *(self.encoder.parameters() if tuned else ())]
        descent = AdamDescent(weights, _LR, _DECAY)
        with torch.no_grad():
            z_KD = self.encoder(*known).flatten(1)
        for _ in range(_TUNED_STEPS if tuned else _HEAD_STEPS):
            z = self.encoder(*known).flatten(1) if tuned else z_KD
            descent.step(loss_of(self.head((z - self.mean_D) / self.std_D)))

    @torch.no_grad()
    def of(self, judged: Inputs) -> Tensor:
        """Returns the outputs of the head for rows, [N, outputs]."""
        outputs: Tensor = self.head((embed(self.encoder, judged) - self.mean_D) / self.std_D)
        return outputs.cpu()


def self_supervised(encoder: nn.Module, inputs: Inputs, seed: int) -> nn.Module:
    """Trains an encoder on rows without labels by SimSiam; in each of two views some numbers are
    those of another row.
    """
    rows = np.arange(min(len(inputs[0]), _SSL_ROWS), dtype=np.int64)
    some = tuple(input_[: len(rows)] for input_ in inputs)
    with seed_torch(derive_seed(seed, "init", "predictor")), torch.no_grad():
        width = encoder(*(input_[:2] for input_ in some)).flatten(1).shape[1]
        predictor = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
    predictor.to(some[0].device)
    drawn = torch.Generator().manual_seed(derive_seed(seed, "views") % 2**63)
    descent = AdamDescent([*encoder.parameters(), *predictor.parameters()], 1e-3)
    encoder.train()
    for epoch in range(_SSL_EPOCHS):
        for rows_B in batches(seed, "own ssl", epoch, rows, _SSL_BATCH):
            if len(rows_B) < 2:
                continue
            one, other = (encoder(*view(some, rows_B, drawn)).flatten(1) for _ in range(2))
            loss = -(
                functional.cosine_similarity(predictor(one), other.detach()).mean()
                + functional.cosine_similarity(predictor(other), one.detach()).mean()
            )
            descent.step(loss)
    return encoder.eval()


def view(inputs: Inputs, rows_B: np.ndarray, drawn: torch.Generator) -> Inputs:
    """Returns rows in which some numbers are those of another row."""
    views = []
    for input_ in inputs:
        own = input_[torch.from_numpy(rows_B)]
        other = input_[torch.randint(len(input_), (len(own),), generator=drawn)]
        hidden = torch.rand(own.shape, generator=drawn) < _CORRUPTED
        views.append(torch.where(hidden.to(own.device), other, own))
    return tuple(views)


def decode(known_KD: Tensor, values_KF: Tensor, judged_ND: Tensor, seed: int) -> Tensor:
    """Trains an MLP from the inputs of K rows to their values, and returns its values for others,
    [N, F].

    A fifth of the known rows decides when training stops, and whether the mean of the known rows is
    better.

    Args:
        known_KD: the inputs of the known rows, [K, D].
        values_KF: their values, [K, F].
        judged_ND: the inputs of the others, [N, D].
        seed: the seed of the MLP.
    """
    mean_F, std_F = values_KF.mean(dim=0), values_KF.std(dim=0).clamp_min(1e-6)
    rows = repeat(slice(count_held(len(known_KD)), None), _DECODER_STEPS)
    decoded = _fit_decoder(known_KD, (values_KF - mean_F) / std_F, judged_ND, rows, _DECODER, seed)
    return mean_F.expand(len(judged_ND), -1) if decoded is None else decoded * std_F + mean_F


def decode_pixels(known_KD: Tensor, pixels_KF: Tensor, judged_ND: Tensor, seed: int) -> Tensor:
    """Decodes the pixels of images, [N, F]; the arguments are those of ``decode``.

    Pixels keep their scale, because those that vary most are most informative, and a wider MLP is
    trained on batches.
    """
    mean_F, held = pixels_KF.mean(dim=0), count_held(len(known_KD))
    drawn = torch.Generator().manual_seed(derive_seed(seed, "batches of pixels") % 2**63)
    rows = (
        torch.randint(held, len(known_KD), (_PIXELS_BATCH,), generator=drawn)
        for _ in range(_PIXELS_STEPS)
    )
    decoded = _fit_decoder(known_KD, pixels_KF - mean_F, judged_ND, rows, _PIXELS, seed)
    return mean_F.expand(len(judged_ND), -1) if decoded is None else decoded + mean_F


def count_held(known: int) -> int:
    """Returns the number of the first known rows that decide when the training of a decoder
    stops.
    """
    return max(1, known // 5)


def _fit_decoder(
    known_KD: Tensor,
    y_KF: Tensor,
    judged_ND: Tensor,
    rows: Iterable[Tensor | slice],
    shape: _Shape,
    seed: int,
) -> Tensor | None:
    """Returns the outputs of an MLP for judged rows, at the step with the smallest error on the
    first known rows; None if it was never better than the mean.

    ``rows``: the known rows of each step.
    """
    mean_D, std_D = known_KD.mean(dim=0), known_KD.std(dim=0)
    # An input that is constant in the known rows has no information.
    scale_D = torch.where(std_D > _MIN_SPREAD, 1 / std_D, 0.0)
    x, held = (known_KD - mean_D) * scale_D, count_held(len(known_KD))
    with seed_torch(derive_seed(seed, "init", shape.name)):
        decoder = nn.Sequential(
            nn.Linear(x.shape[1], shape.width), nn.ReLU(), nn.Linear(shape.width, y_KF.shape[1])
        )
    descent = AdamDescent(decoder.parameters(), shape.lr, 1e-4)
    best, best_state, since = y_KF[:held].pow(2).mean().item(), None, 0
    for step, rows_B in enumerate(rows):
        descent.step(functional.mse_loss(decoder(x[rows_B]), y_KF[rows_B]))
        if step % 10 == 9:
            with torch.no_grad():
                error = functional.mse_loss(decoder(x[:held]), y_KF[:held]).item()
            if error < best:
                best, best_state, since = error, copy.deepcopy(decoder.state_dict()), step
            if step - since >= shape.patience:
                break
    if best_state is None:
        return None
    decoder.load_state_dict(best_state)
    with torch.no_grad():
        values: Tensor = decoder((judged_ND - mean_D) * scale_D)
    return values


def decode_table(
    known_KD: Tensor, values_KF: Tensor, judged_ND: Tensor, seed: int, groups: Iterable[range] = ()
) -> Tensor:
    """Returns the values of ``decode`` for the numeric columns, and separately for each of
    ``groups``, [N, F].

    A common decoder gives up on all columns if many of them cannot be decoded, such as those of a
    category with many values.
    """
    parts = [[*group] for group in groups]
    inside = {place for part in parts for place in part}
    numbers = [place for place in range(values_KF.shape[1]) if place not in inside]
    values = torch.empty(len(judged_ND), values_KF.shape[1])
    for part in (numbers, *parts):
        if part:
            values[:, part] = decode(known_KD, values_KF[:, part], judged_ND, seed)
    return values


def is_mean(values_NF: Tensor) -> bool:
    """Whether ``decode`` has returned the mean, which is equal for all rows, [N, F]."""
    return bool((values_NF == values_NF[:1]).all())


def r2_by_column(predicted_NF: Tensor, truth_NF: Tensor) -> list[float]:
    """Returns R² of each column: 1 − (squared error) / (variance); 0 for a constant column.

    Args:
        predicted_NF: the predicted values, [N, F].
        truth_NF: the true values, [N, F].
    """
    error = (predicted_NF.double() - truth_NF.double()).pow(2).mean(dim=0)
    spread = truth_NF.double().var(dim=0, correction=0)
    r2: Sequence[float] = torch.where(
        spread > 0, 1 - error / spread.clamp_min(1e-300), 0.0
    ).tolist()
    return [*r2]

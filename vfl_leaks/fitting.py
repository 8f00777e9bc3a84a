"""Models that attacks train: heads and decoders for few rows, and a self-supervised encoder."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_common.config.models import OptimizerSettings
from vfl_party.base.seeds import batches, derive_seed
from vfl_party.models import seed_torch
from vfl_party.models.training import backward, build_optimizer

Inputs = tuple[Tensor, ...]
_HEAD_STEPS, _TUNED_STEPS, _LR, _DECAY = 300, 150, 2e-3, 1e-3
# Penalties of a ridge regression, from 0.01 to 10,000.
_PENALTIES = tuple(10.0 ** (power / 2) for power in range(-4, 9))
_DECODER_STEPS, _PIXELS_STEPS, _PIXELS_BATCH = 400, 1500, 64
# Standard deviation below which an input counts as constant.
_MIN_SPREAD = 1e-6
_SSL_EPOCHS, _SSL_BATCH, _SSL_ROWS, _CORRUPTED = 10, 256, 10_000, 0.3


@dataclass(frozen=True)
class _DecoderSettings:
    """The settings of an MLP decoder and its training. ``patience``: the maximum number of steps
    without improvement, after which training ends.
    """

    name: str
    width: int
    lr: float
    patience: int


_DECODER = _DecoderSettings("decoder", 128, 3e-3, _DECODER_STEPS)
_PIXELS = _DecoderSettings("pixels", 512, 1e-3, 200)


class AdamDescent:
    """The Adam optimizer with torch's fused kernel, because attackers take many small steps."""

    def __init__(self, weights: Iterable[Tensor], lr: float, decay: float = 0.0) -> None:
        self._optimizer = build_optimizer(
            OptimizerSettings(kind="adam", lr=lr, weight_decay=decay), weights
        )

    def step(self, loss: Tensor) -> None:
        """Updates the weights with the gradient of a loss."""
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
    """Trains a linear head on an encoder with the classes of K known rows, and returns the logits
    of the N judged rows, [N, classes].

    ``tuned``: whether to also train a copy of the encoder; otherwise it is frozen.
    """
    encoder = copy.deepcopy(encoder).eval()
    mean_D, std_D = _spread(embed(encoder, known))
    with seed_torch(derive_seed(seed, "init", "head")):
        head = nn.Linear(len(mean_D), classes)
    model = _EncoderWithHead(encoder, head.to(mean_D.device), mean_D, std_D)
    model.learn(known, lambda logits: functional.cross_entropy(logits, classes_K), tuned=tuned)
    return model.predict(judged)


def estimate(
    encoder: nn.Module, known: Inputs, numbers_K: Tensor, judged: Inputs, *, tuned: bool
) -> Tensor:
    """Fits a linear head on an encoder to the numbers of K known rows, and returns its predictions
    for the N judged rows, [N].

    The head is a ridge regression whose penalty is chosen by leave-one-out cross-validation.
    ``tuned``: whether the head is then trained together with a copy of the encoder.
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
    # The ridge regression replaces the random weights of the head.
    with seed_torch(0), torch.no_grad():
        head = nn.Linear(len(mean_D), 1)
        head.weight.copy_(torch.from_numpy(ridge.coef_)[None])
        head.bias.fill_(float(ridge.intercept_))
    model = _EncoderWithHead(encoder, head.to(mean_D.device), mean_D, std_D)
    if tuned:
        model.learn(known, lambda found_K1: functional.mse_loss(found_K1, y_K1), tuned=True)
    return model.predict(judged)[:, 0] * std.cpu() + mean.cpu()


def _spread(z_KD: Tensor) -> tuple[Tensor, Tensor]:
    return z_KD.mean(dim=0), z_KD.std(dim=0).clamp_min(1e-6)


@dataclass(frozen=True, eq=False)
class _EncoderWithHead:
    """An encoder with a linear head on its embeddings, which are standardised by the mean and
    spread of the known rows.
    """

    encoder: nn.Module
    head: nn.Linear
    mean_D: Tensor  # noqa: N815 - the shape is part of the name
    std_D: Tensor  # noqa: N815

    def learn(self, known: Inputs, loss_of: Callable[[Tensor], Tensor], *, tuned: bool) -> None:
        """Trains the head. ``tuned``: whether to also train the encoder."""
        weights = [*self.head.parameters(), *(self.encoder.parameters() if tuned else ())]
        descent = AdamDescent(weights, _LR, _DECAY)
        with torch.no_grad():
            z_KD = self.encoder(*known).flatten(1)
        for _ in range(_TUNED_STEPS if tuned else _HEAD_STEPS):
            z = self.encoder(*known).flatten(1) if tuned else z_KD
            descent.step(loss_of(self.head((z - self.mean_D) / self.std_D)))

    @torch.no_grad()
    def predict(self, judged: Inputs) -> Tensor:
        """Returns the outputs of the head for the judged rows, [N, outputs]."""
        outputs: Tensor = self.head((embed(self.encoder, judged) - self.mean_D) / self.std_D)
        return outputs.cpu()


def train_self_supervised(encoder: nn.Module, inputs: Inputs, seed: int) -> nn.Module:
    """Trains an encoder on unlabelled rows by SimSiam, and returns it. A view of a row is made by
    ``view``.
    """
    rows = np.arange(min(len(inputs[0]), _SSL_ROWS), dtype=np.int64)
    rows_inputs = tuple(input_[: len(rows)] for input_ in inputs)
    with seed_torch(derive_seed(seed, "init", "predictor")), torch.no_grad():
        width = encoder(*(input_[:2] for input_ in rows_inputs)).flatten(1).shape[1]
        predictor = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
    predictor.to(rows_inputs[0].device)
    random = torch.Generator().manual_seed(derive_seed(seed, "views") % 2**63)
    descent = AdamDescent([*encoder.parameters(), *predictor.parameters()], 1e-3)
    encoder.train()
    for epoch in range(_SSL_EPOCHS):
        for rows_B in batches(seed, "own ssl", epoch, rows, _SSL_BATCH):
            if len(rows_B) < 2:
                continue
            z1, z2 = (encoder(*draw_view(rows_inputs, rows_B, random)).flatten(1) for _ in range(2))
            loss = -(
                functional.cosine_similarity(predictor(z1), z2.detach()).mean()
                + functional.cosine_similarity(predictor(z2), z1.detach()).mean()
            )
            descent.step(loss)
    return encoder.eval()


def draw_view(inputs: Inputs, rows_B: np.ndarray, random: torch.Generator) -> Inputs:
    """Returns a random view of rows: numbers of other rows replace some of their numbers."""
    views = []
    for input_ in inputs:
        values = input_[torch.from_numpy(rows_B)]
        replacement = input_[torch.randint(len(input_), (len(values),), generator=random)]
        is_replaced = torch.rand(values.shape, generator=random) < _CORRUPTED
        views.append(torch.where(is_replaced.to(values.device), replacement, values))
    return tuple(views)


def decode(known_KD: Tensor, values_KF: Tensor, judged_ND: Tensor, seed: int) -> Tensor:
    """Trains an MLP on the inputs and values of K known rows, and returns its values for N judged
    rows, [N, F].

    A fifth of the known rows is held out. It decides when training stops, and whether the mean of
    the known rows is returned because it is better.

    Args:
        known_KD: the inputs of the known rows, [K, D].
        values_KF: the values of the known rows, [K, F].
        judged_ND: the inputs of the judged rows, [N, D].
        seed: the seed of the MLP.
    """
    mean_F, std_F = values_KF.mean(dim=0), values_KF.std(dim=0).clamp_min(1e-6)
    rows = repeat(slice(count_held_out(len(known_KD)), None), _DECODER_STEPS)
    decoded = _fit_decoder(known_KD, (values_KF - mean_F) / std_F, judged_ND, rows, _DECODER, seed)
    return mean_F.expand(len(judged_ND), -1) if decoded is None else decoded * std_F + mean_F


def decode_pixels(known_KD: Tensor, pixels_KF: Tensor, judged_ND: Tensor, seed: int) -> Tensor:
    """Decodes the pixels of images, [N, F]. The arguments are those of ``decode``.

    Pixels keep their scale, because the pixels that vary most are most informative. The MLP is
    wider than that of ``decode`` and is trained on batches.
    """
    mean_F, held_out = pixels_KF.mean(dim=0), count_held_out(len(known_KD))
    random = torch.Generator().manual_seed(derive_seed(seed, "batches of pixels") % 2**63)
    rows = (
        torch.randint(held_out, len(known_KD), (_PIXELS_BATCH,), generator=random)
        for _ in range(_PIXELS_STEPS)
    )
    decoded = _fit_decoder(known_KD, pixels_KF - mean_F, judged_ND, rows, _PIXELS, seed)
    return mean_F.expand(len(judged_ND), -1) if decoded is None else decoded + mean_F


def count_held_out(known: int) -> int:
    """Returns the number of held-out known rows, which decide when the training of a decoder stops.
    They are the first known rows.
    """
    return max(1, known // 5)


def _fit_decoder(
    known_KD: Tensor,
    y_KF: Tensor,
    judged_ND: Tensor,
    rows: Iterable[Tensor | slice],
    settings: _DecoderSettings,
    seed: int,
) -> Tensor | None:
    """Returns the outputs of an MLP for judged rows, from the step with the smallest error on the
    held-out rows; None if no step was better than the mean.

    ``rows``: the known rows on which each step trains.
    """
    mean_D, std_D = known_KD.mean(dim=0), known_KD.std(dim=0)
    # An input that is constant in the known rows has no information.
    scale_D = torch.where(std_D > _MIN_SPREAD, 1 / std_D, 0.0)
    x, held_out = (known_KD - mean_D) * scale_D, count_held_out(len(known_KD))
    with seed_torch(derive_seed(seed, "init", settings.name)):
        decoder = nn.Sequential(
            nn.Linear(x.shape[1], settings.width),
            nn.ReLU(),
            nn.Linear(settings.width, y_KF.shape[1]),
        )
    descent = AdamDescent(decoder.parameters(), settings.lr, 1e-4)
    best, best_state, best_step = y_KF[:held_out].pow(2).mean().item(), None, 0
    for step, rows_B in enumerate(rows):
        descent.step(functional.mse_loss(decoder(x[rows_B]), y_KF[rows_B]))
        if step % 10 == 9:
            with torch.no_grad():
                error = functional.mse_loss(decoder(x[:held_out]), y_KF[:held_out]).item()
            if error < best:
                best, best_state, best_step = error, copy.deepcopy(decoder.state_dict()), step
            if step - best_step >= settings.patience:
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
    """Returns the values of one decoder for the numeric columns, and of one for each of ``groups``,
    [N, F].

    One decoder for all columns would learn nothing if many columns cannot be decoded, such as the
    one-hot columns of a category with many values.
    """
    categories = [[*group] for group in groups]
    categorical = {column for group in categories for column in group}
    numeric = [column for column in range(values_KF.shape[1]) if column not in categorical]
    values = torch.empty(len(judged_ND), values_KF.shape[1])
    for columns in (numeric, *categories):
        if columns:
            values[:, columns] = decode(known_KD, values_KF[:, columns], judged_ND, seed)
    return values


def is_mean(values_NF: Tensor) -> bool:
    """Whether values [N, F] of ``decode`` are the mean, which is the same for all rows."""
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


Numbers = npt.NDArray[np.float64]


# (tensor of the known rows, tensor of the judged rows)
Pair = tuple[Tensor, Tensor]


# Penalties of a kernel ridge regression, in units of the mean of the kernel's diagonal.
_RIDGE_PENALTIES = 10.0 ** np.arange(-5, 3.5, 0.5)


# Values of gamma of the Gaussian kernel, multiplied by the number of inputs.
_GAMMAS = (1.0, 0.25)


_TREES, _MIN_ROWS, _SHARE, _MAX_FEATURES = 100, 2, 0.4, 400


# Maximum number of targets that get separate trees. More targets share the same trees.
_MAX_FORESTS = 30


# The predictions of this many best candidates are averaged.
_BEST = 2


# linear and Gaussian kernel ridge regressions, and extremely randomised trees. Cross-validation
# chooses among them for each target.
def predict(inputs: Sequence[Pair], values_KF: Tensor, seed: int) -> Tensor:
    """Returns the predictions of the best regressions for the judged rows, [N, F].

    For each target, it averages the two candidates with the smallest squared error on known rows
    that they were not trained on (leave-one-out for ridge regressions, out-of-bag for trees).

    Args:
        inputs: alternative inputs, each of K known rows and N judged rows, [K, D] and [N, D].
        values_KF: the values of the known rows.
        seed: the seed of the trees.
    """
    y_KF = values_KF.double().numpy()
    mean_F, std_F = y_KF.mean(0), y_KF.std(0)
    y_KF = (y_KF - mean_F) / np.maximum(std_F, 1e-9)
    # A candidate that is worse than the mean counts as the mean.
    errors, guesses = [(y_KF**2).mean(0)], [np.zeros((len(inputs[0][1]), y_KF.shape[1]))]
    for known_KD, judged_ND in inputs:
        x, asked = _standardize(known_KD, judged_ND)
        if not x.shape[1]:
            continue
        for error_F, guess_NF in (*_fit_ridges(x, y_KF, asked), _fit_trees(x, y_KF, asked, seed)):
            errors.append(error_F)
            guesses.append(guess_NF)
    order_BF = np.argsort(np.stack(errors), axis=0, kind="stable")[:_BEST]
    best_NF = np.mean(
        [np.take_along_axis(np.stack(guesses), order_F[None, None], 0)[0] for order_F in order_BF],
        axis=0,
    )
    # A linear model extrapolates badly, so predictions stay in the range of the known values.
    best_NF = np.clip(best_NF, y_KF.min(0), y_KF.max(0))
    return torch.from_numpy(best_NF * std_F + mean_F)


def list_alternatives(received: Pair, own: Pair) -> list[Pair]:
    """Returns alternative inputs for ``predict``: the received tensors, the attacker's own columns,
    and their concatenation.
    """
    joined = torch.cat([received[0], own[0]], 1), torch.cat([received[1], own[1]], 1)
    return [received, own, joined]


def _standardize(known_KD: Tensor, judged_ND: Tensor) -> tuple[Numbers, Numbers]:
    x, asked = known_KD.double().numpy(), judged_ND.double().numpy()
    mean_D, std_D = x.mean(0), x.std(0)
    varies_D = std_D > 1e-9
    mean_D, std_D = mean_D[varies_D], std_D[varies_D]
    return (x[:, varies_D] - mean_D) / std_D, (asked[:, varies_D] - mean_D) / std_D


def _fit_ridges(x: Numbers, y_KF: Numbers, asked: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Yields the leave-one-out error [F] and the predictions [N, F] of each kernel."""
    width = x.shape[1]
    inner_KK, inner_NK = x @ x.T / width, asked @ x.T / width
    # The kernel includes a constant input instead of centring, which would use the left-out row.
    yield _fit_ridge(1 + inner_KK, y_KF, 1 + inner_NK)
    square_K, square_N = np.diag(inner_KK), (asked**2).sum(1) / width
    distance_KK = np.maximum(square_K[:, None] + square_K - 2 * inner_KK, 0.0)
    distance_NK = np.maximum(square_N[:, None] + square_K - 2 * inner_NK, 0.0)
    for gamma in _GAMMAS:
        yield _fit_ridge(np.exp(-gamma * distance_KK), y_KF, np.exp(-gamma * distance_NK))


def _fit_ridge(kernel_KK: Numbers, y_KF: Numbers, kernel_NK: Numbers) -> tuple[Numbers, Numbers]:
    values_K, vectors_KK = np.linalg.eigh(kernel_KK)
    turned_KF, squares_KK = vectors_KK.T @ y_KF, vectors_KK**2
    scale = max(float(np.diag(kernel_KK).mean()), 1e-12)
    best_F, weights_KF = np.full(y_KF.shape[1], np.inf), np.zeros_like(y_KF)
    for penalty in _RIDGE_PENALTIES * scale:
        inverse_K = 1 / (np.maximum(values_K, 0.0) + penalty * len(kernel_KK) * 0.01)
        solution_KF = vectors_KK @ (inverse_K[:, None] * turned_KF)
        error_F = ((solution_KF / (squares_KK @ inverse_K)[:, None]) ** 2).mean(0)
        better_F = error_F < best_F
        best_F = np.where(better_F, error_F, best_F)
        weights_KF = np.where(better_F, solution_KF, weights_KF)
    return best_F, kernel_NK @ weights_KF


def _fit_trees(x: Numbers, y_KF: Numbers, asked: Numbers, seed: int) -> tuple[Numbers, Numbers]:
    """Returns the out-of-bag error [F] and the predictions [N, F] of trees. Each target has
    separate trees, unless there are many targets.
    """
    if 1 < y_KF.shape[1] <= _MAX_FORESTS:
        parts = [_fit_trees(x, y_K1, asked, seed) for y_K1 in np.split(y_KF, y_KF.shape[1], axis=1)]
        errors, guesses = zip(*parts, strict=True)
        return np.concatenate(errors), np.concatenate(guesses, axis=1)
    from sklearn.ensemble import ExtraTreesRegressor

    trees = ExtraTreesRegressor(
        _TREES,
        min_samples_leaf=_MIN_ROWS,
        max_features=max(1, min(_MAX_FEATURES, int(_SHARE * x.shape[1]))),
        bootstrap=True,
        oob_score=True,
        random_state=derive_seed(seed, "trees") % 2**32,
    ).fit(x, y_KF if y_KF.shape[1] > 1 else y_KF[:, 0])
    out_KF = trees.oob_prediction_.reshape(y_KF.shape)
    return ((out_KF - y_KF) ** 2).mean(0), trees.predict(asked).reshape(-1, y_KF.shape[1])

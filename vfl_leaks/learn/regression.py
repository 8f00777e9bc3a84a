"""Regressions on few rows: linear and Gaussian kernel ridge regressions, and extremely randomised
trees. Cross-validation chooses among them for each target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_party.base.seeds import derive_seed

Numbers = npt.NDArray[np.float64]
# (tensor of the known rows, tensor of the judged rows)
Pair = tuple[Tensor, Tensor]
# Penalties of a kernel ridge regression, in units of the mean of the kernel's diagonal.
_PENALTIES = 10.0 ** np.arange(-5, 3.5, 0.5)
# Values of gamma of the Gaussian kernel, multiplied by the number of inputs.
_GAMMAS = (1.0, 0.25)
_TREES, _MIN_ROWS, _SHARE, _MAX_FEATURES = 100, 2, 0.4, 400
# Maximum number of targets that get separate trees. More targets share the same trees.
_MAX_FORESTS = 30
# The predictions of this many best candidates are averaged.
_BEST = 2


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
    for penalty in _PENALTIES * scale:
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

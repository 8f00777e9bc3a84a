"""The terms of FedCVT's loss, and the estimates of missing views, as functions of representations.

A representation R is [N, D]: the unique half U [N, D/2], then the shared half C. The numbers of
equations are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import TaskSettings
from vfl_party.base.dtypes import real
from vfl_party.methods.fedcvt.settings import Preset
from vfl_party.models.metrics import scores


def halves(r_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the unique and the shared half of representations [N, D], [N, D/2] each."""
    unique_NH, shared_NH = r_ND.chunk(2, dim=1)
    return unique_NH, shared_NH


def attend(q_NH: Tensor, k_MH: Tensor, v_MH: Tensor, sharpen: float) -> Tensor:
    """Returns the mean of the values [N, H], weighted by softmax(q·k / √H), whose power 1 /
    ``sharpen`` is taken.
    """
    weights_NM = (q_NH @ k_MH.T / (math.sqrt(q_NH.shape[1]) * sharpen)).softmax(dim=1)
    return weights_NM @ v_MH


@dataclass(frozen=True)
class Representations:
    """One party's representations in a step: of the aligned rows [M, D], and of rows that only it
    has [N, D].
    """

    aligned: Tensor
    own: Tensor

    @property
    def all(self) -> Tensor:
        """All representations, those of the aligned rows first: [M + N, D]."""
        return torch.cat([self.aligned, self.own])


def estimate(r_ND: Tensor, view: Representations, other: Representations, sharpen: float) -> Tensor:
    """Estimates the other party's representations [N, D] of rows of which one party has ``r_ND``.

    U: by attention among the aligned rows, this party's as keys and the other's as values. C: by
    attention among all of the other party's rows in the step, because shared representations can be
    compared across parties.
    """
    (unique_NH, shared_NH), (keys_MH, _) = halves(r_ND), halves(view.aligned)
    (values_MH, _), (_, everything) = halves(other.aligned), halves(other.all)
    unique = attend(unique_NH, keys_MH, values_MH, sharpen)
    return torch.cat([unique, attend(shared_NH, everything, everything, sharpen)], dim=1)


def distance(a_NH: Tensor, b_NH: Tensor, preset: Preset) -> Tensor:
    """Returns the mean squared distance of rows (Eqs. 1, 4 and 5); released: the mean over
    elements.
    """
    return (
        F.mse_loss(a_NH, b_NH) if preset == "released" else (a_NH - b_NH).square().sum(dim=1).mean()
    )


def overlap(r_ND: Tensor, preset: Preset) -> Tensor:
    """Returns the mean squared inner product of a row's two halves (Eqs. 2 and 3).

    Released: the Frobenius norm of all rows' inner products with each other, over the number of
    rows.
    """
    unique_NH, shared_NH = halves(r_ND)
    if preset == "released":
        norm: Tensor = torch.linalg.matrix_norm(unique_NH @ shared_NH.T)
        return norm / len(r_ND)
    return (unique_NH * shared_NH).sum(dim=1).square().mean()


@torch.no_grad()
def make_pseudo_labels(
    task: TaskSettings, outputs: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Returns pseudo-labels: whether a row gets one, bool [N], and the classes, as the task encodes
    labels.

    It gets one if all classifiers, of which ``outputs`` are the logits [N, O], name the same class,
    each with a probability above ``threshold``.
    """
    best = []
    for out_NO in outputs:
        scores_NO = scores(task, out_NO)
        best.append(
            (
                torch.cat([1 - scores_NO, scores_NO], dim=1) if task.kind == "binary" else scores_NO
            ).max(dim=1)
        )
    class_N = best[0].indices
    taken_N = torch.stack(
        [(scored.values > threshold) & (scored.indices == class_N) for scored in best]
    ).all(dim=0)
    return taken_N, class_N.unsqueeze(1).to(real()) if task.kind == "binary" else class_N

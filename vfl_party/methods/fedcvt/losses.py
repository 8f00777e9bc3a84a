"""Computes the terms of FedCVT's loss and estimates missing views, from representations.

A representation R [N, D] consists of the unique half U [N, D/2] and then the shared half C.
Equation numbers are the paper's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.models import TaskSettings
from vfl_party.base.devices import get_real_dtype
from vfl_party.methods.fedcvt.settings import Preset
from vfl_party.models.losses import scores


def split_halves(r_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the unique and the shared half of representations [N, D], [N, D/2] each."""
    unique_NH, shared_NH = r_ND.chunk(2, dim=1)
    return unique_NH, shared_NH


def attend(q_NH: Tensor, k_MH: Tensor, v_MH: Tensor, sharpen: float) -> Tensor:
    """Returns attention, [N, H]: the mean of the values, weighted by softmax(q·k / √H) raised to
    the power 1 / ``sharpen``.
    """
    weights_NM = (q_NH @ k_MH.T / (math.sqrt(q_NH.shape[1]) * sharpen)).softmax(dim=1)
    return weights_NM @ v_MH


@dataclass(frozen=True)
class Representations:
    """One party's representations in a step, for the aligned rows [M, D] and for the rows that only
    this party has [N, D].
    """

    aligned: Tensor
    own: Tensor

    @property
    def all(self) -> Tensor:
        """All representations, [M + N, D]: first for the aligned rows, then for the party's own
        rows.
        """
        return torch.cat([self.aligned, self.own])


def estimate_view(
    r_ND: Tensor, source: Representations, other: Representations, sharpen: float
) -> Tensor:
    """Estimates the other party's representations [N, D] of rows for which one party has the
    representations ``r_ND``.

    U is estimated by attention over the aligned rows, with this party's representations as keys and
    the other party's as values. C is estimated by attention over all of the other party's rows in
    the step, because shared representations are comparable across parties.
    """
    (unique_NH, shared_NH), (keys_MH, _) = split_halves(r_ND), split_halves(source.aligned)
    (values_MH, _), (_, all_shared) = split_halves(other.aligned), split_halves(other.all)
    unique = attend(unique_NH, keys_MH, values_MH, sharpen)
    return torch.cat([unique, attend(shared_NH, all_shared, all_shared, sharpen)], dim=1)


def mean_distance(a_NH: Tensor, b_NH: Tensor, preset: Preset) -> Tensor:
    """Returns the mean over rows of the squared distance (Eqs. 1, 4 and 5). With preset
    ``released``, it is the mean over elements.
    """
    return (
        F.mse_loss(a_NH, b_NH) if preset == "released" else (a_NH - b_NH).square().sum(dim=1).mean()
    )


def mean_overlap(r_ND: Tensor, preset: Preset) -> Tensor:
    """Returns the mean squared inner product of a row's two halves (Eqs. 2 and 3).

    With preset ``released``, it is the Frobenius norm of the matrix of inner products between all
    rows, divided by the number of rows.
    """
    unique_NH, shared_NH = split_halves(r_ND)
    if preset == "released":
        norm: Tensor = torch.linalg.matrix_norm(unique_NH @ shared_NH.T)
        return norm / len(r_ND)
    return (unique_NH * shared_NH).sum(dim=1).square().mean()


@torch.no_grad()
def make_pseudo_labels(
    task: TaskSettings, outputs: Sequence[Tensor], threshold: float
) -> tuple[Tensor, Tensor]:
    """Returns whether each row gets a pseudo-label, bool [N], and the rows' classes, encoded as the
    task's labels.

    A row gets a pseudo-label if all classifiers predict the same class, each with a probability
    above ``threshold``. ``outputs``: the logits [N, O] of each classifier.
    """
    predictions = []
    for out_NO in outputs:
        scores_NO = scores(task, out_NO)
        predictions.append(
            (
                torch.cat([1 - scores_NO, scores_NO], dim=1) if task.kind == "binary" else scores_NO
            ).max(dim=1)
        )
    class_N = predictions[0].indices
    agree_N = torch.stack(
        [(scored.values > threshold) & (scored.indices == class_N) for scored in predictions]
    ).all(dim=0)
    return agree_N, class_N.unsqueeze(1).to(get_real_dtype()) if task.kind == "binary" else class_N

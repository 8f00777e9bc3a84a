"""The decision threshold: the probability above which a row is positive."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.config.task import ThresholdRule

# The threshold if the recipe sets none.
USUAL = 0.5
# The smallest and the largest threshold. Both have a finite logit.
_MIN, _MAX = math.ulp(0.0), 1.0 - 2.0**-53


def decide(outputs_N1: Tensor, threshold: float | None) -> Tensor:
    """Decides which rows are positive.

    Args:
        outputs_N1: The logits of the rows.
        threshold: A probability. None means 0.5.

    Returns a bool tensor in the shape of the logits.
    """
    if threshold is None or threshold == USUAL:
        return outputs_N1 > 0
    # This compares logits, because the probabilities of large logits all round to 1.
    return outputs_N1.double() > math.log(threshold) - math.log1p(-threshold)


def choose_threshold(rule: ThresholdRule, outputs_N1: Tensor, targets_N1: Tensor) -> float:
    """Chooses the best threshold for the logits and labels of rows.

    The threshold is half-way between two neighbouring probabilities. If several thresholds are
    equally good, it is the highest. Logits above 36.7 have the probability 1 in float64, so a
    threshold cannot separate them.

    Args:
        rule: The recipe's criterion for the best threshold.
        outputs_N1: The logits of the rows.
        targets_N1: The labels of the rows, 0 or 1.
    """
    p_N, order = outputs_N1.detach().cpu().double().sigmoid().flatten().sort(descending=True)
    y_N = targets_N1.detach().cpu().double().flatten()[order]
    # With cut k the first k rows are positive. A cut between equal probabilities is not possible.
    hits_K = torch.cat([y_N.new_zeros(1), y_N.cumsum(0)])
    positive_K = torch.arange(len(p_N) + 1, dtype=torch.float64)
    misses_K, false_K = hits_K[-1] - hits_K, positive_K - hits_K
    if rule.rule == "f1":
        # If no label is positive, F1 is 0 for every cut.
        value_K = 2 * hits_K / (positive_K + hits_K[-1]).clamp_min(1.0)
    elif rule.rule == "rate":
        value_K = -(positive_K / max(1, len(p_N)) - (rule.rate or 0.0)).abs()
    else:
        value_K = -(
            false_K * (rule.false_positive or 0.0) + misses_K * (rule.false_negative or 0.0)
        )
    ends_K = torch.cat([p_N.new_ones(1), p_N, p_N.new_zeros(1)])
    value_K = value_K.masked_fill(ends_K[:-1] == ends_K[1:], -torch.inf)
    cut = int(value_K.argmax())
    return min(max(float((ends_K[cut] + ends_K[cut + 1]) / 2), _MIN), _MAX)


def choose_threshold_of_scores(
    rule: ThresholdRule, scores_N: npt.NDArray[np.float64], truth_N: npt.NDArray[np.int64]
) -> float:
    """Chooses the best threshold as ``choose_threshold`` does, but from probabilities."""
    return choose_threshold(
        rule, torch.from_numpy(scores_N.copy()).logit(), torch.from_numpy(truth_N.copy())
    )

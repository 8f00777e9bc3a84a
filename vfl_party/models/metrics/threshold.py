"""The probability above which a row is decided positive."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.config.task import ThresholdRule

# The threshold of a recipe without one.
USUAL = 0.5
# Each has a finite logit.
_MIN, _MAX = math.ulp(0.0), 1.0 - 2.0**-53


def decide(outputs_N1: Tensor, threshold: float | None) -> Tensor:
    """Returns whether each row is decided positive, bool of the same shape; ``outputs_N1``: logits.

    ``threshold``: a probability; None: 0.5.
    """
    if threshold is None or threshold == USUAL:
        return outputs_N1 > 0
    # Scores and not probabilities, because the probabilities of large logits are all 1.
    return outputs_N1.double() > math.log(threshold) - math.log1p(-threshold)


def choose_threshold(rule: ThresholdRule, outputs_N1: Tensor, targets_N1: Tensor) -> float:
    """Chooses a threshold by the scores of rows and their labels.

    It is half-way between two neighbouring scores; the highest of several equally good ones. Logits
    above 36.7 have the probability 1 in float64, so no threshold divides them.

    Args:
        rule: what is best.
        outputs_N1: logits.
        targets_N1: 0 and 1.
    """
    p_N, order = outputs_N1.detach().cpu().double().sigmoid().flatten().sort(descending=True)
    y_N = targets_N1.detach().cpu().double().flatten()[order]
    # Cut k decides the first k rows positive; a cut between equal scores is not possible.
    hits_K = torch.cat([y_N.new_zeros(1), y_N.cumsum(0)])
    chosen_K = torch.arange(len(p_N) + 1, dtype=torch.float64)
    misses_K, false_K = hits_K[-1] - hits_K, chosen_K - hits_K
    if rule.rule == "f1":
        # Without a positive row F1 is 0 for every cut.
        worth_K = 2 * hits_K / (chosen_K + hits_K[-1]).clamp_min(1.0)
    elif rule.rule == "rate":
        worth_K = -(chosen_K / max(1, len(p_N)) - (rule.rate or 0.0)).abs()
    else:
        worth_K = -(
            false_K * (rule.false_positive or 0.0) + misses_K * (rule.false_negative or 0.0)
        )
    ends_K = torch.cat([p_N.new_ones(1), p_N, p_N.new_zeros(1)])
    worth_K = worth_K.masked_fill(ends_K[:-1] == ends_K[1:], -torch.inf)
    cut = int(worth_K.argmax())
    return min(max(float((ends_K[cut] + ends_K[cut + 1]) / 2), _MIN), _MAX)


def threshold_of(
    rule: ThresholdRule, scores_N: npt.NDArray[np.float64], truth_N: npt.NDArray[np.int64]
) -> float:
    """Chooses a threshold by the probabilities of rows and their labels, as ``choose`` does by
    logits.
    """
    return choose_threshold(
        rule, torch.from_numpy(scores_N.copy()).logit(), torch.from_numpy(truth_N.copy())
    )

"""Infers the class of each row from all messages about it by expectation maximisation.

A row has one message per round. Each message belongs to a *group* with common statistics: a batch,
if the noise depends on the batch, or a round. In each group, one Gaussian models the rows of a
class. The posterior of a row is the sum of the log likelihoods of its messages. Independent noise
therefore averages out, and the direction between classes may change from group to group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS, _ENOUGH = 60, 3e-4
# A class's Gaussian is shrunk towards the group's Gaussian, which counts as this many rows.
_MEAN_ROWS, _COVARIANCE_ROWS = 2.0, 4.0
# The limit of one message's log ratio, because a Gaussian is a rough model, and the temperature.
_MAX_LOG_RATIO, _TEMPER = 4.0, 0.7


@dataclass(frozen=True, eq=False)
class Messages:
    """All M messages about N rows that an attacker received.

    ``row``, ``group``: the row and the group of each message, int64 [M]. ``features``: the features
    of each message, float64 [M, F], nearly standardised in each group. ``rows``: the number N.
    """

    row: Tensor
    group: Tensor
    features: Tensor
    rows: int

    def sum_by_group(self, values_MX: Tensor) -> Tensor:
        """Returns the sum of the messages' values for each group, [G, X]."""
        groups = int(self.group.max()) + 1
        return values_MX.new_zeros(groups, values_MX.shape[1]).index_add_(0, self.group, values_MX)

    def sum_by_row(self, values_MX: Tensor) -> Tensor:
        """Returns the sum of the messages' values for each row, [N, X]."""
        return values_MX.new_zeros(self.rows, values_MX.shape[1]).index_add_(0, self.row, values_MX)

    def sum_features(self) -> Tensor:
        """Returns the sum of each row's features over its messages, [N, F]."""
        return self.sum_by_row(self.features)

    def stack_features(self) -> Tensor:
        """Returns the concatenated features of all groups, [N, G * F]; 0 for a group without the
        row.
        """
        groups, width = int(self.group.max()) + 1, self.features.shape[1]
        features = self.features.new_zeros(self.rows, groups, width)
        features[self.row, self.group] = self.features
        return features.flatten(1)


def infer_classes(messages: Messages, begin_NC: Tensor, known_NC: Tensor | None = None) -> Tensor:
    """Returns the log posterior of each row's class, float64 [N, C], up to a constant for each row.

    Args:
        messages: the messages.
        begin_NC: the initial class probabilities.
        known_NC: the one-hot classes of known rows; zeros for a row of unknown class.
    """
    is_known_N1 = None if known_NC is None else known_NC.sum(1, keepdim=True) > 0
    q_NC = _fix_known(begin_NC, known_NC, is_known_N1)
    has_messages_N = torch.zeros(messages.rows, dtype=torch.bool)
    has_messages_N[messages.row] = True
    groups = _ClassGaussians(messages)
    posterior_NC = torch.zeros_like(q_NC)
    for _ in range(_STEPS):
        log_MC = torch.stack([groups.log_density(q_N) for q_N in q_NC.T], dim=1)
        log_MC = (log_MC - log_MC.mean(1, keepdim=True)).clamp(
            -_MAX_LOG_RATIO / 2, _MAX_LOG_RATIO / 2
        )
        prior_C = q_NC[has_messages_N].mean(0).clamp_min(1e-3)
        posterior_NC = messages.sum_by_row(log_MC) + prior_C.log()
        after_NC = _fix_known(torch.softmax(_TEMPER * posterior_NC, 1), known_NC, is_known_N1)
        change = (after_NC - q_NC)[has_messages_N].abs().mean().item()
        q_NC = (q_NC + after_NC) / 2
        if change < _ENOUGH:
            break
    return posterior_NC


def _fix_known(q_NC: Tensor, known_NC: Tensor | None, is_known_N1: Tensor | None) -> Tensor:
    if known_NC is None or is_known_N1 is None:
        return q_NC
    return torch.where(is_known_N1, known_NC, q_NC)


class _ClassGaussians:
    """Models the rows of a class by one Gaussian in each group. Its covariance is shrunk towards
    the covariance of the group.
    """

    def __init__(self, messages: Messages) -> None:
        self._messages, x_MF = messages, messages.features
        count_G1 = messages.sum_by_group(torch.ones(len(x_MF), 1, dtype=x_MF.dtype))
        mean_GF = messages.sum_by_group(x_MF) / count_G1
        group_GFF = self._outer(x_MF - mean_GF[messages.group]) / count_G1[:, :, None]
        self._prior_GFF = _COVARIANCE_ROWS * group_GFF
        self._min_FF = 1e-3 * torch.eye(x_MF.shape[1], dtype=x_MF.dtype)

    def _outer(self, d_MF: Tensor, weight_M1: Tensor | float = 1.0) -> Tensor:
        """Returns the sum of the outer products of the messages' vectors for each group,
        [G, F, F].
        """
        flat = (weight_M1 * d_MF)[:, :, None] * d_MF[:, None, :]
        width = d_MF.shape[1]
        return self._messages.sum_by_group(flat.flatten(1)).reshape(-1, width, width)

    def log_density(self, q_N: Tensor) -> Tensor:
        """Returns the log density of each message under a class, [M], without a constant.

        ``q_N``: the probability that each row belongs to the class.
        """
        messages, weight_M1 = self._messages, q_N[self._messages.row][:, None]
        count_G1 = messages.sum_by_group(weight_M1) + _MEAN_ROWS
        mean_GF = messages.sum_by_group(weight_M1 * messages.features) / count_G1
        d_MF = messages.features - mean_GF[messages.group]
        spread_GFF = self._outer(d_MF, weight_M1) + self._prior_GFF
        spread_GFF = spread_GFF / (count_G1[:, :, None] + _COVARIANCE_ROWS - _MEAN_ROWS)
        spread_GFF = spread_GFF + self._min_FF
        inverse_GFF, logdet_G = torch.linalg.inv(spread_GFF), torch.linalg.slogdet(spread_GFF)[1]
        away_M = torch.einsum("mf,mfh,mh->m", d_MF, inverse_GFF[messages.group], d_MF)
        density_M: Tensor = -0.5 * (away_M + logdet_G[messages.group])
        return density_M

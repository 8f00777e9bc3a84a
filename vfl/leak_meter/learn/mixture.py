"""Infers the class of each row from all messages about it by expectation maximisation.

A row has one message per round, and each message belongs to a *group* with common statistics: a
batch, if the noise depends on the batch, or a round. In each group the rows of a class are one
Gaussian, and the posterior of a row sums the log likelihoods of all of its messages. So independent
noise averages out, and a direction may change from group to group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS, _ENOUGH = 60, 3e-4
# Numbers of rows by which the Gaussian of a class is shrunk towards that of the group.
_MEAN_ROWS, _COVARIANCE_ROWS = 2.0, 4.0
# Limit of the log ratio of one message, for which a Gaussian is a rough model, and a temperature.
_MAX_LOG_RATIO, _TEMPER = 4.0, 0.7


@dataclass(frozen=True, eq=False)
class Messages:
    """All messages that an attacker received, M of them about N rows.

    ``row``, ``group``: int64 [M]. ``features``: float64 [M, F], about standardised in each group.
    ``rows``: N.
    """

    row: Tensor
    group: Tensor
    features: Tensor
    rows: int

    def sums(self, values_MX: Tensor) -> Tensor:
        """Returns the sums of each group, [G, X]."""
        groups = int(self.group.max()) + 1
        return values_MX.new_zeros(groups, values_MX.shape[1]).index_add_(0, self.group, values_MX)

    def per_row(self, values_MX: Tensor) -> Tensor:
        """Returns the sums of each row, [N, X]."""
        return values_MX.new_zeros(self.rows, values_MX.shape[1]).index_add_(0, self.row, values_MX)

    def sum_features(self) -> Tensor:
        """Returns the sum of each row's features over its messages, [N, F]."""
        return self.per_row(self.features)

    def stack_features(self) -> Tensor:
        """Returns the features of all groups side by side, [N, G * F]; 0 where a row has none."""
        groups, width = int(self.group.max()) + 1, self.features.shape[1]
        features = self.features.new_zeros(self.rows, groups, width)
        features[self.row, self.group] = self.features
        return features.flatten(1)


def separate(of: Messages, begin_NC: Tensor, known_NC: Tensor | None = None) -> Tensor:
    """Returns the log posterior of each row's class, float64 [N, C], except for a constant of the
    row.

    Args:
        of: the messages.
        begin_NC: the probabilities with which the search begins.
        known_NC: one-hot rows of known classes; a row of zeros is unknown.
    """
    is_known_N1 = None if known_NC is None else known_NC.sum(1, keepdim=True) > 0
    q_NC = _fix_known(begin_NC, known_NC, is_known_N1)
    there_N = torch.zeros(of.rows, dtype=torch.bool)
    there_N[of.row] = True
    own = _Groups(of)
    posterior_NC = torch.zeros_like(q_NC)
    for _ in range(_STEPS):
        log_MC = torch.stack([own.log_density(q_N) for q_N in q_NC.T], dim=1)
        log_MC = (log_MC - log_MC.mean(1, keepdim=True)).clamp(
            -_MAX_LOG_RATIO / 2, _MAX_LOG_RATIO / 2
        )
        share_C = q_NC[there_N].mean(0).clamp_min(1e-3)
        posterior_NC = of.per_row(log_MC) + share_C.log()
        after_NC = _fix_known(torch.softmax(_TEMPER * posterior_NC, 1), known_NC, is_known_N1)
        change = (after_NC - q_NC)[there_N].abs().mean().item()
        q_NC = (q_NC + after_NC) / 2
        if change < _ENOUGH:
            break
    return posterior_NC


def _fix_known(q_NC: Tensor, known_NC: Tensor | None, is_known_N1: Tensor | None) -> Tensor:
    if known_NC is None or is_known_N1 is None:
        return q_NC
    return torch.where(is_known_N1, known_NC, q_NC)


class _Groups:
    """The Gaussians of a class in each group, whose covariance is shrunk towards that of the
    group.
    """

    def __init__(self, of: Messages) -> None:
        self._of, x_MF = of, of.features
        count_G1 = of.sums(torch.ones(len(x_MF), 1, dtype=x_MF.dtype))
        mean_GF = of.sums(x_MF) / count_G1
        whole_GFF = self._outer(x_MF - mean_GF[of.group]) / count_G1[:, :, None]
        self._prior_GFF = _COVARIANCE_ROWS * whole_GFF
        self._least_FF = 1e-3 * torch.eye(x_MF.shape[1], dtype=x_MF.dtype)

    def _outer(self, d_MF: Tensor, weight_M1: Tensor | float = 1.0) -> Tensor:
        """Returns the sums of outer products of each group, [G, F, F]."""
        flat = (weight_M1 * d_MF)[:, :, None] * d_MF[:, None, :]
        width = d_MF.shape[1]
        return self._of.sums(flat.flatten(1)).reshape(-1, width, width)

    def log_density(self, q_N: Tensor) -> Tensor:
        """Returns the log density of each message, [M], if the rows are of a class by ``q_N``."""
        of, weight_M1 = self._of, q_N[self._of.row][:, None]
        count_G1 = of.sums(weight_M1) + _MEAN_ROWS
        mean_GF = of.sums(weight_M1 * of.features) / count_G1
        d_MF = of.features - mean_GF[of.group]
        spread_GFF = self._outer(d_MF, weight_M1) + self._prior_GFF
        spread_GFF = spread_GFF / (count_G1[:, :, None] + _COVARIANCE_ROWS - _MEAN_ROWS)
        spread_GFF = spread_GFF + self._least_FF
        inverse_GFF, logdet_G = torch.linalg.inv(spread_GFF), torch.linalg.slogdet(spread_GFF)[1]
        away_M = torch.einsum("mf,mfh,mh->m", d_MF, inverse_GFF[of.group], d_MF)
        density_M: Tensor = -0.5 * (away_M + logdet_G[of.group])
        return density_M

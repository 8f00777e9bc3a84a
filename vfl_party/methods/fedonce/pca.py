"""Fits principal components instead of training a network: FedOnce-PCA (section 5.6)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import RoundReport
from vfl_party.methods.fedonce.rows import get_training_rows
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.phases.context import Party

log = logging.getLogger(__name__)


def principal_components(x_NF: Tensor, d: int) -> tuple[Tensor, Tensor, float]:
    """Returns the mean [F], the d directions of largest variance [d, F], and the share of the
    variance that these explain.

    Computes in float64. The sign of a direction is chosen so that its largest loading is positive.
    """
    x_NF = x_NF.double()
    mean_F = x_NF.mean(dim=0)
    _, singular, directions_KF = torch.linalg.svd(x_NF - mean_F, full_matrices=False)
    axes_DF = directions_KF[:d]
    largest = axes_DF.gather(1, axes_DF.abs().argmax(dim=1, keepdim=True))
    variances = singular.square()
    return (
        mean_F,
        axes_DF * largest.sign(),
        (variances[:d].sum() / variances.sum().clamp_min(1e-300)).item(),
    )


class Pca:
    """Fits the party's encoder, one linear layer, in one round: z = axes (x - mean).

    The active party sets ``embedding_size`` without knowing how many columns the passive parties
    have. So the numbers of z beyond a party's components are 0.
    """

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._rows = party, get_training_rows(party, phase, settings.rows)
        linear = list(party.models["encoder"].modules())[-1]
        d = party.embedding_size
        if (
            not isinstance(linear, nn.Linear)
            or len(list(party.models["encoder"].parameters())) != 2
        ):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {phase}: objective = 'pca' turns the encoder into one linear "
                "layer, but an earlier phase needs another encoder. Remove one of the two phases.",
            )
        max_components = min(linear.in_features, len(self._rows) - 1)
        if d > max_components:
            # This is only logged, because a report would reveal the number of columns to the
            # server.
            log.warning(
                "phase %s: %s has %d columns and %d rows, which give %d principal components: the "
                "other %d of the embedding_size = %d numbers are 0",
                *(
                    phase,
                    party.name,
                    linear.in_features,
                    len(self._rows),
                    max_components,
                    d - max_components,
                    d,
                ),
                extra={"event": "advice"},
            )
        self._max_components = max_components
        self._linear = linear

    @torch.no_grad()
    def run_round(self, _round: int) -> RoundReport:
        """Fits the components and reports the share of the variance that they explain."""
        (x,) = self._party.need_features().inputs(self._rows)
        d = min(self._linear.out_features, self._max_components)
        mean_F, axes_DF, share = principal_components(x.flatten(1), d)
        self._linear.weight.zero_()[:d] = axes_DF
        self._linear.bias.zero_()[:d] = -axes_DF @ mean_F
        return RoundReport(0, {"local": {"variance": share}})

    def close(self) -> None:
        """Does nothing."""

    def state(self) -> dict[str, Any]:
        """Returns an empty state."""
        return {}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Does nothing."""
        _ = tree

"""Fits principal components instead of a network: FedOnce-PCA (section 5.6)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import RoundReport
from vfl_party.methods.fedonce.rows import rows_to_learn
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.phases.context import Party


def principal_components(x_NF: Tensor, d: int) -> tuple[Tensor, Tensor, float]:
    """Returns the mean [F], the d directions of largest variance [d, F], and the share of the
    variance that they hold.

    Computes in float64. Of a direction's two signs, it takes the one whose largest loading is
    positive.
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
    """Fits the party's encoder, one linear layer, in one round: z = axes (x - mean)."""

    def __init__(self, party: Party, phase: str, settings: FedOnceSettings) -> None:
        self._party, self._rows = party, rows_to_learn(party, phase, settings.rows)
        linear = list(party.models["encoder"].modules())[-1]
        d, where = party.embedding_size, f"recipe: phases: {phase}: objective = 'pca'"
        if (
            not isinstance(linear, nn.Linear)
            or len(list(party.models["encoder"].parameters())) != 2
        ):
            text = (
                f"{where} makes one linear layer of the encoder, and an earlier phase wants another"
            )
            raise InputError(Code.CONFIG_INVALID, f"{text}; leave out one of the two")
        most = min(linear.in_features, len(self._rows) - 1)
        if d > most:
            text = (
                f"{where}: {party.name} has {linear.in_features} columns and {len(self._rows)} rows"
            )
            raise InputError(
                Code.CONFIG_INVALID,
                f"{text}, at most {most} components, and embedding_size is {d}; take fewer",
            )
        self._linear = linear

    @torch.no_grad()
    def run_round(self, _round: int) -> RoundReport:
        (x,) = self._party.need_features().inputs(self._rows)
        mean_F, axes_DF, kept = principal_components(x.flatten(1), self._linear.out_features)
        self._linear.weight.copy_(axes_DF)
        self._linear.bias.copy_(-axes_DF @ mean_F)
        return RoundReport(0, {"local": {"variance": kept}})

    def close(self) -> None:
        return

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, tree: dict[str, Any]) -> None:
        _ = tree

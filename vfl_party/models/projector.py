"""The heads of self-supervised methods, used in pretraining alone: projector and predictor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def build_projector(in_features: int, widths: Sequence[int]) -> nn.Sequential:
    """Builds linear and BatchNorm for each width, ReLU after all but the last. h: [B, in_features]
    -> [B, widths[-1]]. Without widths it is the identity.

    FedHSSL, appendix B: [512, 512, 512] for SimSiam and BYOL, [512, 512, 128] for MoCo.
    """
    modules: list[nn.Module] = []
    for width in widths:
        modules += [nn.Linear(in_features, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        in_features = width
    return nn.Sequential(*modules[:-1])


def build_predictor(width: int, hidden: int) -> nn.Sequential:
    """Builds width -> hidden -> width, with BatchNorm and ReLU between. z: [B, width]. FedHSSL,
    appendix B.
    """
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )

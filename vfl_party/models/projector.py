"""The projector and the predictor of self-supervised methods, used only in pretraining."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def build_projector(in_features: int, widths: Sequence[int]) -> nn.Sequential:
    """Builds a projector, h [B, in_features] -> [B, widths[-1]].

    For each width it has a linear layer and BatchNorm, with ReLU after all but the last. Without
    ``widths`` it is the identity. FedHSSL, appendix B uses [512, 512, 512] for SimSiam and BYOL and
    [512, 512, 128] for MoCo.
    """
    modules: list[nn.Module] = []
    for width in widths:
        modules += [nn.Linear(in_features, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
        in_features = width
    return nn.Sequential(*modules[:-1])


def build_predictor(width: int, hidden: int) -> nn.Sequential:
    """Builds a predictor, z [B, width] -> [B, width], as in FedHSSL, appendix B.

    It has two linear layers, with BatchNorm and ReLU between them.
    """
    return nn.Sequential(
        nn.Linear(width, hidden, bias=False),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, width),
    )

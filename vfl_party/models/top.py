"""Builds the active party's model on the embeddings from the recipe's settings, and replaces the
embeddings of absent parties by learnt vectors or missing values (NaN).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from vfl_common.config.models import (
    CustomTop,
    GbdtTop,
    ModelSettings,
    PluginCombination,
    PluginTop,
    TopKinds,
    TopSettings,
)
from vfl_common.errors import Code, InputError
from vfl_party.models.external import (
    build_combination,
    build_module,
    build_plugin_top,
    require_float32,
    run_on_two_rows,
)
from vfl_party.models.layers import build_layers
from vfl_party.models.training import combine_widths
from vfl_party.models.trees import BoostedTrees


def build_joint(model: ModelSettings, widths: Sequence[int], outputs: int) -> nn.Module:
    """Builds the active party's model on the output of ``combine`` for embeddings of these widths.

    This is the top model, after the attention pooling or a plug-in's combination if the recipe has
    one. Raises the errors of ``build_top``.
    """
    # The order in which modules are built determines their random initial weights.
    pooling: nn.Module | None = None
    if isinstance(model.combine, PluginCombination):
        pooling, width = build_combination(model.combine, widths[0], len(widths))
    else:
        pooling = AttentionPooling(widths[0]) if model.combine == "attention" else None
        width = combine_widths(model.combine, widths)
    top = build_top(model.top, width, outputs)
    return top if pooling is None else nn.Sequential(pooling, top)


def build_top(settings: TopKinds, in_features: int, outputs: int) -> nn.Module:
    """Builds a top model, float32 [B, in_features] -> logits or values float32 [B, outputs].

    The built-in top models are a linear layer or, if ``hidden`` is set, an MLP with ReLU, and
    boosted trees, which have no trees before the phase ``head``. Initial weights come from torch's
    CPU generator, so call this inside ``seed_torch(...)``. Raises InputError (MODEL_INVALID) if a
    custom top model cannot be built, fails on two rows of zeros, or returns another shape or dtype.
    """
    match settings:
        case TopSettings():
            return nn.Sequential(
                *build_layers(in_features, settings.hidden, outputs, dropout=settings.dropout)
            )
        case GbdtTop():
            return BoostedTrees(outputs)
        case CustomTop():
            where = f"model.top.factory = {settings.factory!r}"
            top = build_module(settings.factory, settings.options, where, in_features, outputs)
        case PluginTop():
            top = build_plugin_top(settings, in_features, outputs)
    return _check_top_model(top, in_features, outputs)


def _check_top_model(top: nn.Module, in_features: int, outputs: int) -> nn.Module:
    """Checks the output of a top model for two rows of zeros, in evaluation mode."""
    subject, rows, fix = "the top model", f"{in_features} numbers", "the top model"
    output = run_on_two_rows(top, torch.zeros(2, in_features), subject=subject, rows=rows, fix=fix)
    out = require_float32(output, subject=subject, fix=fix)
    if out.shape != (2, outputs):
        raise InputError(
            Code.MODEL_INVALID,
            f"the top model: must return a tensor of shape [2, {outputs}] for two rows (got "
            f"{list(out.shape)}). Correct the top model.",
        )
    return top


class AttentionPooling(nn.Module):
    """Pools the embeddings of the present parties with attention weights: z = Σ a_k z_k.

    a_k = exp(wᵀ tanh(V z_k)) / Σ_j exp(wᵀ tanh(V z_j)), with learnt V [D, D] and w [D] (Ilse,
    Tomczak and Welling 2018, arXiv 1802.04712, Eq. 7 and 8, with L = D). Each row has its own
    weights, which do not depend on the order of the embeddings. The weights of the present parties
    always add up to 1.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        # These are linear layers, so that DP-SGD can compute per-example gradients.
        self.hidden = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def weights(self, z_BKD: Tensor) -> Tensor:
        """Returns the attention weights a [B, K], which add up to 1 in each row."""
        scores_BK1: Tensor = self.score(torch.tanh(self.hidden(z_BKD)))
        return scores_BK1.squeeze(2).softmax(dim=1)

    def forward(self, z_BKD: Tensor) -> Tensor:
        """Pools the K embeddings of each row, [B, K, D] -> [B, D]."""
        return (self.weights(z_BKD).unsqueeze(2) * z_BKD).sum(dim=1)


STAND_INS = "stand_ins"


class StandIns(nn.Module):
    """A learnt vector for each passive party that replaces its embeddings when it is absent.

    The vectors are initialised to zeros. ``widths``: {passive party: width of its embeddings}.
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        super().__init__()
        self._indices = {name: place for place, name in enumerate(widths)}
        self.vectors = nn.ParameterList(torch.zeros(width) for width in widths.values())

    def of(self, party: str, rows: int) -> Tensor:
        """Returns the learnt vector of ``party`` for each row, [rows, D]."""
        vector_D: Tensor = self.vectors[self._indices[party]]
        return vector_D.expand(rows, -1)

    def zero_gradients(self) -> None:
        """Sets the gradients to zeros, so that vectors that a batch does not use have gradients."""
        for vector_D in self.vectors:
            vector_D.grad = torch.zeros_like(vector_D)


class MissingNumbers(StandIns):
    """Replaces the embeddings of absent parties with NaN, which boosted trees support.

    ``widths``: {passive party: width of its embeddings}.
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        super().__init__({})
        self._widths = dict(widths)
        self._missing = nn.Buffer(
            torch.full((max(widths.values(), default=0),), torch.nan), persistent=False
        )

    def of(self, party: str, rows: int) -> Tensor:
        """Returns NaN for each embedding of ``party``, [rows, D]."""
        return self._missing[: self._widths[party]].expand(rows, -1)


def learnt_stand_ins(models: Mapping[str, nn.Module]) -> StandIns | None:
    """Returns the stand-ins in an active party's ``models``, or None if there are none.

    ``models``: {name: model}.
    """
    model = models.get(STAND_INS)
    return model if isinstance(model, StandIns) else None

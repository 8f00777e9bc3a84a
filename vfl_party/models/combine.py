"""Combines the parties' embeddings into the top model's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from vfl_common.config.models import Combine, PluginCombination


def combine(rule: Combine, embeddings: Sequence[Tensor]) -> Tensor:
    """Combines n embeddings [B, D] with the rule of the recipe.

    ``embeddings``: The active party's embedding, then those of the passive parties in the recipe's
    order. ``concat`` gives [B, n*D], or the sum of the widths if the widths differ. ``attention``
    and the combinations of plug-ins give [B, n, D], which the top model's first layer combines.
    ``sum``, ``mean`` and ``max`` give [B, D]. ``max`` sends the whole gradient of an element to
    the first party that has the maximum (``amax`` would split it evenly among ties).
    """
    if rule == "concat":
        return torch.cat(list(embeddings), dim=1)
    if rule == "attention" or isinstance(rule, PluginCombination):
        return torch.stack(list(embeddings), dim=1)
    if rule == "max":
        return torch.stack(list(embeddings)).max(dim=0).values
    total_BD = reduce(torch.add, embeddings)
    return total_BD if rule == "sum" else total_BD / len(embeddings)


class CombinedEmbeddings:
    """Combines a batch's embeddings in training and returns the gradients of received embeddings.

    Args:
        rule: The rule of the recipe that combines embeddings.
        embeddings: All embeddings to combine, [B, D] each.
        received: {party: embedding} for the embeddings of other parties, without a gradient.
        sets: Sets of embeddings, in which learnt vectors may replace the embeddings of absent
            parties. Each set is combined separately. Default: one set of all embeddings.

    The attribute ``values`` has the combination of each set. With ``sum`` or ``mean`` over all
    embeddings, every embedding has the same gradient, so autograd computes it only once.
    """

    def __init__(
        self,
        rule: Combine,
        embeddings: Sequence[Tensor],
        received: Mapping[str, Tensor],
        sets: Sequence[Sequence[Tensor]] | None = None,
    ) -> None:
        self.received = received
        self._total_BD: Tensor | None = None
        if sets is None and rule in ("sum", "mean"):
            self._total_BD = reduce(torch.add, embeddings)
            if self._total_BD.requires_grad:
                self._total_BD.retain_grad()
            else:
                self._total_BD.requires_grad_()
            total_BD = self._total_BD
            self.values = [total_BD if rule == "sum" else total_BD / len(embeddings)]
        else:
            for z_BD in received.values():
                z_BD.requires_grad_()
            self.values = [combine(rule, subset) for subset in (sets or [embeddings])]

    def gradients(self) -> dict[str, Tensor]:
        """Returns {party: d loss / d embedding} for the received embeddings.

        Call this after ``loss.backward()``. An embedding without effect on the loss has zeros.
        """
        return {
            name: _gradient(z_BD if self._total_BD is None else self._total_BD)
            for name, z_BD in self.received.items()
        }


def _gradient(z_BD: Tensor) -> Tensor:
    return torch.zeros_like(z_BD) if z_BD.grad is None else z_BD.grad


def combine_widths(rule: Combine, widths: Sequence[int]) -> int:
    """Returns the width of the combined embeddings for a built-in rule.

    Only ``concat`` can combine embeddings of different widths.
    """
    return sum(widths) if rule == "concat" else widths[0]

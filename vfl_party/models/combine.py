"""Combines the parties' embeddings into the top model's input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from vfl_common.config.models import Combine, PluginCombination


def combine(rule: Combine, embeddings: Sequence[Tensor]) -> Tensor:
    """Combines n embeddings [B, D]: the active party's own first, then in the recipe's order.

    ``concat`` gives [B, n*D], or the sum of the widths if each embedding has its own.
    ``attention`` and a plug-in's give [B, n, D], which the top model's first layer combines; the
    others [B, D], element by element. ``max`` sends the whole gradient of an element to the first
    party that holds its maximum (``amax`` would split it evenly among ties).
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
    """The combination of a batch's embeddings in training, and the gradients of those that other
    parties sent.

    Args:
        embeddings: all that are combined, [B, D] each.
        received: those among them that came from another party, without gradient.
        sets: sets of the embeddings, and of what stands in for others, each of which is combined by
            itself. Default: all embeddings are combined once.

    ``values``: what each set gives. Under ``sum`` and ``mean`` of all embeddings, d loss / d
    embedding is one tensor for all parties: that of the total (of the mean, over n). So autograd
    need not make one for each.
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
        """Returns d loss / d embedding of each received one, after ``loss.backward()``; zeros if it
        has no effect.
        """
        return {
            name: _gradient(z_BD if self._total_BD is None else self._total_BD)
            for name, z_BD in self.received.items()
        }


def _gradient(of: Tensor) -> Tensor:
    return torch.zeros_like(of) if of.grad is None else of.grad


def combine_widths(rule: Combine, widths: Sequence[int]) -> int:
    """Returns the width of the combination of embeddings of these widths by a built-in rule; only
    ``concat`` may have different widths.
    """
    return sum(widths) if rule == "concat" else widths[0]

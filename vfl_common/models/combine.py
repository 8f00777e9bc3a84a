"""How the active party makes one input of the parties' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["concat", "sum", "mean", "max"]


def combine(rule: Rule, embeddings: Sequence[Tensor]) -> Tensor:
    """The combination of n embeddings [B, D], in the order of the recipe's parties.

    ``concat`` gives [B, n*D], the others [B, D], element by element. ``max`` sends the whole gradient of an element to
    the first party that holds its maximum (``amax`` would split it evenly among ties).
    """
    if rule == "concat":
        return torch.cat(list(embeddings), dim=1)
    stacked_nBD = torch.stack(list(embeddings))
    if rule == "sum":
        return stacked_nBD.sum(dim=0)
    if rule == "mean":
        return stacked_nBD.mean(dim=0)
    return stacked_nBD.max(dim=0).values


def combined_size(rule: Rule, n: int, embedding_size: int) -> int:
    """Width of the combination of n embeddings."""
    return n * embedding_size if rule == "concat" else embedding_size

"""Combines the parties' embeddings into the top model's input."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

Rule = Literal["concat", "sum", "mean", "max"]


def combine(rule: Rule, embeddings: Sequence[Tensor]) -> Tensor:
    """Combines n embeddings [B, D]: the active party's own first, then in the recipe's order.

    ``concat`` gives [B, n*D], the others [B, D], element by element. ``max`` sends the whole gradient of an element to
    the first party that holds its maximum (``amax`` would split it evenly among ties).
    """
    if rule == "concat":
        return torch.cat(list(embeddings), dim=1)
    if rule == "max":
        return torch.stack(list(embeddings)).max(dim=0).values
    total_BD = reduce(torch.add, embeddings)
    return total_BD if rule == "sum" else total_BD / len(embeddings)


def combined_size(rule: Rule, n: int, embedding_size: int) -> int:
    """Returns the width of the combination of n embeddings."""
    return n * embedding_size if rule == "concat" else embedding_size

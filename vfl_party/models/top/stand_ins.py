"""Learnt vectors that stand in for the embeddings of parties that are not there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

NAME = "stand_ins"


class StandIns(nn.Module):
    """A learnt vector for each passive party, which begins as zeros.

    ``widths``: {passive party: the width of its embeddings}.
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        super().__init__()
        self._places = {name: place for place, name in enumerate(widths)}
        self.vectors = nn.ParameterList(torch.zeros(width) for width in widths.values())

    def of(self, party: str, rows: int) -> Tensor:
        """Returns what stands in for the embeddings of ``party``, [rows, D]."""
        vector_D: Tensor = self.vectors[self._places[party]]
        return vector_D.expand(rows, -1)

    def zero_gradients(self) -> None:
        """Sets gradients of zeros: a vector that stands in for nobody in a batch has these, as the
        encoder of a party that is left out.
        """
        for vector_D in self.vectors:
            vector_D.grad = torch.zeros_like(vector_D)


def learnt_stand_ins(models: Mapping[str, nn.Module]) -> StandIns | None:
    """Returns the vectors among an active party's models, {name: model}; None if it has none."""
    found = models.get(NAME)
    return found if isinstance(found, StandIns) else None

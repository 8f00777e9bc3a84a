"""Stand-ins for the embeddings of absent parties: learnt vectors, or missing numbers."""

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
        """Sets gradients of zeros: a vector that is not used in a batch has these, as the encoder
        of a party that is left out.
        """
        for vector_D in self.vectors:
            vector_D.grad = torch.zeros_like(vector_D)


class MissingNumbers(StandIns):
    """Missing numbers (NaN), which trees take as they are; it has no parameters.

    ``widths``: {passive party: the width of its embeddings}.
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        super().__init__({})
        self._widths = dict(widths)
        self._missing = nn.Buffer(
            torch.full((max(widths.values(), default=0),), torch.nan), persistent=False
        )

    def of(self, party: str, rows: int) -> Tensor:
        """Returns missing numbers in place of the embeddings of ``party``, [rows, D]."""
        return self._missing[: self._widths[party]].expand(rows, -1)


def learnt_stand_ins(models: Mapping[str, nn.Module]) -> StandIns | None:
    """Returns the stand-ins among an active party's models, {name: model}; None if it has none."""
    model = models.get(NAME)
    return model if isinstance(model, StandIns) else None

"""Replacements for the embeddings of absent parties: learnt vectors or missing values (NaN)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

NAME = "stand_ins"


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
    model = models.get(NAME)
    return model if isinstance(model, StandIns) else None

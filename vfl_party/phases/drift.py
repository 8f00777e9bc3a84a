"""Measures how far each party's embeddings move from one validation to the next, at the active
party.

A party that scales its gradients to gain influence on the model (Fu et al. 2022) has embeddings
that move faster. The active party compares embeddings of the same rows that it receives in any
case. So the measurement needs no further exchange and does not affect training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vfl_party.phases.scoring import CHUNK_ROWS, Chunk

# The number of chunks of validation rows that are compared. 4,096 rows suffice, and take less
# memory than all rows.
_MAX_CHUNKS = 4


class _Statistics(NamedTuple):
    """The statistics of the embeddings of a number of rows: their mean and the sum of squared
    deviations from the mean, [D] each.
    """

    rows: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def compute(cls, z_BD: Tensor) -> _Statistics:
        """Returns the statistics of one batch. ``torch.var_mean`` would take ten times as long on a
        CPU.
        """
        mean_D = z_BD.mean(dim=0)
        return cls(len(z_BD), mean_D, (z_BD - mean_D).square_().sum(dim=0))

    def merge(self, other: _Statistics) -> _Statistics:
        """Returns the statistics of both sets of rows together (Chan et al. 1979, eq. 2.1)."""
        rows, difference_D = self.rows + other.rows, other.mean - self.mean
        squares_D = (
            self.squares + other.squares + difference_D.square() * (self.rows * other.rows / rows)
        )
        return _Statistics(rows, self.mean + difference_D * (other.rows / rows), squares_D)

    def move_to(self, device: torch.device) -> _Statistics:
        """Returns the statistics on ``device``. A checkpoint's statistics are on the CPU."""
        return _Statistics(self.rows, self.mean.to(device), self.squares.to(device))

    def stack(self) -> Tensor:
        """Returns the mean and the standard deviation of each dimension, [2, D]."""
        return torch.stack([self.mean, (self.squares / self.rows).sqrt()])


class Drift:
    """Computes ‖z − z′‖ / ‖z′‖ for each party, where z are its embeddings of the validation rows
    and z′ its embeddings in the previous validation.

    Without validation rows, z is the mean and the standard deviation of the embeddings, over about
    the first 4,096 rows of the training steps since the last measurement. ``me``: The name of the
    active party, whose own embeddings are compared too. ``compares``: Whether embeddings of the
    same rows can be compared. If not, no drift is reported.
    """

    def __init__(self, me: str, *, compares: bool = True) -> None:
        self._me, self._compares = me, compares
        self._previous: dict[str, Tensor] = {}
        # Embeddings of the current validation.
        self._current: dict[str, list[Tensor]] = {}
        # The number of chunks seen in this validation.
        self._num_chunks = 0
        # Statistics of the training steps.
        self._steps: dict[str, _Statistics] = {}
        self._rows = 0

    def chunks(self, validation: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks of a validation unchanged, and records the embeddings of the first
        chunks.
        """
        self._current, self._num_chunks = {}, 0
        for chunk in validation:
            if self._num_chunks < _MAX_CHUNKS:
                self._num_chunks += 1
                for name, z in self._with_names(chunk.own, chunk.others):
                    self._current.setdefault(name, []).append(z)
            yield chunk

    def batch(self, own: Sequence[Tensor], others: Mapping[str, Tensor]) -> None:
        """Adds the embeddings of a training step to the statistics, without keeping the
        embeddings.
        """
        if self._rows < _MAX_CHUNKS * CHUNK_ROWS:
            for name, z in self._with_names(own, others):
                self._add(name, z)
            self._rows += max((z.shape[0] for z in (*own, *others.values())), default=0)

    def measure_drift(self) -> dict[str, float]:
        """Returns {party: its drift} for the parties that took part in this measurement and the
        previous one.
        """
        if not self._compares:
            return {}
        current = {
            name: torch.cat(parts)
            for name, parts in self._current.items()
            if len(parts) == self._num_chunks
        }
        current = current or {name: statistics.stack() for name, statistics in self._steps.items()}
        drift = {}
        for name, z in current.items():
            previous = self._previous.get(name)
            if previous is not None and previous.shape == z.shape:
                # Embeddings from a checkpoint are on the CPU.
                previous = previous.to(z.device)
                drift[name] = ((z - previous).norm() / previous.norm().clamp_min(1e-30)).item()
        self._previous, self._current, self._steps, self._rows = current, {}, {}, 0
        return drift

    def _with_names(
        self, own: Sequence[Tensor], others: Mapping[str, Tensor | None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (party, its detached embeddings) for the parties that are present."""
        for name, z in (*((self._me, z) for z in own), *others.items()):
            if z is not None:
                yield name, z.detach()

    def _add(self, name: str, z_BD: Tensor) -> None:
        earlier, statistics = self._steps.get(name), _Statistics.compute(z_BD)
        self._steps[name] = (
            statistics if earlier is None else earlier.move_to(z_BD.device).merge(statistics)
        )

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, on which the next drift depends."""
        steps = {name: tuple(statistics) for name, statistics in self._steps.items()}
        return {"before": self._previous, "statistics": steps, "rows": self._rows}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        self._previous, self._rows = dict(tree["before"]), tree["rows"]
        self._steps = {
            name: _Statistics(*values) for name, values in tree.get("statistics", {}).items()
        }
        # A checkpoint of an earlier version contains the embeddings themselves.
        for name, parts in tree.get("steps", {}).items():
            for z_BD in parts:
                self._add(name, z_BD)

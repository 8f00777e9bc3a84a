"""How far each party's embeddings move from one validation to the next, as the active party sees it
anyway.

A party that takes more of the learning than its share, by scaled gradients (Fu et al. 2022), moves
faster than it would. The active party compares what it has received of the same rows: without a
further exchange, and without an effect on training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vfl_party.phases.scoring import CHUNK_ROWS, Chunk

# Chunks of validation rows that are compared: 4,096 rows say as much as all, and take less memory.
_MAX_CHUNKS = 4


class _Statistics(NamedTuple):
    """The mean of ``rows`` rows' embeddings, and the sum of their squared deviations from it; [D]
    each.
    """

    rows: int
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, z_BD: Tensor) -> _Statistics:
        """Returns those of one batch. ``var_mean`` would take ten times as long on a CPU."""
        mean_D = z_BD.mean(dim=0)
        return cls(len(z_BD), mean_D, (z_BD - mean_D).square_().sum(dim=0))

    def with_(self, other: _Statistics) -> _Statistics:
        """Returns those of both sets of rows (Chan et al. 1979, eq. 2.1)."""
        rows, apart_D = self.rows + other.rows, other.mean - self.mean
        squares_D = (
            self.squares + other.squares + apart_D.square() * (self.rows * other.rows / rows)
        )
        return _Statistics(rows, self.mean + apart_D * (other.rows / rows), squares_D)

    def on(self, device: torch.device) -> _Statistics:
        """Returns them on ``device``: a checkpoint's are on the CPU."""
        return _Statistics(self.rows, self.mean.to(device), self.squares.to(device))

    def stack(self) -> Tensor:
        """Returns mean and standard deviation of each column, [2, D]."""
        return torch.stack([self.mean, (self.squares / self.rows).sqrt()])


class Drift:
    """‖z − z′‖ / ‖z′‖ of each party's embeddings z of the validation rows, and z′ of the validation
    before.

    Without validation rows z is the mean and the standard deviation of each embedding, over the
    first 4,096 rows or a little more of the training steps since then. ``me``: the name of the
    active party, whose own embeddings are compared, too. ``compares``: whether embeddings of the
    same rows can be compared; if not, nothing has ever moved.
    """

    def __init__(self, me: str, *, compares: bool = True) -> None:
        self._me, self._compares = me, compares
        self._before: dict[str, Tensor] = {}
        # Embeddings of the current validation.
        self._now: dict[str, list[Tensor]] = {}
        # The number of chunks seen in this validation.
        self._looked = 0
        # Statistics of the training steps.
        self._steps: dict[str, _Statistics] = {}
        self._rows = 0

    def chunks(self, validation: Iterable[Chunk]) -> Iterator[Chunk]:
        """Yields the chunks of a validation as they are, and looks at the first ones."""
        self._now, self._looked = {}, 0
        for chunk in validation:
            if self._looked < _MAX_CHUNKS:
                self._looked += 1
                for name, z in self._with_names(chunk.own, chunk.others):
                    self._now.setdefault(name, []).append(z)
            yield chunk

    def batch(self, own: Sequence[Tensor], others: Mapping[str, Tensor]) -> None:
        """Looks at the embeddings of a training step; it keeps none of them."""
        if self._rows < _MAX_CHUNKS * CHUNK_ROWS:
            for name, z in self._with_names(own, others):
                self._add(name, z)
            self._rows += max((z.shape[0] for z in (*own, *others.values())), default=0)

    def measure_drift(self) -> dict[str, float]:
        """Returns {party: how far it has moved}, of those that were there this time and the time
        before.
        """
        if not self._compares:
            return {}
        now = {
            name: torch.cat(parts)
            for name, parts in self._now.items()
            if len(parts) == self._looked
        }
        now = now or {name: statistics.stack() for name, statistics in self._steps.items()}
        drift = {}
        for name, z in now.items():
            before = self._before.get(name)
            if before is not None and before.shape == z.shape:
                # A checkpoint's is on the CPU.
                before = before.to(z.device)
                drift[name] = ((z - before).norm() / before.norm().clamp_min(1e-30)).item()
        self._before, self._now, self._steps, self._rows = now, {}, {}, 0
        return drift

    def _with_names(
        self, own: Sequence[Tensor], others: Mapping[str, Tensor | None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields (party, its embeddings without graph) of those that are there."""
        for name, z in (*((self._me, z) for z in own), *others.items()):
            if z is not None:
                yield name, z.detach()

    def _add(self, name: str, z_BD: Tensor) -> None:
        earlier, these = self._steps.get(name), _Statistics.of(z_BD)
        self._steps[name] = these if earlier is None else earlier.on(z_BD.device).with_(these)

    def state(self) -> dict[str, Any]:
        """Returns what the next drift depends on."""
        steps = {name: tuple(statistics) for name, statistics in self._steps.items()}
        return {"before": self._before, "statistics": steps, "rows": self._rows}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        self._before, self._rows = dict(tree["before"]), tree["rows"]
        self._steps = {
            name: _Statistics(*values) for name, values in tree.get("statistics", {}).items()
        }
        # A checkpoint of an earlier version holds the embeddings.
        for name, parts in tree.get("steps", {}).items():
            for z_BD in parts:
                self._add(name, z_BD)

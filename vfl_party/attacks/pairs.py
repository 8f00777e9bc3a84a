"""Pairs of an active attacker: rows' embeddings as they came last, and the columns that they were made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vfl_party.attacks.scene import Scene, UnfitError
from vfl_party.seeds import derive_seed

_SHARE, _LEAST, _MOST, _JUDGED = 0.1, 50, 2000, 5000  # of the rows; auxiliary rows; rows that are judged


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows of one sender: some whose columns the attacker knows, [K, D] and [K, F], and others that are judged.

    ``own``: what the attacker has of the same rows by itself; None if it has no columns.
    """

    sender: str
    names: tuple[str, ...]
    z_known: Tensor
    values_known: Tensor
    z_judged: Tensor
    values_judged: Tensor
    own: tuple[Tensor, Tensor] | None


def known_rows(count: int) -> int:
    """Returns of how many of ``count`` rows the attacker knows the columns."""
    return min(_MOST, max(_LEAST, int(_SHARE * count)))


def pairs(scene: Scene) -> Iterator[Pairs]:
    """Yields the pairs of each sender whose columns are known. Raises UnfitError if none sends enough rows."""
    some = False
    for sender, sent in scene.embeddings.items():
        newest: dict[int, Tensor] = {}
        for batch in sent():
            newest.update(zip(batch.rows.tolist(), batch.came.flatten(1), strict=True))
        if sender not in scene.columns or len(newest) < 2 * _LEAST:
            continue
        some = True
        rows = np.random.default_rng(derive_seed(scene.seed, "auxiliary rows", sender)).permutation([*newest])
        count = known_rows(len(rows))
        known, judged = rows[:count], rows[count : count + _JUDGED]
        columns, own = scene.columns[sender], scene.columns.get(scene.attacker)
        yield Pairs(
            sender,
            columns.names,
            torch.stack([newest[row] for row in known.tolist()]),
            columns.values[known].cpu(),
            torch.stack([newest[row] for row in judged.tolist()]),
            columns.values[judged].cpu(),
            None if own is None else (own.values[known].cpu(), own.values[judged].cpu()),
        )
    if not some:
        raise UnfitError(f"no party sends embeddings of {2 * _LEAST} rows that the phases name")

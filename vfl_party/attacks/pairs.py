"""Pairs of an active attacker: rows' embeddings as they came last in an exchange, and the columns behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vfl_party.attacks.scene import Batch, Scene, UnfitError
from vfl_party.seeds import derive_seed

_SHARE, _LEAST, _MOST, _JUDGED = 0.1, 50, 2000, 5000  # of the rows; auxiliary rows; rows that are judged


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows that one sender sent in one exchange: some whose columns the attacker knows, and others that are judged.

    ``place``: the phase and the exchange. ``z_known``, ``values_known``: [K, D] and [K, F]. ``own``: what the attacker
    has of the same rows by itself; None if it has no columns. ``groups``: see ``Columns``.
    """

    sender: str
    place: str
    names: tuple[str, ...]
    z_known: Tensor
    values_known: Tensor
    z_judged: Tensor
    values_judged: Tensor
    own: tuple[Tensor, Tensor] | None
    groups: Mapping[str, range] = field(default_factory=dict)


def known_rows(count: int) -> int:
    """Returns of how many of ``count`` rows the attacker knows the columns."""
    return min(_MOST, max(_LEAST, int(_SHARE * count)))


def pairs(scene: Scene) -> Iterator[Pairs]:
    """Yields the pairs of each sender whose columns are known, exchange by exchange.

    A defence may be on one exchange and not on another, and each is read by itself. Those of too few rows are left out.
    Raises UnfitError if none has enough.
    """
    some = False
    for sender, sent in scene.embeddings.items():
        if sender not in scene.columns:
            continue
        for place, newest in _newest(sent()).items():
            if len(newest) >= 2 * _LEAST:
                some = True
                yield _pairs(scene, sender, place, newest)
    if not some:
        raise UnfitError(f"no party sends embeddings of {2 * _LEAST} rows that the phases name")


def left_out(scene: Scene) -> list[str]:
    """Returns the exchanges that ``pairs`` leaves out, with the number of their rows."""
    found = []
    for sender, sent in scene.embeddings.items():
        if sender in scene.columns:
            sizes = {place: len(newest) for place, newest in _newest(sent()).items()}
            found += [f"{place} of {sender} ({n} rows)" for place, n in sizes.items() if n < 2 * _LEAST]
    return found


def _newest(batches: Iterator[Batch]) -> dict[str, dict[int, Tensor]]:
    """Returns {phase and exchange: {row: its last embedding}}."""
    found: dict[str, dict[int, Tensor]] = {}
    for batch in batches:
        rows = zip(batch.rows.tolist(), batch.came.flatten(1), strict=True)
        found.setdefault(batch.place, {}).update(rows)
    return found


def _pairs(scene: Scene, sender: str, place: str, newest: Mapping[int, Tensor]) -> Pairs:
    rows = np.random.default_rng(derive_seed(scene.seed, "auxiliary rows", sender)).permutation([*newest])
    count = known_rows(len(rows))
    known, judged = rows[:count], rows[count : count + _JUDGED]
    columns, own = scene.columns[sender], scene.columns.get(scene.attacker)
    return Pairs(
        sender,
        place,
        columns.names,
        torch.stack([newest[row] for row in known.tolist()]),
        columns.table(known),
        torch.stack([newest[row] for row in judged.tolist()]),
        columns.table(judged),
        None if own is None else (own.table(known), own.table(judged)),
        columns.groups,
    )

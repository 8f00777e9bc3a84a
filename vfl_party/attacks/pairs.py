"""Pairs of an active attacker: rows' embeddings as they came last in an exchange, and the columns behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from vfl_party.attacks.scene import Batch, Image, Scene, UnfitError
from vfl_party.seeds import derive_seed

_SHARE, _LEAST, _MOST, _JUDGED = 0.1, 50, 2000, 5000  # of the rows; auxiliary rows; rows that are judged


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows that one sender sent in one exchange: some whose columns the attacker knows, and others that are judged.

    ``place``: the phase and the exchange. ``z_known``, ``values_known``: [K, D] and [K, F]. ``own``: what the attacker
    has of the same rows by itself; None if it has no columns. ``groups``, ``image``: see ``Columns``.
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
    image: Image | None = None


def known_rows(count: int) -> int:
    """Returns of how many of ``count`` rows the attacker knows the columns."""
    return min(_MOST, max(_LEAST, int(_SHARE * count)))


def pairs(scene: Scene, *, images: bool | None = None) -> Iterator[Pairs]:
    """Yields the pairs of each sender whose columns are known, exchange by exchange.

    A defence may be on one exchange and not on another, and each is read by itself. Those of too few rows are left out.
    ``images``: only of senders whose columns are an image, or (False) are none.
    Raises UnfitError if there is no such sender, or no exchange has enough rows.
    """
    senders = senders_of(scene, images)
    if not senders and senders_of(scene):
        raise UnfitError("no sender's columns are an image" if images else "all columns are pixels; see images")
    some = False
    for sender in senders:
        for place, newest in _newest(scene.embeddings[sender]()).items():
            if len(newest) >= 2 * _LEAST:
                some = True
                yield _pairs(scene, sender, place, newest)
    if not some:
        raise UnfitError(f"no party sends embeddings of {2 * _LEAST} rows that the phases name")


def left_out(scene: Scene, *, images: bool | None = None) -> list[str]:
    """Returns the exchanges that ``pairs`` leaves out, with the number of their rows."""
    found = []
    for sender in senders_of(scene, images):
        sizes = {place: len(newest) for place, newest in _newest(scene.embeddings[sender]()).items()}
        found += [f"{place} of {sender} ({n} rows)" for place, n in sizes.items() if n < 2 * _LEAST]
    return found


def senders_of(scene: Scene, images: bool | None = None) -> list[str]:
    """Returns who sends embeddings of columns that are known; ``images`` as for ``pairs``."""
    known = [sender for sender in scene.embeddings if sender in scene.columns]
    return [each for each in known if images is None or (scene.columns[each].image is not None) == images]


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
        columns.image,
    )

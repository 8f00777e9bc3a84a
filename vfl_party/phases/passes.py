"""A batch whose rows different parties hold (``rows.partial``), as passes through the top model.

Each row is combined of the embeddings of those who hold it: under ``subsets`` of sets of these,
drawn for all rows of the batch that the same parties hold. Rows that are combined of as many
embeddings pass together. Under ``party_dropout``, and in a concatenation, which has no narrower
form, something stands in for the others, and all rows pass together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vfl_common.config.models import Combine
from vfl_party.base.devices import index_on
from vfl_party.base.held import group_rows
from vfl_party.base.seeds import Rows
from vfl_party.models.metrics.losses import TaskLoss
from vfl_party.phases.sets import PartySet, Sets


@dataclass(frozen=True)
class Pass:
    """Rows of a batch that pass the top model together.

    ``rows``: their places in the batch, [R]. ``embeddings``: to combine, [R, D] each. ``weight``:
    by which their mean loss counts.
    """

    rows: Tensor
    embeddings: list[Tensor]
    weight: float


@dataclass(frozen=True)
class HeldBatch:
    """A batch of B rows.

    ``own``: the active party's embeddings, [B, D], if it has any. ``others``: {passive party that
    holds some of the rows: their embeddings, [R, D]}; ``held``: their places in the batch.
    ``place``: the batch's, which no other batch of the phase has. ``widths``: {passive party: D}.
    """

    rows: int
    own: Sequence[Tensor]
    others: Mapping[str, Tensor]
    held: Mapping[str, Rows]
    place: tuple[int, ...]
    widths: Mapping[str, int]

    @property
    def like(self) -> Tensor:
        """One of the embeddings."""
        return next(iter((*self.own, *self.others.values())))


def passes(rule: Combine, sets: Sets, batch: HeldBatch) -> list[Pass]:
    """Returns the passes of a batch: the sum of their losses by their weights is the mean over its
    rows of what each row counts.
    """
    if sets.stand_ins is not None or rule == "concat":
        whole = {name: _whole(sets, batch, name) for name in batch.widths}
        drawn = sets.embeddings(sets.draw(whole, *batch.place), batch.own, whole)
        [embeddings] = drawn or [[*batch.own, *whole.values()]]
        return [Pass(index_on(torch.arange(batch.rows), batch.like.device), embeddings, 1.0)]
    parts: dict[tuple[int, int], list[Pass]] = {}
    for names, at in _groups(batch):
        rows = index_on(torch.from_numpy(at), batch.like.device)
        own = [z.index_select(0, rows) for z in batch.own]
        others = {name: _those(batch, name, at) for name in names}
        drawn_sets = sets.draw(names, *batch.place, *names) or [PartySet(names, 1.0)]
        for party_set in drawn_sets:
            embeddings = [*own, *(z for name, z in others.items() if name in party_set.there)]
            size = len(names), len(embeddings)
            parts.setdefault(size, []).append(Pass(rows, embeddings, party_set.weight))
    return [_join_passes(part, batch.rows) for part in parts.values()]


def losses_of(
    loss: TaskLoss,
    outputs: Sequence[Tensor],
    targets: Tensor,
    weights_B: Tensor | None,
    parts: Sequence[Pass] | None,
) -> list[Tensor]:
    """Returns the loss of each of ``outputs``.

    Args:
        outputs: [B, O], or of each pass.
        targets: of the batch.
        weights_B: of its rows; None: all rows count the same.
        parts: the passes; None: all outputs are of all rows.
    """
    if parts is None:
        return [loss(output, targets, weights_B) for output in outputs]
    return [
        loss(
            output,
            targets.index_select(0, part.rows),
            None if weights_B is None else weights_B.index_select(0, part.rows),
        )
        for output, part in zip(outputs, parts, strict=True)
    ]


def _groups(batch: HeldBatch) -> list[tuple[tuple[str, ...], Rows]]:
    names = [name for name in batch.widths if name in batch.others]
    masks = []
    for name in names:
        masks.append(np.zeros(batch.rows, bool))
        masks[-1][batch.held[name]] = True
    return group_rows(names, masks)


def _those(batch: HeldBatch, name: str, at: Rows) -> Tensor:
    """Returns the embeddings of a party for places in the batch, all of which it holds."""
    z_RD = batch.others[name]
    places = np.searchsorted(batch.held[name], at)
    return z_RD.index_select(0, index_on(torch.from_numpy(places), z_RD.device))


def _whole(sets: Sets, batch: HeldBatch, name: str) -> Tensor:
    """Returns a party's embeddings of all rows of a batch, [B, D]: what stands in where it does not
    hold a row.
    """
    width, like = batch.widths[name], batch.like
    absent = (
        sets.stand_ins.of(name, batch.rows)
        if sets.stand_ins is not None
        else like.new_zeros(batch.rows, width)
    )
    if name not in batch.others:
        return absent
    at = index_on(torch.from_numpy(batch.held[name]), like.device)
    return absent.index_copy(0, at, batch.others[name])


def _join_passes(parts: Sequence[Pass], rows: int) -> Pass:
    """Returns passes of equal form as one."""
    slots = zip(*(part.embeddings for part in parts), strict=True)
    at = torch.cat([part.rows for part in parts])
    return Pass(at, [torch.cat(slot) for slot in slots], parts[0].weight * len(at) / rows)

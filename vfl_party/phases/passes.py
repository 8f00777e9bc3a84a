"""Divides a batch whose rows different parties have (``rows.partial``) into passes through the top
model.

For each row, the embeddings of the parties that have the row are combined. Under ``subsets``, sets
of these parties are drawn, the same sets for all rows of the batch with the same parties. Rows with
the same number of combined embeddings pass together. Under ``party_dropout``, and in a
concatenation, which needs all widths, stand-ins replace missing embeddings, and all rows pass
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vfl_common.config.models import Combine
from vfl_party.base.devices import copy_index
from vfl_party.base.seeds import Rows, group_rows
from vfl_party.models.losses import TaskLoss
from vfl_party.phases.sets import PartySet, Sets


@dataclass(frozen=True)
class Pass:
    """Rows of a batch that pass through the top model together.

    ``rows``: The positions of the R rows in the batch, [R]. ``embeddings``: The embeddings to
    combine, [R, D] each. ``weight``: The weight of their mean loss.
    """

    rows: Tensor
    embeddings: list[Tensor]
    weight: float


@dataclass(frozen=True)
class HeldBatch:
    """A batch of B rows, each of which only some passive parties have.

    ``own``: The active party's embeddings, [B, D]; empty without features. ``others``: {passive
    party: its embeddings [R, D]} for parties that have some of the rows. ``held``: {passive party:
    the positions in the batch of its R rows}. ``place``: Numbers that identify the batch in the
    phase. ``widths``: {passive party: D}.
    """

    rows: int
    own: Sequence[Tensor]
    others: Mapping[str, Tensor]
    held: Mapping[str, Rows]
    place: tuple[int, ...]
    widths: Mapping[str, int]

    @property
    def like(self) -> Tensor:
        """An arbitrary one of the embeddings, as an example of their dtype and device."""
        return next(iter((*self.own, *self.others.values())))


def make_passes(rule: Combine, sets: Sets, batch: HeldBatch) -> list[Pass]:
    """Returns the passes of a batch. The weighted sum of the passes' losses is the mean over the
    rows of the loss of each row.
    """
    if sets.stand_ins is not None or rule == "concat":
        full = {name: _fill_absent_rows(sets, batch, name) for name in batch.widths}
        set_embeddings = sets.embeddings(sets.draw(full, *batch.place), batch.own, full)
        [embeddings] = set_embeddings or [[*batch.own, *full.values()]]
        return [Pass(copy_index(torch.arange(batch.rows), batch.like.device), embeddings, 1.0)]
    passes_by_size: dict[tuple[int, int], list[Pass]] = {}
    for names, positions in _group_by_holders(batch):
        rows = copy_index(torch.from_numpy(positions), batch.like.device)
        own = [z.index_select(0, rows) for z in batch.own]
        others = {name: _select_embeddings(batch, name, positions) for name in names}
        drawn_sets = sets.draw(names, *batch.place, *names) or [PartySet(names, 1.0)]
        for party_set in drawn_sets:
            embeddings = [*own, *(z for name, z in others.items() if name in party_set.there)]
            size = len(names), len(embeddings)
            passes_by_size.setdefault(size, []).append(Pass(rows, embeddings, party_set.weight))
    return [_join_passes(group, batch.rows) for group in passes_by_size.values()]


def compute_losses(
    loss: TaskLoss,
    outputs: Sequence[Tensor],
    targets: Tensor,
    weights_B: Tensor | None,
    parts: Sequence[Pass] | None,
) -> list[Tensor]:
    """Returns the loss for each tensor in ``outputs``.

    Args:
        outputs: The top model's outputs, [B, O], or [R, O] for a pass.
        targets: The encoded labels of the batch.
        weights_B: The weights of the batch's rows; None if all rows have the same weight.
        parts: The passes; None if all outputs are for all rows.
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


def _group_by_holders(batch: HeldBatch) -> list[tuple[tuple[str, ...], Rows]]:
    names = [name for name in batch.widths if name in batch.others]
    masks = []
    for name in names:
        masks.append(np.zeros(batch.rows, bool))
        masks[-1][batch.held[name]] = True
    return group_rows(names, masks)


def _select_embeddings(batch: HeldBatch, name: str, positions: Rows) -> Tensor:
    """Returns a party's embeddings for the rows at ``positions`` in the batch, all of which it
    has.
    """
    z_RD = batch.others[name]
    indices = np.searchsorted(batch.held[name], positions)
    return z_RD.index_select(0, copy_index(torch.from_numpy(indices), z_RD.device))


def _fill_absent_rows(sets: Sets, batch: HeldBatch, name: str) -> Tensor:
    """Returns a party's embeddings of all rows of a batch, [B, D], with stand-ins for the rows that
    it does not have.
    """
    width, like = batch.widths[name], batch.like
    absent = (
        sets.stand_ins.of(name, batch.rows)
        if sets.stand_ins is not None
        else like.new_zeros(batch.rows, width)
    )
    if name not in batch.others:
        return absent
    row_index = copy_index(torch.from_numpy(batch.held[name]), like.device)
    return absent.index_copy(0, row_index, batch.others[name])


def _join_passes(parts: Sequence[Pass], rows: int) -> Pass:
    """Joins passes with the same number of embeddings into one pass."""
    slots = zip(*(part.embeddings for part in parts), strict=True)
    rows_index = torch.cat([part.rows for part in parts])
    return Pass(
        rows_index, [torch.cat(slot) for slot in slots], parts[0].weight * len(rows_index) / rows
    )

"""Defines the rows of a party, as its phases use them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.devices import copy_index
from vfl_party.base.mechanism import Mechanism
from vfl_party.base.seeds import HeldRows, Rows
from vfl_party.data import Features, Labels
from vfl_party.data.inputs.weights import row_weights

# The columns of a table: numbers [N, F], codes of categories [N, K], and the names of all columns.
Columns = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64], tuple[str, ...]]


@dataclass(frozen=True)
class PartyData:
    """The rows of a party, prepared for phases. Row numbers are positions in the canonical order of
    the aligned ids.

    Args:
        splits: {name: row numbers}, see ``vfl_party.base.seeds.split_rows``. ``local`` may end with
            rows that only this party has. If a phase learns from such rows, ``own`` contains the
            labelled ones.
        features: The encoders' inputs; None at an active party with labels only.
        labels: The classes, or the scale of a regression; None at a passive party.
        targets: The encoded labels of all rows, at the active party in training.
        ids: The ids of the aligned rows in ``splits``, the same at all parties.
        key_N: See ``Table``.
        holdings: {passive party: {split: number of rows}} if each party has other rows
            (``rows.align = "none"``); empty otherwise.
        columns: Returns the aligned rows' cells as in the table, see ``Prepared.cells``; None
            without features.
        weights: The column of ``data.weight`` at the active party, [N], as in the table.
        label_noise: The privacy cost of the noisy labels; None without ``task.label_epsilon``.
    """

    splits: Mapping[str, Rows]
    features: Features | None = None
    labels: Labels | None = None
    targets: Tensor | None = None
    ids: Sequence[str] = ()
    key_N: npt.NDArray[np.uint8] | None = None  # noqa: N815 - the shape is part of the name
    holdings: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    held: HeldRows | None = None
    columns: Callable[[], Columns] | None = None
    weights: Tensor | None = None
    label_noise: Mechanism | None = None


class PartyRows:
    """The rows of a party in its phases, and what the party knows about the other parties' rows.

    Args:
        data: The prepared rows.
        party: The party's name in the recipe.
        recipe: The run's recipe.
        device: The device of weights.
        encode: See ``Party``.
    """

    def __init__(
        self,
        data: PartyData,
        party: str,
        recipe: Recipe,
        device: torch.device,
        encode: Callable[..., Tensor],
    ) -> None:
        self.data, self._party, self._recipe = data, party, recipe
        self._device, self._encode = device, encode

    @property
    def features(self) -> Features | None:
        """The party's features; None if it has none."""
        return self.data.features

    def need_features(self) -> Features:
        """Returns the party's features. Raises InputError if it has none."""
        if self.features is None:
            raise InputError(
                Code.DATA_INVALID,
                f"{self._party} has no features. Add a [data] table to its party file.",
            )
        return self.features

    def need_labels(self) -> tuple[Labels, Tensor]:
        """Returns the label encoder and the encoded labels of all rows. Raises InputError if the
        party has no labels.
        """
        labels, targets = self.data.labels, self.data.targets
        if labels is None or targets is None:
            raise InputError(
                Code.DATA_INVALID, f"{self._party} has no labels. Set data.label in its party file."
            )
        return labels, targets

    def embed(self, rows: Rows) -> list[Tensor]:
        """Returns a list with this party's embeddings of ``rows``, [B, D]; an empty list without
        features.
        """
        if self.features is None:
            return []
        return [self._encode(*self.features.inputs(rows))]

    def compute_weights(self, rows: Rows) -> Tensor | None:
        """Returns the weight of each row in the loss, float32 [N], with mean 1 over the training
        rows ``rows``. Returns None if all rows have the same weight.

        Raises InputError.
        """
        labels, targets = self.need_labels()
        weights = row_weights(self._recipe.task, labels, targets, self.data.weights, rows)
        return weights.to(self._device) if weights is not None else None

    def get(self, split: str) -> Rows:
        """Returns a split of this party's own rows, ascending: ``train``, ``aligned``, ``local``,
        ``validation``, ``test``, or ``all``.
        """
        return self.data.splits[split]

    @property
    def awaits_sizes(self) -> bool:
        """Whether this party does not know yet how many rows each passive party has."""
        return self._is_active and self._recipe.own_rows and not self.data.holdings

    def get_joint(self, split: str) -> Rows:
        """Returns the rows of a split, in row numbers that are common to all parties; see
        ``select_own``.
        """
        held = self.data.held
        return self.data.splits[split] if held is None else held.splits[split]

    def select_own(self, rows: Rows) -> Rows:
        """Returns the row numbers, at this party, of those ``rows`` that this party has. ``rows``:
        Row numbers that are common to all parties.
        """
        held = self.data.held
        return rows if held is None or self._is_active else held.own(self._party, rows)

    def get_sizes(self, rows: Rows) -> dict[str, dict[str, int]] | None:
        """Returns {passive party: {"rows": the number of ``rows`` that it has}} as sizes for an
        exchange, without parties that have none. Returns None if all parties have all rows.
        """
        held = self.data.held
        if held is None:
            return None
        return {name: {"rows": count} for name, count in held.counts(rows).items()}

    def take(self, values: Tensor, rows: Rows) -> Tensor:
        """Returns ``values[rows]`` on the device of ``values``."""
        return values.index_select(0, copy_index(torch.from_numpy(rows), values.device))

    @property
    def _is_active(self) -> bool:
        return self._party == self._recipe.active.name

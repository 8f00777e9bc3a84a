"""Boosted trees as a module: plain tensors, so that a checkpoint holds them without pickle."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TreeArrays:
    """Boosted trees as arrays over their M nodes. A leaf has itself for children.

    Args:
        feature: the column that a node compares, int64 [M].
        threshold: a row goes left if its number is at most that, float64 [M], finite.
        missing_left: whether a missing number goes left, bool [M].
        child: the left and the right child, int64 [M, 2].
        value: what a leaf adds to the score, float64 [M].
        gain: by how much a split lowers the loss, float64 [M]; 0 of leaves.
        roots: the root of each boosting round's tree of each output, int64 [rounds, O].
        baseline: the scores without trees, float64 [O].
    """

    feature: Places
    threshold: Doubles
    missing_left: npt.NDArray[np.bool_]
    child: Places
    value: Doubles
    gain: Doubles
    roots: Places
    baseline: Doubles

    def gains(self, columns: int) -> Doubles:
        """Returns the sum of the gains of the splits on each of ``columns`` columns, [columns]."""
        return np.bincount(self.feature, self.gain, minlength=columns).astype(np.float64)


def _nothing(outputs: int) -> TreeArrays:
    numbers, places = np.zeros(0), np.zeros(0, np.int64)
    none, pairs = np.zeros(0, bool), np.zeros((0, 2), np.int64)
    roots = np.zeros((0, outputs), np.int64)
    return TreeArrays(places, numbers, none, pairs, numbers, numbers, roots, np.zeros(outputs))


class BoostedTrees(nn.Module):
    """A top model of boosted trees, float32 [B, F] -> float32 [B, O]; without any at first.

    Numbers may be missing (NaN). Scores add up in float64, the baseline first, then one round after
    the other, as scikit-learn and LightGBM add them: so on a CPU a row has their score bit for bit,
    rounded to float32, whichever rows are scored with it.
    """

    feature: Tensor
    threshold: Tensor
    missing_left: Tensor
    child: Tensor
    value: Tensor
    gain: Tensor
    roots: Tensor
    baseline: Tensor

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self._depth = 0
        for column in fields(TreeArrays):
            self.register_buffer(column.name, torch.empty(0))
        self.take(_nothing(outputs))

    @torch.no_grad()
    def take(self, grown: TreeArrays) -> None:
        """Replaces the trees."""
        device = self.feature.device
        for column in fields(TreeArrays):
            setattr(self, column.name, torch.from_numpy(getattr(grown, column.name)).to(device))
        self._depth = self._deepest()

    def _deepest(self) -> int:
        """Returns the maximum number of comparisons on the way to a leaf."""
        child_M2, at = self.child.cpu(), self.roots.cpu().reshape(-1)
        for depth in range(len(child_M2) + 1):
            inner = at[child_M2[at, 0] != at] if len(at) else at
            if not len(inner):
                return depth
            at = child_M2[inner].reshape(-1)
        raise ValueError("the nodes of the trees form a cycle")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Takes trees of any number of nodes."""
        for column in fields(TreeArrays):
            value = state_dict.get(f"{prefix}{column.name}")
            if isinstance(value, Tensor):
                own = getattr(self, column.name)
                setattr(self, column.name, own.new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *more)
        self._depth = self._deepest()

    def forward(self, z_BF: Tensor) -> Tensor:
        rows, columns = z_BF.shape
        z_BF, is_missing_BF = z_BF.double(), torch.isnan(z_BF)
        # A missing number is below all thresholds where it goes left, and above them elsewhere.
        low_BF = torch.where(is_missing_BF, -torch.inf, z_BF)
        both_BF = torch.cat([low_BF, torch.where(is_missing_BF, torch.inf, z_BF)], dim=1)
        place_M = self.feature + columns * (~self.missing_left).long()
        next_M = self.child.reshape(-1)
        at_BT = self.roots.reshape(1, -1).expand(rows, -1)
        for _ in range(self._depth):
            is_right_BT = both_BF.gather(1, place_M[at_BT]) > self.threshold[at_BT]
            at_BT = next_M[2 * at_BT + is_right_BT.long()]
        value_BRO = self.value[at_BT].reshape(rows, *self.roots.shape)
        first_B1O = self.baseline.expand(rows, 1, -1)
        # A cumulative sum adds in order, unlike a sum.
        return torch.cat([first_B1O, value_BRO], dim=1).cumsum(dim=1)[:, -1].float()

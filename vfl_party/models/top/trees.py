"""Boosted trees as a module of tensors, so that a checkpoint can store them without pickle."""

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
    """Boosted trees as arrays over their M nodes. Both children of a leaf are the leaf itself.

    Args:
        feature: The column that each node compares, int64 [M].
        threshold: A row goes left if its value is at most this finite threshold, float64 [M].
        missing_left: Whether a missing value goes left, bool [M].
        child: The numbers of the left and the right child, int64 [M, 2].
        value: The number that each leaf adds to the score, float64 [M].
        gain: The decrease of the loss by each split, float64 [M]. Leaves have 0.
        roots: The root of the tree for each boosting round and output, int64 [rounds, O].
        baseline: The scores before the first tree, float64 [O].
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
        """Returns the total gain of the splits on each column, float64 [columns]."""
        return np.bincount(self.feature, self.gain, minlength=columns).astype(np.float64)


def _build_empty(outputs: int) -> TreeArrays:
    numbers, places = np.zeros(0), np.zeros(0, np.int64)
    flags, children = np.zeros(0, bool), np.zeros((0, 2), np.int64)
    roots = np.zeros((0, outputs), np.int64)
    return TreeArrays(places, numbers, flags, children, numbers, numbers, roots, np.zeros(outputs))


class BoostedTrees(nn.Module):
    """A top model of boosted trees, float32 [B, F] -> float32 [B, O]. It begins without trees.

    Values may be missing (NaN). Scores are summed in float64, first the baseline and then one round
    after the other, in the order of scikit-learn and LightGBM. So on a CPU the score of a row
    equals the library's score, rounded to float32, and does not depend on the other rows of the
    batch.
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
        self.take(_build_empty(outputs))

    @torch.no_grad()
    def take(self, trees: TreeArrays) -> None:
        """Replaces the trees of this module."""
        device = self.feature.device
        for column in fields(TreeArrays):
            setattr(self, column.name, torch.from_numpy(getattr(trees, column.name)).to(device))
        self._depth = self._compute_depth()

    def _compute_depth(self) -> int:
        """Returns the maximum number of comparisons on the way to a leaf."""
        child_M2, nodes = self.child.cpu(), self.roots.cpu().reshape(-1)
        for depth in range(len(child_M2) + 1):
            inner = nodes[child_M2[nodes, 0] != nodes] if len(nodes) else nodes
            if not len(inner):
                return depth
            nodes = child_M2[inner].reshape(-1)
        raise ValueError("the nodes of the trees form a cycle")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """Loads trees with any number of nodes, which changes the shapes of the buffers."""
        for column in fields(TreeArrays):
            value = state_dict.get(f"{prefix}{column.name}")
            if isinstance(value, Tensor):
                buffer = getattr(self, column.name)
                setattr(self, column.name, buffer.new_empty(value.shape))
        super()._load_from_state_dict(state_dict, prefix, *more)
        self._depth = self._compute_depth()

    def forward(self, z_BF: Tensor) -> Tensor:
        rows, columns = z_BF.shape
        z_BF, is_missing_BF = z_BF.double(), torch.isnan(z_BF)
        # A missing value becomes -inf at nodes where it goes left, and inf at the other nodes.
        low_BF = torch.where(is_missing_BF, -torch.inf, z_BF)
        values_BF = torch.cat([low_BF, torch.where(is_missing_BF, torch.inf, z_BF)], dim=1)
        place_M = self.feature + columns * (~self.missing_left).long()
        next_M = self.child.reshape(-1)
        node_BT = self.roots.reshape(1, -1).expand(rows, -1)
        for _ in range(self._depth):
            is_right_BT = values_BF.gather(1, place_M[node_BT]) > self.threshold[node_BT]
            node_BT = next_M[2 * node_BT + is_right_BT.long()]
        value_BRO = self.value[node_BT].reshape(rows, *self.roots.shape)
        baseline_B1O = self.baseline.expand(rows, 1, -1)
        # cumsum adds in order, but sum may add in any order.
        return torch.cat([baseline_B1O, value_BRO], dim=1).cumsum(dim=1)[:, -1].float()

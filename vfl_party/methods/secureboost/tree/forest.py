"""The part of the trees that one party knows: its own splits, and at the active party also the
leaves and the owners of splits.

Trees are the state of a torch module, so that checkpoints, prediction and exported models treat
them like weights.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.methods.secureboost.columns import ELSEWHERE, Codes, Column

# A node: (level, number in the level). The children of n are 2n and 2n + 1 in the next level.
Node = tuple[int, int]
# The key of the forest in ``Party.models``.
NAME = "trees"


@dataclass(frozen=True)
class TreeSplit:
    """A split on one of the party's own columns. ``left``: whether each code goes left."""

    column: int
    left: tuple[bool, ...]
    # Whether cells with any other code go left.
    default: bool

    def goes_left(self, codes_BF: Codes) -> npt.NDArray[np.bool_]:
        """Returns whether each row goes left."""
        codes_B = codes_BF[:, self.column]
        left_by_code = np.array(self.left, bool)[codes_B.clip(min=0)]
        left: npt.NDArray[np.bool_] = np.where(codes_B == ELSEWHERE, self.default, left_by_code)
        return left


@dataclass
class Tree:
    """One tree. ``splits``: this party's own splits. ``owners``, ``gains``, ``leaves``: of all
    nodes, only at the active party.
    """

    splits: dict[Node, TreeSplit] = field(default_factory=dict)
    owners: dict[Node, str] = field(default_factory=dict)
    gains: dict[Node, float] = field(default_factory=dict)
    leaves: dict[Node, float] = field(default_factory=dict)


class Forest(nn.Module):
    """All trees of one party. ``base``: the scores before the first tree, at the active party."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: list[Column] = []
        self.base: list[float] = []
        self.trees: list[Tree] = []

    def importance(self) -> dict[str, float]:
        """Returns the gain of each of this party's columns. A passive party, which does not know
        gains, gets the number of splits instead.
        """
        gains: dict[str, float] = {}
        for tree in self.trees:
            for node, split in tree.splits.items():
                name = self.columns[split.column].name
                gains[name] = gains.get(name, 0.0) + tree.gains.get(node, 1.0)
        return dict(sorted(gains.items(), key=lambda item: -item[1]))

    def get_extra_state(self) -> Tensor:
        """Returns columns and trees as bytes of JSON."""
        trees = [[_to_lists(part) for part in asdict(tree).values()] for tree in self.trees]
        text = json.dumps(
            {
                "columns": [asdict(column) for column in self.columns],
                "base": self.base,
                "trees": trees,
            }
        )
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Restores the trees that ``get_extra_state`` returned. Raises InputError if they cannot be
        read.
        """
        try:
            tree = json.loads(bytes(state.numpy()))
            self.columns = [
                Column(
                    column["name"],
                    None if column["cuts"] is None else tuple(column["cuts"]),
                    column["missing"],
                    tuple(column["categories"]),
                )
                for column in tree["columns"]
            ]
            self.base = tree["base"]
            self.trees = []
            for splits, owners, gains, leaves in tree["trees"]:
                own_splits = {
                    (a, b): TreeSplit(s["column"], tuple(s["left"]), s["default"])
                    for a, b, s in splits
                }
                node_values = (
                    {(a, b): value for a, b, value in part} for part in (owners, gains, leaves)
                )
                self.trees.append(Tree(own_splits, *node_values))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(
                Code.CHECKPOINT_INVALID,
                "the checkpoint contains trees that cannot be read. Use the checkpoint of the run "
                "that trained them.",
            ) from None


def _to_lists(part: dict[Node, Any]) -> list[list[Any]]:
    return [[*node, value] for node, value in part.items()]

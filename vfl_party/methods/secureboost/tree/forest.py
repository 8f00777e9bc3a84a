"""The trees as one party knows them: its own splits, and at the active party the leaves and the
owners of splits.

They are the state of a module, so that checkpoints, prediction and exported models treat them like
weights.
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

# (level, number in the level); the children of n are 2n and 2n + 1 in the next level.
Node = tuple[int, int]
# The key in ``Party.models``.
NAME = "trees"


@dataclass(frozen=True)
class TreeSplit:
    """A split on one of the party's own columns: the codes that go left, and where others go."""

    column: int
    left: tuple[bool, ...]
    # Whether cells with another code go left.
    default: bool

    def goes_left(self, codes_BF: Codes) -> npt.NDArray[np.bool_]:
        """Returns whether each row goes left."""
        codes_B = codes_BF[:, self.column]
        known = np.array(self.left, bool)[codes_B.clip(min=0)]
        left: npt.NDArray[np.bool_] = np.where(codes_B == ELSEWHERE, self.default, known)
        return left


@dataclass
class Tree:
    """``splits``: this party's own. ``owners``, ``gains``, ``leaves``: of all, at the active party
    alone.
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
        """Returns the gain of each own column; at a passive party, which does not know gains, its
        number of splits.
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
        """Restores what ``get_extra_state`` returned. Raises InputError if it cannot be read."""
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
                own = {
                    (a, b): TreeSplit(s["column"], tuple(s["left"]), s["default"])
                    for a, b, s in splits
                }
                others = (
                    {(a, b): value for a, b, value in part} for part in (owners, gains, leaves)
                )
                self.trees.append(Tree(own, *others))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InputError(
                Code.CHECKPOINT_INVALID,
                "the checkpoint contains trees that cannot be read. Use the checkpoint of the run "
                "that trained them.",
            ) from None


def _to_lists(part: dict[Node, Any]) -> list[list[Any]]:
    return [[*node, value] for node, value in part.items()]

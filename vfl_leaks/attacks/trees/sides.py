"""Feature reconstruction from the sides of splits, with a decoder trained on rows that the active
party knows.

At each split of a passive party, the active party learns for each row of the node whether it goes
left. These bits are decoded like embeddings (see the attack ``columns``), with the same known rows,
chance and baseline.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from vfl_leaks.attacks.embeddings import columns
from vfl_leaks.scene.pairs import count_known
from vfl_leaks.scene.scene import Attack, Figure, Intercepted, Scene, UnfitError
from vfl_leaks.scene.scores import Numbers
from vfl_leaks.scene.trees import MAX_TREES, compute_sides, yield_trees

# Minimum number of known rows on other sides than most rows, for a split that is used.
_DIFFER = 10


def play(scene: Scene) -> list[Figure]:
    """Returns R² of each column of the passive parties that own splits. Raises UnfitError if no
    passive party owns a split.
    """
    train = scene.rows["train"]
    sides_by_party: dict[str, list[Numbers]] = {}
    seen: dict[str, int] = {}
    for tree in yield_trees(scene):
        seen[tree.passive] = seen.get(tree.passive, 0) + 1
        if seen[tree.passive] <= MAX_TREES and tree.left:
            rows = len(tree.nodes[0]) if tree.nodes else len(train)
            sides_by_party.setdefault(tree.passive, []).extend(
                side_N[: len(train)] for side_N in compute_sides(tree, rows)
            )
    bits = {
        passive: sides_NS
        for passive, sides_SN in sides_by_party.items()
        if sides_SN and (sides_NS := select_splits(sides_SN)).shape[1]
    }
    if not bits:
        raise UnfitError("no passive party owns a split")
    sent = {
        passive: partial(iter, [Intercepted("trees", 0, 0, train, bits_NS)])
        for passive, bits_NS in bits.items()
    }
    return columns.decode_columns(replace(scene, embeddings=sent), "sides")


def select_splits(sides_SN: list[Numbers]) -> Tensor:
    """Returns the sides of the informative splits, [N, S].

    On average, at least ten of the known rows must be on other sides than most rows. From splits
    with fewer such rows, a decoder would only overfit. ``sides_SN``: the side of each row, 1, -1 or
    0, for each split, [N] each.
    """
    sides_NS = torch.from_numpy(np.stack(sides_SN, axis=1)).float()
    largest_S = (
        torch.stack([(sides_NS == value).float().mean(dim=0) for value in (-1.0, 0.0, 1.0)])
        .max(dim=0)
        .values
    )
    return sides_NS[:, largest_S <= 1 - _DIFFER / count_known(len(sides_NS))]


ATTACK = Attack("columns from the sides of splits", "active", play, "secureboost")

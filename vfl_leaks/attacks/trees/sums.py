"""Finds which gradient sums of a tree belong to the same column, although their order is secret.

The sums of a column are cumulative, so two of them differ by the rows of some bins. If two sums
belong to one column, their difference is a sum over rows. It is distributed over the nodes nearly
like all rows. If two sums belong to different columns, some rows cancel, and the difference
deviates more. Within a column, the order is known, because the sums of h increase.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from vfl_leaks.scene.scene import Attack, Figure, Scene, UnfitError
from vfl_leaks.scene.scores import Classes, Numbers, Tally
from vfl_leaks.scene.trees import MAX_TREES, TreeMessages, yield_trees
from vfl_party.base.seeds import derive_seed

# Number of pairs of sums that are compared for each tree.
_PAIRS = 20_000


def play(scene: Scene) -> list[Figure]:
    """Returns for each passive party the AUC with which pairs of sums of one column are
    distinguished from pairs of two columns. Raises UnfitError if there are no such sums.
    """
    random = np.random.default_rng(derive_seed(scene.seed, "pairs"))
    tallies: dict[str, Tally] = {}
    for tree in yield_trees(scene):
        tally = tallies.setdefault(tree.passive, Tally(scene.seed))
        if tree.columns is None or len(tree.columns) < 2 or len(tally.found) >= MAX_TREES:
            continue
        if not len(tree.sums[0]):
            raise UnfitError(
                'the sums are encrypted; rehearse with encryption = "none", which has equal sums'
            )
        first, second = random.integers(0, len(tree.columns), (2, _PAIRS))
        first, second = first[first != second], second[first != second]
        tally.binary(score_pairs(tree, first, second), tree.columns[first] == tree.columns[second])
    figures = []
    for passive, tally in tallies.items():
        if tally.found:
            figures.append(
                replace(
                    tally.figure("nothing", "AUC"),
                    of=f"{passive}: which sums are of one column",
                    skipped=0,
                    note="",
                )
            )
    if not figures:
        raise UnfitError("no passive party offers splits of two columns of numbers")
    return figures


def score_pairs(tree: TreeMessages, first: Classes, second: Classes) -> Numbers:
    """Returns how likely the sums of each pair belong to one column: higher is more likely.

    If they do, the difference of g and h in each node is about proportional to the node's total g
    and h. The score is minus the squared deviation. The largest sum of a node is used as its total.
    """
    score, root_h, sizes, signs = (
        np.zeros(len(first)),
        1.0,
        np.ones(len(first)),
        np.ones(len(first)),
    )
    for number, sums in enumerate(_yield_node_sums(tree)):
        node_g, node_h = sums[int(sums[:, 1].argmax())]
        if node_h <= 0:
            continue
        difference = sums[second] - sums[first]
        if number == 0:
            root_h, signs = node_h, np.where(difference[:, 1] < 0, -1.0, 1.0)
            sizes = np.maximum(np.abs(difference[:, 1]), 1e-6 * node_h)
        expected = sizes * node_h / root_h
        deviation_h = signs * difference[:, 1] - expected
        deviation_g = signs * difference[:, 0] - expected * node_g / node_h
        score -= (deviation_h**2 + deviation_g**2) / expected
    return score


def _yield_node_sums(tree: TreeMessages) -> Iterator[Numbers]:
    """Yields the sums of the numeric columns' splits, [E, 2], for each computed node, the root
    first.
    """
    assert tree.columns is not None  # noqa: S101 - the caller has checked it
    for chosen, sums in zip(tree.chosen, tree.sums, strict=True):
        for node in sums.reshape(-1, chosen.shape[1], 2):
            yield node[: len(tree.columns)].astype(np.float64)


ATTACK = Attack("which sums of a tree are of one column", "active", play, "secureboost")

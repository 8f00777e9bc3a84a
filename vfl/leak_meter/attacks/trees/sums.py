"""Finds which sums of a tree belong to the same column from the sums alone, although their order is
secret.

The sums of a column are sums over prefixes: two of them differ by the rows of some bins. If two
sums belong to one column, their difference is a sum over rows, and is distributed over the nodes
nearly like all rows. If they belong to two columns, rows of both sides cancel, and the difference
deviates further. Within a column the order needs no attack: sums of h increase with it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from vfl.leak_meter.scene.scene import Attack, Figure, Scene, UnfitError
from vfl.leak_meter.scene.scores import Classes, Numbers, Tally
from vfl.leak_meter.scene.trees import MAX_TREES, TreeMessages, trees_of
from vfl_party.base.seeds import derive_seed

# Number of pairs of sums of a tree.
_PAIRS = 20_000


def play(scene: Scene) -> list[Figure]:
    """Returns for each passive party the AUC of pairs of sums: of one column, or of two. Raises
    UnfitError.
    """
    random = np.random.default_rng(derive_seed(scene.seed, "pairs"))
    tallies: dict[str, Tally] = {}
    for tree in trees_of(scene):
        tally = tallies.setdefault(tree.passive, Tally(scene.seed))
        if tree.columns is None or len(tree.columns) < 2 or len(tally.found) >= MAX_TREES:
            continue
        if not len(tree.sums[0]):
            raise UnfitError(
                'the sums are encrypted; rehearse with encryption = "none", which has equal sums'
            )
        first, second = random.integers(0, len(tree.columns), (2, _PAIRS))
        first, second = first[first != second], second[first != second]
        tally.binary(likeness(tree, first, second), tree.columns[first] == tree.columns[second])
    figures = []
    for passive, tally in tallies.items():
        if tally.found:
            of = tally.figure("nothing", "AUC")
            title = f"{passive}: which sums are of one column"
            batches = of.batches
            figures.append(
                Figure(
                    title,
                    "nothing",
                    "AUC",
                    of.value,
                    of.high,
                    of.chance,
                    of.chance_high,
                    {},
                    batches,
                )
            )
    if not figures:
        raise UnfitError("no passive party offers splits of two columns of numbers")
    return figures


def likeness(tree: TreeMessages, first: Classes, second: Classes) -> Numbers:
    """Returns how well each pair of sums fits one column: higher is better.

    It is minus the squared distance of a pair's difference in each node from what it is on average:
    g and h in proportion to those of the node, of which the entry with the most rows is taken.
    """
    score, root_h, sizes, signs = (
        np.zeros(len(first)),
        1.0,
        np.ones(len(first)),
        np.ones(len(first)),
    )
    for number, sums in enumerate(_nodes(tree)):
        node_g, node_h = sums[int(sums[:, 1].argmax())]
        if node_h <= 0:
            continue
        between = sums[second] - sums[first]
        if number == 0:
            root_h, signs = node_h, np.where(between[:, 1] < 0, -1.0, 1.0)
            sizes = np.maximum(np.abs(between[:, 1]), 1e-6 * node_h)
        wanted = sizes * node_h / root_h
        away_h = signs * between[:, 1] - wanted
        away_g = signs * between[:, 0] - wanted * node_g / node_h
        score -= (away_h**2 + away_g**2) / wanted
    return score


def _nodes(tree: TreeMessages) -> Iterator[Numbers]:
    """Yields the sums [E, 2] of the numbers' entries of each node that was computed, the root
    first.
    """
    assert tree.columns is not None  # noqa: S101 - the caller has looked
    for chosen, sums in zip(tree.chosen, tree.sums, strict=True):
        for node in sums.reshape(-1, chosen.shape[1], 2):
            yield node[: len(tree.columns)].astype(np.float64)


ATTACK = Attack("which sums of a tree are of one column", "active", play, "secureboost")

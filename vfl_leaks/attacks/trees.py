"""Attacks on the messages of two parties for each tree: gradient sums, chosen splits, sides and
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_leaks.attacks import columns
from vfl_leaks.pairs import count_known
from vfl_leaks.scene import Attack, Figure, Heard, Intercepted, Scene, UnfitError
from vfl_leaks.scores import Classes, Numbers, Tally, best_accuracy, fold_auc
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.statistics import auc

# Node number of a row that is already in a leaf.
SETTLED = 255
# Size in bytes of a sum that is not encrypted: g and h, int64.
PAIR_BYTES = 16
# Number of trees that attacks use: the first ones, which reveal most.
MAX_TREES = 50

Nodes = npt.NDArray[np.uint8]


@dataclass
class TreeMessages:
    """One tree between the active party and ``passive``, level by level.

    ``sums``: the gradient sums of E candidate splits for each node, int64 [nodes * E, 2]; empty if
    they are encrypted. ``chosen``: a flag for each chosen split, [nodes, E]. ``left``: for the rows
    of the nodes that the passive party splits, packed bits of whether a row goes left. ``nodes``:
    the node of each row on the next level; the last level has none. ``columns``: the column of each
    candidate split, for a judge.
    """

    passive: str
    sums: list[npt.NDArray[np.int64]] = field(default_factory=list)
    chosen: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    left: list[Nodes] = field(default_factory=list)
    nodes: list[Nodes] = field(default_factory=list)
    columns: Classes | None = None
    ended: bool = False

    def add(self, message: Heard) -> None:
        """Adds one message."""
        up, values = message.sender == self.passive, message.tensor.numpy()
        if message.exchange == "sums" and up:
            self.sums.append(_decode_sums(message.tensor))
            if self.columns is None and message.behind is not None:
                self.columns = message.behind.numpy()
        elif message.exchange == "sums":
            self.chosen.append(values.astype(bool))
        elif up:
            self.left.append(values)
        else:
            self.nodes.append(values) if len(values) else None
            self.ended = not len(values) or bool((values == SETTLED).all())

    def before(self, level: int, rows: int) -> Nodes:
        """Returns the node of each row at a level: all are in node 0 of level 0."""
        return self.nodes[level - 1] if level else np.zeros(rows, np.uint8)


def yield_trees(scene: Scene) -> Iterator[TreeMessages]:
    """Yields the trees in the order in which they grew. Raises UnfitError if there are none."""
    unfinished: dict[str, TreeMessages] = {}
    yielded = False
    for message in scene.heard():
        if message.exchange not in ("sums", "partition"):
            continue
        passive = scene.attacker if scene.role == "passive" else _get_peer(message, scene.attacker)
        tree = unfinished.setdefault(passive, TreeMessages(passive))
        tree.add(message)
        if tree.ended:
            yielded = True
            yield unfinished.pop(passive)
    if not yielded:
        raise UnfitError("the parties grow no trees together")


def number_nodes(tree: TreeMessages) -> Classes:
    """Returns a number of the last known node of each row, [N]. All nodes of a tree have different
    numbers.
    """
    places_N = np.ones(len(tree.nodes[0]), np.int64)
    for level, nodes_N in enumerate(tree.nodes, 1):
        inside = nodes_N != SETTLED
        places_N[inside] = (1 << level) + nodes_N[inside].astype(np.int64)
    return places_N


def compute_sides(tree: TreeMessages, rows: int) -> list[Numbers]:
    """Returns the sides of all rows, [N], for each split of the passive party: 1 for left, -1 for
    right, 0 if the row is not in the split node.
    """
    all_sides = []
    for level, (chosen, left) in enumerate(zip(tree.chosen, tree.left, strict=True)):
        nodes_N = tree.before(level, rows)
        present = [node for node in np.unique(nodes_N).tolist() if node != SETTLED]
        split_nodes = [node for node, flags in zip(present, chosen, strict=True) if flags.any()]
        rows_of_nodes = [np.flatnonzero(nodes_N == node) for node in split_nodes]
        bits = np.unpackbits(left, count=sum(map(len, rows_of_nodes))).astype(bool)
        for node_rows in rows_of_nodes:
            goes_left, bits = bits[: len(node_rows)], bits[len(node_rows) :]
            side_N = np.zeros(rows)
            side_N[node_rows] = np.where(goes_left, 1.0, -1.0)
            all_sides.append(side_N)
    return all_sides


def _get_peer(message: Heard, attacker: str) -> str:
    return message.sender if message.receiver == attacker else message.receiver


def _decode_sums(sums: Tensor) -> npt.NDArray[np.int64]:
    wire = np.ascontiguousarray(sums.numpy())
    if wire.ndim != 2 or wire.shape[1] != PAIR_BYTES:
        return np.empty((0, 2), np.int64)
    return wire.view("<i8").astype(np.int64).reshape(len(wire), 2)


# Minimum number of known rows on other sides than most rows, for a split that is used.
_DIFFER = 10


# Feature reconstruction from the sides of splits, with a decoder trained on rows that the active
# party knows.
#
# At each split of a passive party, the active party learns for each row of the node whether it goes
# left. These bits are decoded like embeddings (see the attack ``columns``), with the same known
# rows, chance and baseline.
def play_sides(scene: Scene) -> list[Figure]:
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


SIDES = Attack("columns from the sides of splits", "active", play_sides, "secureboost")


# Number of labels that an attacker knows.
KNOWN = 80


# Maximum number of rows for the attacks that combine many trees.
_MAX_ROWS = 5000


# Label inference from the tree nodes of rows, which a passive party learns level by level.
#
# There are three attackers. The first is an oracle that knows the share of each class in a tree's
# nodes; it gives the maximum leak of one tree. The second knows nothing, and finds the main
# direction or clusters in the nodes of many trees. The third knows the labels of 80 rows and trains
# a head. Its baseline is the same head on its own columns.
def play_nodes(scene: Scene) -> list[Figure]:
    """Returns the figures of one tree, of many trees without labels, and of many trees with some
    labels. Raises UnfitError if the trees reveal no nodes.
    """
    trees = list[Classes]()
    for tree in yield_trees(scene):
        if tree.nodes and len(trees) < MAX_TREES:
            trees.append(number_nodes(tree))
    if not trees:
        raise UnfitError("trees of one level reveal no nodes")
    train = scene.rows["train"]
    # Validation rows come after those of training.
    places_NT = np.stack(trees, axis=1)[: len(train)]
    labels_N = scene.labels[train].numpy()
    sample = np.random.default_rng(derive_seed(scene.seed, "rows")).permutation(len(labels_N))[
        :_MAX_ROWS
    ]
    figures = [
        _play_oracle(scene, places_NT, labels_N),
        *_play_without_labels(scene, places_NT[sample], labels_N[sample], train[sample]),
    ]
    return [*figures, *_play_with_labels(scene, places_NT[sample], labels_N[sample], train[sample])]


def _play_oracle(scene: Scene, places_NT: Classes, labels_N: Classes) -> Figure:
    """Returns the figure of an attacker that knows the labels in each node of a tree."""
    random, tally = (
        np.random.default_rng(derive_seed(scene.seed, "shuffled labels")),
        Tally(scene.seed),
    )
    for places_N in places_NT.T:
        for into, y_N in ((tally.found, labels_N), (tally.chance, random.permutation(labels_N))):
            into.append(_score_nodes(places_N, y_N, scene.classes))
    return tally.figure("each node's labels (an oracle), one tree", _get_unit(scene))


def _score_nodes(places_N: Classes, labels_N: Classes, classes: int) -> float:
    """Returns the AUC of the share of positives in each row's node, or, for several classes, the
    accuracy of the most frequent class in the node.
    """
    _, node_N = np.unique(places_N, return_inverse=True)
    counts = np.zeros((int(node_N.max()) + 1, classes))
    np.add.at(counts, (node_N, labels_N), 1)
    if classes == 2:
        return auc((counts[:, 1] / counts.sum(axis=1))[node_N], labels_N == 1)
    return float(counts.max(axis=1).sum() / len(labels_N))


def _play_without_labels(
    scene: Scene, places_NT: Classes, labels_N: Classes, rows: Rows
) -> list[Figure]:
    """Returns the figure of an attacker without labels that combines the nodes of all trees."""
    x_ND, own_NF = encode_nodes(places_NT), _get_own_columns(scene, rows)
    guess_N = _cluster(scene, x_ND)
    if guess_N is None:
        return []
    own_guess_N = None if own_NF is None else _cluster(scene, own_NF)
    baselines = {} if own_guess_N is None else {"own columns": _score(scene, own_guess_N, labels_N)}
    return [_judge(scene, f"nothing, {places_NT.shape[1]} trees", guess_N, labels_N, baselines)]


def _cluster(scene: Scene, x_ND: Numbers) -> Numbers | None:
    """Returns the position of each row along the first principal component for two classes, or its
    cluster for more classes.

    Returns None if there are fewer different rows than classes.
    """
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    seed = derive_seed(scene.seed, "nodes") % 2**32
    if len(np.unique(x_ND, axis=0)) < scene.classes:
        return None
    if scene.classes == 2:
        along: Numbers = PCA(1, svd_solver="randomized", random_state=seed).fit_transform(x_ND)[
            :, 0
        ]
        # Rounding gives equal rows equal scores.
        return along.round(9)
    groups: Numbers = (
        KMeans(scene.classes, n_init=4, random_state=seed).fit_predict(x_ND).astype(np.float64)
    )
    return groups


def _play_with_labels(
    scene: Scene, places_NT: Classes, labels_N: Classes, rows: Rows
) -> list[Figure]:
    """Returns the figure of an attacker that trains a head on the nodes of rows with known
    labels.
    """
    is_known, own_NF = np.arange(len(rows)) < KNOWN, _get_own_columns(scene, rows)
    judged_N = labels_N[~is_known]
    if len(np.unique(labels_N[is_known])) < 2 or len(np.unique(judged_N)) < 2:
        return []
    baselines = {}
    if own_NF is not None:
        own_guess_N = _train_head(own_NF, labels_N, is_known, scene.classes)
        baselines["own columns"] = _score(scene, own_guess_N, judged_N, named=True)
    guess_N = _train_head(encode_nodes(places_NT), labels_N, is_known, scene.classes)
    knows = f"{KNOWN} labels, {places_NT.shape[1]} trees"
    return [_judge(scene, knows, guess_N, judged_N, baselines, named=True)]


def _train_head(
    x_ND: Numbers, labels_N: Classes, is_known: npt.NDArray[np.bool_], classes: int
) -> Numbers:
    """Trains a head on the known rows, and returns its outputs for the other rows: the score of the
    second class, or the most likely of several classes.
    """
    from sklearn.linear_model import LogisticRegression

    mean, scale = x_ND[is_known].mean(axis=0), x_ND[is_known].std(axis=0)
    x_ND = (x_ND - mean) / np.where(scale > 0, scale, 1.0)
    head = LogisticRegression(C=0.1, max_iter=2000).fit(x_ND[is_known], labels_N[is_known])
    scores: Numbers = (
        head.decision_function(x_ND[~is_known]) if classes == 2 else head.predict(x_ND[~is_known])
    )
    return scores


def _score(scene: Scene, guess_N: Numbers, labels_N: Classes, *, named: bool = False) -> float:
    """Returns the AUC of scores for two classes, otherwise the accuracy of guessed classes.

    ``named``: whether the guesses are classes. Otherwise they are groups, which are assigned to
    classes in the best way.
    """
    if scene.classes == 2:
        return fold_auc(auc(guess_N, labels_N == 1))
    if named:
        return float((guess_N == labels_N).mean())
    return best_accuracy(guess_N.astype(np.int64), labels_N, scene.classes)


def _judge(
    scene: Scene,
    knows: str,
    guess_N: Numbers,
    labels_N: Classes,
    baselines: Mapping[str, float],
    *,
    named: bool = False,
) -> Figure:
    """Returns the figure of guesses for all rows. Chance is the value of the same guesses for
    shuffled labels.
    """
    shuffled_N = np.random.default_rng(derive_seed(scene.seed, "shuffled labels")).permutation(
        labels_N
    )
    value, chance = (_score(scene, guess_N, y_N, named=named) for y_N in (labels_N, shuffled_N))
    return Figure(
        "labels", knows, _get_unit(scene), value, chance=chance, baselines=baselines, batches=1
    )


def _get_own_columns(scene: Scene, rows: Rows) -> Numbers | None:
    """Returns the attacker's own columns of rows; None if it has no columns."""
    own = scene.columns.get(scene.attacker)
    return None if own is None else own.table(rows).double().numpy()


def _get_unit(scene: Scene) -> str:
    return "AUC" if scene.classes == 2 else "accuracy"


def encode_nodes(places_NT: Classes) -> Numbers:
    """Returns a one-hot column for each node of each tree, [N, nodes]."""
    parts = [places_N[:, None] == np.unique(places_N)[None, :] for places_N in places_NT.T]
    return np.concatenate(parts, axis=1).astype(np.float64)


NODES = Attack(
    "labels from the nodes of trees in which rows stand", "passive", play_nodes, "secureboost"
)


# Number of pairs of sums that are compared for each tree.
_PAIRS = 20_000


# The sums of a column are cumulative, so two of them differ by the rows of some bins. If two sums
# belong to one column, their difference is a sum over rows. It is distributed over the nodes nearly
# like all rows. If two sums belong to different columns, some rows cancel, and the difference
# deviates more. Within a column, the order is known, because the sums of h increase.
def play_sums(scene: Scene) -> list[Figure]:
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


SUMS = Attack("which sums of a tree are of one column", "active", play_sums, "secureboost")

"""Label inference from the tree nodes of rows, which a passive party learns level by level.

There are three attackers. The first is an oracle that knows the share of each class in a tree's
nodes; it gives the maximum leak of one tree. The second knows nothing, and finds the main direction
or clusters in the nodes of many trees. The third knows the labels of 80 rows and trains a head. Its
baseline is the same head on its own columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vfl_leaks.scene.scene import Attack, Figure, Scene, UnfitError
from vfl_leaks.scene.scores import Classes, Numbers, Tally, best_accuracy, fold_auc
from vfl_leaks.scene.trees import MAX_TREES, number_nodes, yield_trees
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.statistics import auc

# Number of labels that an attacker knows.
KNOWN = 80
# Maximum number of rows for the attacks that combine many trees.
_MAX_ROWS = 5000


def play(scene: Scene) -> list[Figure]:
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


ATTACK = Attack(
    "labels from the nodes of trees in which rows stand", "passive", play, "secureboost"
)

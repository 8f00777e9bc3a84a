"""Label inference from the tree nodes of rows, which a passive party learns level by level.

There are three attackers: one that knows the share of each class in a tree's nodes (an oracle: the
most that one partition reveals), one that knows nothing and finds the main direction or clusters of
the nodes of many trees, and one that knows the labels of 80 rows. The baseline of the last one is
the same head on its own columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vfl.leak_meter.scene.scene import Attack, Figure, Scene, UnfitError
from vfl.leak_meter.scene.scores import Classes, Numbers, Tally, best_accuracy, fold_auc
from vfl.leak_meter.scene.trees import MAX_TREES, places, trees_of
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.statistics import auc

# Number of labels that an attacker knows.
KNOWN = 80
# Maximum number of rows for which many trees are combined.
_MAX_ROWS = 5000


def play(scene: Scene) -> list[Figure]:
    """Returns the figures of one tree, of many without labels, and of many with some labels. Raises
    UnfitError.
    """
    trees = list[Classes]()
    for tree in trees_of(scene):
        if tree.nodes and len(trees) < MAX_TREES:
            trees.append(places(tree))
    if not trees:
        raise UnfitError("trees of one level reveal no nodes")
    train = scene.rows["train"]
    # Validation rows come after those of training.
    places_NT = np.stack(trees, axis=1)[: len(train)]
    labels_N = scene.labels[train].numpy()
    few = np.random.default_rng(derive_seed(scene.seed, "rows")).permutation(len(labels_N))[
        :_MAX_ROWS
    ]
    figures = [
        _oracle(scene, places_NT, labels_N),
        *_blind(scene, places_NT[few], labels_N[few], train[few]),
    ]
    return [*figures, *_play_with_labels(scene, places_NT[few], labels_N[few], train[few])]


def _oracle(scene: Scene, places_NT: Classes, labels_N: Classes) -> Figure:
    """Names the nodes of each tree by the labels in them."""
    random, tally = (
        np.random.default_rng(derive_seed(scene.seed, "shuffled labels")),
        Tally(scene.seed),
    )
    for places_N in places_NT.T:
        for into, y_N in ((tally.found, labels_N), (tally.chance, random.permutation(labels_N))):
            into.append(_name_nodes(places_N, y_N, scene.classes))
    return tally.figure("each node's labels (an oracle), one tree", _unit(scene))


def _name_nodes(places_N: Classes, labels_N: Classes, classes: int) -> float:
    """Returns AUC of the share of positives in each row's node, or the accuracy of its most
    frequent class.
    """
    _, at_N = np.unique(places_N, return_inverse=True)
    counts = np.zeros((int(at_N.max()) + 1, classes))
    np.add.at(counts, (at_N, labels_N), 1)
    if classes == 2:
        return auc((counts[:, 1] / counts.sum(axis=1))[at_N], labels_N == 1)
    return float(counts.max(axis=1).sum() / len(labels_N))


def _blind(scene: Scene, places_NT: Classes, labels_N: Classes, rows: Rows) -> list[Figure]:
    """Looks for what the nodes of all trees have in common, without a label."""
    x_ND, own_NF = one_hot(places_NT), _own(scene, rows)
    guess_N = _groups(scene, x_ND)
    if guess_N is None:
        return []
    alone_N = None if own_NF is None else _groups(scene, own_NF)
    baselines = {} if alone_N is None else {"own columns": _value(scene, alone_N, labels_N)}
    return [_judge(scene, f"nothing, {places_NT.shape[1]} trees", guess_N, labels_N, baselines)]


def _groups(scene: Scene, x_ND: Numbers) -> Numbers | None:
    """Returns the rows' place along the direction that says most of them, or with many classes
    their groups.

    None if fewer rows differ than there are classes.
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
        # Rounded, so that equal rows get equal scores.
        return along.round(9)
    groups: Numbers = (
        KMeans(scene.classes, n_init=4, random_state=seed).fit_predict(x_ND).astype(np.float64)
    )
    return groups


def _play_with_labels(
    scene: Scene, places_NT: Classes, labels_N: Classes, rows: Rows
) -> list[Figure]:
    """Trains a head on the nodes of rows whose labels are known."""
    known, own_NF = np.arange(len(rows)) < KNOWN, _own(scene, rows)
    judged_N = labels_N[~known]
    if len(np.unique(labels_N[known])) < 2 or len(np.unique(judged_N)) < 2:
        return []
    baselines = {}
    if own_NF is not None:
        alone_N = _head(own_NF, labels_N, known, scene.classes)
        baselines["own columns"] = _value(scene, alone_N, judged_N, named=True)
    guess_N = _head(one_hot(places_NT), labels_N, known, scene.classes)
    knows = f"{KNOWN} labels, {places_NT.shape[1]} trees"
    return [_judge(scene, knows, guess_N, judged_N, baselines, named=True)]


def _head(x_ND: Numbers, labels_N: Classes, known: npt.NDArray[np.bool_], classes: int) -> Numbers:
    """Returns the scores of the rows that are judged: of the second class, or the most likely
    class.
    """
    from sklearn.linear_model import LogisticRegression

    mean, scale = x_ND[known].mean(axis=0), x_ND[known].std(axis=0)
    x_ND = (x_ND - mean) / np.where(scale > 0, scale, 1.0)
    head = LogisticRegression(C=0.1, max_iter=2000).fit(x_ND[known], labels_N[known])
    scores: Numbers = (
        head.decision_function(x_ND[~known]) if classes == 2 else head.predict(x_ND[~known])
    )
    return scores


def _value(scene: Scene, guess_N: Numbers, labels_N: Classes, *, named: bool = False) -> float:
    """Returns the AUC of scores, or the accuracy of classes, or of groups that are ``named`` as
    well as they can be.
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
    """Returns the figure of one guess about all rows, with the same guess about shuffled
    labels.
    """
    shuffled_N = np.random.default_rng(derive_seed(scene.seed, "shuffled labels")).permutation(
        labels_N
    )
    value, chance = (_value(scene, guess_N, y_N, named=named) for y_N in (labels_N, shuffled_N))
    return Figure(
        "labels", knows, _unit(scene), value, chance=chance, baselines=baselines, batches=1
    )


def _own(scene: Scene, rows: Rows) -> Numbers | None:
    """Returns what the attacker has of the rows by itself; None if it has no columns."""
    own = scene.columns.get(scene.attacker)
    return None if own is None else own.table(rows).double().numpy()


def _unit(scene: Scene) -> str:
    return "AUC" if scene.classes == 2 else "accuracy"


def one_hot(places_NT: Classes) -> Numbers:
    """Returns a column of zeros and ones for each node of each tree."""
    parts = [places_N[:, None] == np.unique(places_N)[None, :] for places_N in places_NT.T]
    return np.concatenate(parts, axis=1).astype(np.float64)


ATTACK = Attack(
    "labels from the nodes of trees in which rows stand", "passive", play, "secureboost"
)

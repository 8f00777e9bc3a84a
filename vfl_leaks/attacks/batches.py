"""Label inference by a passive party from the gradients of one batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vfl_leaks.scene import Attack, Figure, Intercepted, Scene, UnfitError
from vfl_leaks.scores import Tally
from vfl_party.base.seeds import derive_seed


# unit vectors, their main direction, and the direction of known rows.
def normalize_rows(g: Tensor) -> Tensor:
    """Returns the flattened rows of gradients [B, ...], scaled to length one, float64 [B, D]. A row
    of zeros stays zero.
    """
    return functional.normalize(g.double().flatten(1), dim=1)


def common_direction(g_BD: Tensor) -> Tensor:
    """Returns the main direction of rows [B, D]: their first singular vector, [D], up to its
    sign.
    """
    direction: Tensor = torch.linalg.svd(g_BD, full_matrices=False).Vh[0]
    return direction


def mean_direction(unit_KD: Tensor) -> Tensor:
    """Returns the direction of the mean of rows [K, D], [D]."""
    return functional.normalize(unit_KD.sum(dim=0), dim=0)


# Label inference from the length of a row's gradient, which is longer for a rare class (Li et al.
# 2022, Marvell).
def play_norm(scene: Scene) -> list[Figure]:
    """Scores each row of a batch by ‖g‖. Raises UnfitError if the task is not binary."""
    if scene.classes != 2:
        raise UnfitError(
            "lengths distinguish only two classes, but the task has more; see clusters"
        )
    tally = Tally(scene.seed)
    for batch in scene.gradients():
        y_B = scene.labels[batch.rows].numpy() == 1
        tally.binary(batch.came.double().flatten(1).norm(dim=1).numpy(), y_B)
    return [tally.figure("nothing", "AUC")]


NORM = Attack("labels from the length of each row's gradient", "passive", play_norm, "gradients")


# Label inference as the index of the negative logit gradient (Fu et al., USENIX Security 2022).
def play_direct(scene: Scene) -> list[Figure]:
    """Guesses that the class of a row is the index of the lowest element of its gradient.

    This is exact if the top model sums the embeddings as logits. Raises UnfitError unless a
    gradient is as wide as the top model's output.
    """
    classes, tally = scene.classes, Tally(scene.seed)
    for batch in scene.gradients():
        g_BD, y_B = batch.came.double().flatten(1), scene.labels[batch.rows].numpy()
        if g_BD.shape[1] != scene.task.outputs:
            raise UnfitError(
                f"embeddings must be logits, as wide as the output ({scene.task.outputs}), but "
                f"have {g_BD.shape[1]} numbers"
            )
        if classes == 2:
            tally.binary(-g_BD[:, 0].numpy(), y_B == 1)
        else:
            tally.named(g_BD.argmin(dim=1).numpy(), y_B)
    return [tally.figure("nothing", "AUC" if classes == 2 else "accuracy")]


DIRECT = Attack(
    "labels as the negative element of each row's gradient", "passive", play_direct, "gradients"
)


# Numbers of known positives in each batch. With many classes, of known rows of each class.
_KNOWN = (1, 3, 5)


# Label inference from the direction of a row's gradient, compared with rows of known labels (Li et
# al. 2022, Marvell).
def play_cosine(scene: Scene) -> list[Figure]:
    """Scores each row of a batch by the cosine of its gradient with the gradients of known
    positives.

    The attacker knows 1, 3 or 5 positives. An oracle knows the gradient of one positive without its
    noise; it is left out if no defence changes the gradients. Known rows are not judged. With many
    classes, a row gets the class whose known rows have the largest cosine. Raises UnfitError if no
    batch has enough rows of a class.
    """
    classes = scene.classes
    figures = []
    oracles = [(1, True)] if any(_is_changed(batch) for batch in scene.gradients()) else []
    for count, oracle in (*oracles, *((count, False) for count in _KNOWN)):
        tally, random = (
            Tally(scene.seed),
            np.random.default_rng(derive_seed(scene.seed, "known", count)),
        )
        for batch in scene.gradients():
            _judge(tally, batch, scene.labels[batch.rows], classes, count, oracle, random)
        singular = "positive" if classes == 2 else "row of each class"
        plural = "positives" if classes == 2 else "rows of each class"
        knows = f"{count} {singular if count == 1 else plural}"
        if oracle:
            knows = f"1 {singular} without its noise"
        try:
            figures.append(tally.figure(knows, "AUC" if classes == 2 else "accuracy"))
        except UnfitError:
            if count == _KNOWN[0]:
                raise
    return figures


def _is_changed(batch: Intercepted) -> bool:
    return batch.meant is not None and not torch.equal(batch.meant, batch.came)


def _judge(
    tally: Tally,
    batch: Intercepted,
    y_B: Tensor,
    classes: int,
    count: int,
    oracle: bool,
    random: np.random.Generator,
) -> None:
    known_gradients = batch.meant if oracle else batch.came
    target_classes = [1] if classes == 2 else range(classes)
    of_class = {c: np.flatnonzero(y_B.numpy() == c) for c in target_classes}
    enough = {c: rows for c, rows in of_class.items() if len(rows) > count}
    if known_gradients is None or not enough or (classes == 2 and len(enough) < 1):
        tally.skipped += 1
        return
    known = {c: random.choice(rows, count, replace=False) for c, rows in enough.items()}
    directions = [
        mean_direction(normalize_rows(known_gradients[torch.from_numpy(rows)]))
        for rows in known.values()
    ]
    cosines_BC = (normalize_rows(batch.came) @ torch.stack(directions).T).numpy()
    judged = np.setdiff1d(np.arange(len(y_B)), np.concatenate([*known.values()]))
    y = y_B.numpy()[judged]
    if classes == 2:
        tally.binary(cosines_BC[judged, 0], y == 1)
        return
    class_of_column = np.array([*known], np.int64)
    is_judged = np.isin(y, class_of_column)
    tally.named(class_of_column[cosines_BC[judged][is_judged].argmax(axis=1)], y[is_judged])


COSINE = Attack(
    "labels from the direction of each row's gradient", "passive", play_cosine, "gradients"
)


# Maximum number of batches that are clustered, spread over the run.
_MAX_BATCHES = 200


# Label inference from the similarity of gradients in a batch, without any known label (arXiv
# 2203.05222).
#
# With two classes, a row's score is its position along the main direction of the batch's gradients
# (the first singular vector of the rows scaled to length one). With many classes, the rows are
# clustered by k-means, and the clusters are assigned to classes in the best way.
def play_clusters(scene: Scene) -> list[Figure]:
    """Groups each batch's rows by the direction of their gradients."""
    from sklearn.cluster import KMeans

    classes, tally, seen = scene.classes, Tally(scene.seed), 0
    total = sum(1 for _ in scene.gradients())
    every = max(1, total // _MAX_BATCHES)
    groups = Tally(scene.seed)
    for batch in scene.gradients():
        seen += 1
        if (seen - 1) % every:
            continue
        y_B = scene.labels[batch.rows].numpy()
        unit_BD = normalize_rows(batch.came)
        if classes == 2:
            tally.binary((unit_BD @ common_direction(unit_BD)).numpy(), y_B == 1)
        if len(y_B) > classes and len(np.unique(unit_BD.numpy(), axis=0)) >= classes:
            kmeans = KMeans(
                classes, n_init=4, random_state=derive_seed(scene.seed, "clusters") % 2**32
            )
            groups.groups(kmeans.fit_predict(unit_BD.numpy()).astype(np.int64), y_B, classes)
        else:
            groups.skipped += 1
    figures = [tally.figure("nothing, by direction", "AUC")] if classes == 2 else []
    return [*figures, groups.figure(f"nothing, by {classes}-means", "accuracy")]


CLUSTERS = Attack(
    "labels from likeness among the gradients of a batch", "passive", play_clusters, "gradients"
)

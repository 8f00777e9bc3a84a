"""Label inference from the similarity of gradients in a batch, without any known label (arXiv
2203.05222).

With two classes, a row's score is its position along the main direction of the batch's gradients
(the first singular vector of the rows scaled to length one). With many classes, the rows are
clustered by k-means, and the clusters are assigned to classes in the best way.
"""

from __future__ import annotations

import numpy as np

from vfl_leaks.learn.directions import common_direction, normalize_rows
from vfl_leaks.scene.scene import Attack, Figure, Scene
from vfl_leaks.scene.scores import Tally
from vfl_party.base.seeds import derive_seed

# Maximum number of batches that are clustered, spread over the run.
_MAX_BATCHES = 200


def play(scene: Scene) -> list[Figure]:
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


ATTACK = Attack("labels from likeness among the gradients of a batch", "passive", play, "gradients")

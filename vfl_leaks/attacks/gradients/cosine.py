"""Label inference from the direction of a row's gradient, compared with rows of known labels (Li et
al. 2022, Marvell).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vfl_leaks.learn.directions import mean_direction, normalize_rows
from vfl_leaks.scene.scene import Attack, Figure, Intercepted, Scene, UnfitError
from vfl_leaks.scene.scores import Tally
from vfl_party.base.seeds import derive_seed

# Numbers of known positives in each batch. With many classes, of known rows of each class.
_KNOWN = (1, 3, 5)


def play(scene: Scene) -> list[Figure]:
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


ATTACK = Attack("labels from the direction of each row's gradient", "passive", play, "gradients")

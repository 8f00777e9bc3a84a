"""Label inference from the length of a row's gradient, which is longer for a rare class (Li et al.
2022, Marvell).
"""

from __future__ import annotations

from vfl_leaks.scene.scene import Attack, Figure, Scene, UnfitError
from vfl_leaks.scene.scores import Tally


def play(scene: Scene) -> list[Figure]:
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


ATTACK = Attack("labels from the length of each row's gradient", "passive", play, "gradients")

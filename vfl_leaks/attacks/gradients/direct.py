"""Label inference as the index of the negative logit gradient (Fu et al., USENIX Security 2022)."""

from __future__ import annotations

from vfl_leaks.scene.scene import Attack, Figure, Scene, UnfitError
from vfl_leaks.scene.scores import Tally


def play(scene: Scene) -> list[Figure]:
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


ATTACK = Attack(
    "labels as the negative element of each row's gradient", "passive", play, "gradients"
)

"""A peer asks which rows another party trained on, from the mean of shared weights and its own view
of the rows.

With two parties it subtracts its own weights and has the other's; with more it has the mean of the
others'. Below them it puts its own encoder, because the lower layers of the others never leave
them. Its own encoder has seen its own view of the same training rows, so it fits them better by
itself: that stands beside, with its own top and an untrained one.
"""

from __future__ import annotations

from dataclasses import replace

from vfl.leak_meter.learn.shared_weights import (
    collect_shared,
    describe_rank,
    eye_of,
    judge,
    uploads,
)
from vfl.leak_meter.scene.scene import Attack, Figure, Scene


def play(scene: Scene) -> list[Figure]:
    """Returns the AUC of rows that each other party trained on, by fit and by span. Raises
    UnfitError.
    """
    figures, own = list[Figure](), collect_shared(scene).newest(scene.attacker)
    for owner, received in uploads(scene).items():
        eye = eye_of("own encoder, own columns", scene.owners[scene.attacker], own_top=own)
        figures += judge(scene, owner, received, [eye])
        figures[-1] = replace(figures[-1], note=describe_rank(owner, received))
    return figures


ATTACK = Attack(
    "rows that a party trained on, from shared weights, by a peer", "party", play, "weights"
)

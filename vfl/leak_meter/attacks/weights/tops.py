"""Membership inference by a peer, from the mean of shared weights and its own view of the rows.

With two parties it subtracts its own weights and gets the other's; with more it gets the mean of
the others'. It puts them on its own encoder, because the lower layers of the others never leave
them. Its own encoder was trained on its own view of the same rows, so it fits them better even
alone: baselines are its own top and an untrained one.
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

"""Membership inference by the server, from the weights that a party uploads.

The server has no encoder and no columns. Two attackers represent what it may obtain: one has the
columns of the rows in question and a random encoder; the other has the party's encoder and columns
(an oracle: the most that the weights reveal to an insider).
"""

from __future__ import annotations

from dataclasses import replace

from vfl.leak_meter.learn.shared_weights import (
    describe_rank,
    draw_untrained,
    eye_of,
    judge,
    tower_of,
    uploads,
)
from vfl.leak_meter.scene.scene import Attack, Figure, Scene


def play(scene: Scene) -> list[Figure]:
    """Returns the AUC of rows that each party trained on, by fit and by span. Raises UnfitError."""
    figures = list[Figure]()
    for name, received in uploads(scene).items():
        owner = scene.owners[name]
        eyes = [
            eye_of(
                "the rows' columns, no encoder",
                owner,
                draw_untrained(tower_of(owner.encoder), scene.seed),
            ),
            eye_of("its encoder and columns (an oracle)", owner),
        ]
        figures += judge(scene, name, received, eyes)
        figures[-1] = replace(figures[-1], note=describe_rank(name, received))
    return figures


ATTACK = Attack(
    "rows that a party trained on, from shared weights, by the server", "server", play, "weights"
)

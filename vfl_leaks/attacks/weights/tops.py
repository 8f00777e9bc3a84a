"""Membership inference by a peer, from the mean of shared weights and its own view of the rows.

The peer subtracts its own weights from the mean. With two parties, the result is the other party's
weights; with more parties, it is the mean of the other parties' weights. The peer puts these
weights on its own encoder, because the other parties never share their lower layers. Its own
encoder was trained on the same rows, so training rows fit better even without the shared weights.
The baselines are therefore its own top layers and untrained top layers.
"""

from __future__ import annotations

from dataclasses import replace

from vfl_leaks.learn.shared_weights import (
    collect_shared,
    collect_uploads,
    describe_rank,
    make_view,
    yield_figures,
)
from vfl_leaks.scene.scene import Attack, Figure, Scene


def play(scene: Scene) -> list[Figure]:
    """Returns the AUC with which fit and span find the training rows of each other party. Raises
    UnfitError if no phase shares weights.
    """
    figures, own_weights = list[Figure](), collect_shared(scene).newest(scene.attacker)
    for owner, received in collect_uploads(scene).items():
        view = make_view(
            "own encoder, own columns", scene.owners[scene.attacker], own_top=own_weights
        )
        figures += yield_figures(scene, owner, received, [view])
        figures[-1] = replace(figures[-1], note=describe_rank(owner, received))
    return figures


ATTACK = Attack(
    "rows that a party trained on, from shared weights, by a peer", "party", play, "weights"
)

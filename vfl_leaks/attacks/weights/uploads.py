"""Membership inference by the server, from the weights that a party uploads.

The server itself has no encoder and no columns. The figures are for two stronger attackers. The
first has the columns of the candidate rows and a random encoder. The second has the party's encoder
and columns; it is an oracle, whose figure is the maximum leak of the weights to an insider.
"""

from __future__ import annotations

from dataclasses import replace

from vfl_leaks.learn.shared_weights import (
    collect_uploads,
    describe_rank,
    draw_untrained,
    get_tower,
    make_view,
    yield_figures,
)
from vfl_leaks.scene.scene import Attack, Figure, Scene


def play(scene: Scene) -> list[Figure]:
    """Returns the AUC with which fit and span find the training rows of each party. Raises
    UnfitError if no phase shares weights.
    """
    figures = list[Figure]()
    for name, received in collect_uploads(scene).items():
        owner = scene.owners[name]
        views = [
            make_view(
                "the rows' columns, no encoder",
                owner,
                draw_untrained(get_tower(owner.encoder), scene.seed),
            ),
            make_view("its encoder and columns (an oracle)", owner),
        ]
        figures += yield_figures(scene, name, received, views)
        figures[-1] = replace(figures[-1], note=describe_rank(name, received))
    return figures


ATTACK = Attack(
    "rows that a party trained on, from shared weights, by the server", "server", play, "weights"
)

"""A decoder from embeddings to the sender's columns, learnt from rows that the active party knows both of.

It knows a tenth of the rows of an exchange, 50 to 2,000, and reads each exchange by itself. Beside it stands the same
decoder from the attacker's own columns alone, which correlate with the others' without any message, and from shuffled
embeddings (chance).
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from vfl_common.text import listed
from vfl_party.attacks.fitting import decode, explained
from vfl_party.attacks.pairs import left_out, pairs
from vfl_party.attacks.scene import Attack, Figure, Scene
from vfl_party.seeds import derive_seed

_MOST_SHOWN = 30  # columns of a party; of more, only mean and most are given


def play(scene: Scene) -> list[Figure]:
    """Returns R² of each column of each sender, their mean, and the most. 0 is as good as the column's mean."""
    found = []
    for each in pairs(scene):
        drawn = torch.Generator().manual_seed(derive_seed(scene.seed, "shuffled embeddings") % 2**63)
        shuffled = each.z_known[torch.randperm(len(each.z_known), generator=drawn)]
        r2 = explained(decode(each.z_known, each.values_known, each.z_judged, scene.seed), each.values_judged)
        chance = explained(decode(shuffled, each.values_known, each.z_judged, scene.seed), each.values_judged)
        own: list[float] = []
        if each.own is not None:
            own = explained(decode(each.own[0], each.values_known, each.own[1], scene.seed), each.values_judged)
        like = Figure("", f"{len(each.z_known)} rows", "R²", 0.0, place=each.place)

        def figure(
            of: str, value: float, without: float, by_itself: float | None, like: Figure = like, detail: bool = False
        ) -> Figure:
            baselines = {} if by_itself is None else {"own columns": by_itself}
            return replace(like, of=of, value=value, chance=without, baselines=baselines, detail=detail)

        mean = statistics.fmean
        found.append(figure(f"{each.sender}: mean of columns", mean(r2), mean(chance), mean(own) if own else None))
        best = max(range(len(r2)), key=lambda column: r2[column])
        of = f"{each.sender}: most of a column"
        found.append(figure(of, r2[best], chance[best], own[best] if own else None))
        if len(r2) <= _MOST_SHOWN:
            found += [
                figure(f"{each.sender}: {name}", r2[n], chance[n], own[n] if own else None, detail=True)
                for n, name in enumerate(each.names)
            ]
    few = left_out(scene)
    if few:
        found[0] = replace(found[0], note=f"not played on exchanges of too few rows: {listed(few)}")
    return found


ATTACK = Attack("columns from embeddings", "active", play, "embeddings")

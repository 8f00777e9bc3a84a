"""Finds which person of a list an embedding is of: the decoder's columns, and the nearest row of a table with names.

The active party has a table of the sender's columns of 500 people, from elsewhere, and does not know which is which.
"""

from __future__ import annotations

import torch

from vfl_party.attacks.fitting import decode
from vfl_party.attacks.pairs import pairs
from vfl_party.attacks.scene import Attack, Figure, Scene, UnfitError

CANDIDATES = 500


def play(scene: Scene) -> list[Figure]:
    """Returns the share of rows whose nearest candidate is the right one; chance: one of the candidates.

    Raises UnfitError without enough rows or columns.
    """
    found = []
    for each in pairs(scene):
        n = min(CANDIDATES, len(each.z_judged))
        varies_F = each.values_known.std(dim=0) > 0  # the others tell no row from another
        if not varies_F.any():
            continue
        values_KF = each.values_known[:, varies_F]
        scale_F = values_KF.std(dim=0)
        truth = each.values_judged[:n, varies_F] / scale_F
        right = torch.arange(n)

        def share(guess_NF: torch.Tensor, truth: torch.Tensor = truth, right: torch.Tensor = right) -> float:
            return float((torch.cdist(guess_NF, truth).argmin(dim=1) == right).double().mean())

        value = share(decode(each.z_known, values_KF, each.z_judged[:n], scene.seed) / scale_F)
        baselines = {}
        if each.own is not None:
            by_itself = decode(each.own[0], values_KF, each.own[1][:n], scene.seed) / scale_F
            baselines = {"own columns": share(by_itself)}
        knows = f"{len(each.z_known)} rows, {n} candidates"
        of = f"rows of {each.sender}"
        found.append(Figure(of, knows, "accuracy", value, chance=1 / n, baselines=baselines, place=each.place))
    if not found:
        raise UnfitError("all columns have one value")
    return found


ATTACK = Attack("which row of a table an embedding is of", "active", play, "embeddings")

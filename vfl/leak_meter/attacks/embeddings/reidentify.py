"""Finds which person of a list an embedding is of: the decoder's columns, and the nearest row of a
table with names.

The active party has a table of the sender's columns of 500 people, from elsewhere, and does not
know which is which. It reads the embeddings of the last recorded epoch, then those of all epochs
together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vfl.leak_meter.learn.across_epochs import decode_over
from vfl.leak_meter.learn.fitting import count_held, decode_table
from vfl.leak_meter.scene.pairs import Pairs, pairs
from vfl.leak_meter.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError

CANDIDATES = 500


def play(scene: Scene) -> list[Figure]:
    """Returns the share of rows whose nearest candidate is the right one; chance: one of the
    candidates.

    Raises UnfitError without enough rows or columns.
    """
    figures = []
    for pair in pairs(scene):
        n = min(CANDIDATES, len(pair.z_judged))
        # Constant columns do not distinguish rows.
        varies_F = pair.values_known.std(dim=0) > 0
        if not varies_F.any():
            continue

        def share(
            known_KD: Tensor, judged_ND: Tensor, pair: Pairs = pair, varies_F: Tensor = varies_F
        ) -> float:
            asked = torch.cat([known_KD[: count_held(len(known_KD))], judged_ND])
            guess_NF = decode_table(
                known_KD, pair.values_known, asked, scene.seed, pair.groups.values()
            )
            return _share(pair, varies_F, guess_NF)

        baselines = (
            {"own columns": share(pair.own[0], pair.own[1][:n])} if pair.own is not None else {}
        )
        knows = f"{len(pair.z_known)} rows, {n} candidates"
        value = share(pair.z_known, pair.z_judged[:n])
        figure = Figure(
            f"rows of {pair.sender}",
            knows,
            "accuracy",
            value,
            chance=1 / n,
            baselines=baselines,
            place=pair.place,
        )
        figures.append(figure)
        if pair.over:
            value = _share(pair, varies_F, decode_over(pair, scene.seed, n))
            figures.append(replace(figure, knows=f"{knows}, {ALL_EPOCHS}", value=value))
    if not figures:
        raise UnfitError("all columns are constant")
    return figures


def _share(pair: Pairs, varies_F: Tensor, guess_NF: Tensor) -> float:
    """Returns the share of rows that are nearest to their own decoded columns.

    ``guess_NF``: what is decoded of the held known rows, then of the judged ones. A column's
    distance counts in units of its error in the held rows, so one that the decoder reads badly
    counts little, and one of which it gives all rows the same counts nothing.
    """
    held = count_held(len(pair.z_known))
    tried_HF, guess_NF = guess_NF[:held], guess_NF[held:]
    read_F = varies_F & (guess_NF != guess_NF[:1]).any(dim=0)
    if not read_F.any():
        # The decoder has learned nothing: a random candidate.
        return 1 / len(guess_NF)
    error_F = (tried_HF - pair.values_known[:held])[:, read_F].pow(2).mean(dim=0).sqrt()
    scale_F = error_F.clamp_min(1e-3 * pair.values_known[:, read_F].std(dim=0))
    distance_NN = torch.cdist(
        guess_NF[:, read_F] / scale_F, pair.values_judged[: len(guess_NF), read_F] / scale_F
    )
    return float((distance_NN.argmin(dim=1) == torch.arange(len(guess_NF))).double().mean())


ATTACK = Attack("which row of a table an embedding is of", "active", play, "embeddings")

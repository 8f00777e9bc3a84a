"""Reads columns from what came of each row over all recorded epochs together."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl.leak_meter.learn.fitting import count_held, decode_table
from vfl.leak_meter.scene.pairs import Pairs


def decode_over(pairs: Pairs, seed: int, max_rows: int | None = None) -> Tensor:
    """Returns the values that a decoder of a row's embeddings of all epochs gives for held, then
    for judged rows.

    [H + N, F]: H rows decide when training stops; N: of the judged rows, ``most`` at most.

    They are averaged, or the first and the last stand side by side, or all three do, or the last is
    taken by itself, whichever reads best the known rows that decide when training stops. Noise that
    is drawn anew averages out, and encoders of different epochs show different sides of a row.
    """
    held = count_held(len(pairs.z_known))
    spread_F = pairs.values_known.std(dim=0).clamp_min(1e-6)
    min_error, best = math.inf, torch.empty(0)
    for known, judged in ((pairs.z_known, pairs.z_judged), *pairs.over.values()):
        asked = torch.cat([known[:held], judged[:max_rows]])
        values = decode_table(known, pairs.values_known, asked, seed, pairs.groups.values())
        error = ((values[:held] - pairs.values_known[:held]) / spread_F).pow(2).mean().item()
        if error < min_error or not len(best):
            min_error, best = error, values
    return best

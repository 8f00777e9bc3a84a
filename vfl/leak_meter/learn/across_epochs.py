"""Decodes columns from the embeddings of each row over all recorded epochs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl.leak_meter.learn.fitting import count_held, decode_table
from vfl.leak_meter.scene.pairs import Pairs


def decode_over(pairs: Pairs, seed: int, max_rows: int | None = None) -> Tensor:
    """Returns the decoded values of H held-out known rows and of N judged rows, [H + N, F].

    The embeddings of all epochs are averaged, or the first and the last are concatenated, or all
    three, or only the last is used, whichever is best on the held-out rows. Independent noise
    averages out, and encoders of different epochs show different aspects of a row.

    Args:
        pairs: the known and the judged rows.
        seed: the seed of the decoder.
        max_rows: the maximum number of judged rows; None: all.
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

"""Decodes columns from the embeddings of each row over all recorded epochs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vfl.leak_meter.learn.fitting import count_held_out, decode_table
from vfl.leak_meter.scene.pairs import Pairs


def decode_all_epochs(pairs: Pairs, seed: int, max_rows: int | None = None) -> Tensor:
    """Returns the decoded values of H held-out known rows and of N judged rows, [H + N, F].

    The function tries the last embedding of each row, and several combinations of its embeddings
    of all epochs (``Pairs.over``). It uses the inputs with the smallest error on the held-out rows.
    Independent noise averages out over epochs, and encoders of different epochs show different
    aspects of a row.

    Args:
        pairs: the known and the judged rows.
        seed: the seed of the decoder.
        max_rows: the maximum number of judged rows; None: no maximum.
    """
    held_out = count_held_out(len(pairs.z_known))
    spread_F = pairs.values_known.std(dim=0).clamp_min(1e-6)
    min_error, best = math.inf, torch.empty(0)
    for known, judged in ((pairs.z_known, pairs.z_judged), *pairs.over.values()):
        inputs = torch.cat([known[:held_out], judged[:max_rows]])
        values = decode_table(known, pairs.values_known, inputs, seed, pairs.groups.values())
        error = (
            ((values[:held_out] - pairs.values_known[:held_out]) / spread_F).pow(2).mean().item()
        )
        if error < min_error or not len(best):
            min_error, best = error, values
    return best

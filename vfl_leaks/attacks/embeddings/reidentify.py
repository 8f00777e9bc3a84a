"""Re-identification: finds which person of a table an embedding belongs to.

The active party has a table with the sender's columns of 500 people, from another source. A decoder
reconstructs the columns of each embedding, and the person with the nearest columns is chosen. The
first figure uses the embeddings of the last recorded epoch, the second the embeddings of all
epochs.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from vfl_leaks.learn.fitting import count_held_out, decode_table
from vfl_leaks.scene.pairs import Pairs, yield_pairs
from vfl_leaks.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError

CANDIDATES = 500


def play(scene: Scene) -> list[Figure]:
    """Returns the share of rows whose nearest candidate is correct. Chance is a random candidate.

    Raises UnfitError if there are not enough rows or columns.
    """
    figures = []
    for pair in yield_pairs(scene):
        candidates = min(CANDIDATES, len(pair.z_judged))
        # Constant columns do not distinguish rows.
        varies_F = pair.values_known.std(dim=0) > 0
        if not varies_F.any():
            continue

        def share(
            known_KD: Tensor, judged_ND: Tensor, pair: Pairs = pair, varies_F: Tensor = varies_F
        ) -> float:
            inputs = torch.cat([known_KD[: count_held_out(len(known_KD))], judged_ND])
            guess_NF = decode_table(
                known_KD, pair.values_known, inputs, scene.seed, pair.groups.values()
            )
            return _match_candidates(pair, varies_F, guess_NF)

        baselines = (
            {"own columns": share(pair.own[0], pair.own[1][:candidates])}
            if pair.own is not None
            else {}
        )
        knows = f"{len(pair.z_known)} rows, {candidates} candidates"
        value = share(pair.z_known, pair.z_judged[:candidates])
        figure = Figure(
            f"rows of {pair.sender}",
            knows,
            "accuracy",
            value,
            chance=1 / candidates,
            baselines=baselines,
            place=pair.place,
        )
        figures.append(figure)
        if pair.over:
            value = _match_candidates(
                pair, varies_F, decode_all_epochs(pair, scene.seed, candidates)
            )
            figures.append(replace(figure, knows=f"{knows}, {ALL_EPOCHS}", value=value))
    if not figures:
        raise UnfitError("all columns are constant")
    return figures


def _match_candidates(pair: Pairs, varies_F: Tensor, guess_NF: Tensor) -> float:
    """Returns the share of decoded rows whose nearest candidate is the same person.

    ``guess_NF``: the decoded columns of the held-out known rows, then of the judged rows. The
    distance in a column is divided by the decoder's error on the held-out rows, so badly decoded
    columns count little. Columns with the same decoded value for all rows are left out.
    """
    held_out = count_held_out(len(pair.z_known))
    held_out_HF, guess_NF = guess_NF[:held_out], guess_NF[held_out:]
    is_used_F = varies_F & (guess_NF != guess_NF[:1]).any(dim=0)
    if not is_used_F.any():
        # The decoder has learned nothing, so a candidate is chosen at random.
        return 1 / len(guess_NF)
    error_F = (held_out_HF - pair.values_known[:held_out])[:, is_used_F].pow(2).mean(dim=0).sqrt()
    scale_F = error_F.clamp_min(1e-3 * pair.values_known[:, is_used_F].std(dim=0))
    distance_NN = torch.cdist(
        guess_NF[:, is_used_F] / scale_F, pair.values_judged[: len(guess_NF), is_used_F] / scale_F
    )
    return float((distance_NN.argmin(dim=1) == torch.arange(len(guess_NF))).double().mean())


ATTACK = Attack("which row of a table an embedding is of", "active", play, "embeddings")


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

"""Reconstructs columns from the embeddings of the first epochs, if the attacker can compute the
initial weights of the sender's encoder.

An attacker with the recipe knows the kind of the encoder and the recipe's seed. If the sender's
initial weights are derived from the seed, gradient descent finds the rows without any known row
(``vfl_leaks.learn.replay``). If the weights are derived from a secret, the attacker computes
other weights, which are no better than random weights (chance). In that case there are also figures
for an attacker that knows the true weights. The attacker knows the number of columns and that they
are standardised. In further figures it also knows the covariance of the columns of a tenth of the
rows, as in the attack ``columns``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vfl_common.text import list_names
from vfl_leaks.attacks.embeddings.columns import CHANCE, FOUND, yield_column_figures
from vfl_leaks.learn.fitting import r2_by_column
from vfl_leaks.learn.replay import ReplayCourse, ReplayedBatch, reconstruct_columns
from vfl_leaks.scene.pairs import count_known
from vfl_leaks.scene.scene import Attack, Beginning, Figure, Intercepted, Scene, UnfitError
from vfl_party.base.seeds import Rows, derive_seed

# Maximum number of rows to reconstruct. With more rows, only the first batches of the first epoch
# are used.
_MAX_ROWS = 20_000
_MIN_ROWS = 100
# This number is added to each variance, because the covariance is estimated from few rows.
_SHRUNK = 0.05


def play(scene: Scene) -> list[Figure]:
    """Returns R² of each numeric column and the mean R², for each party whose encoder is trained by
    the first phase.

    The mean is at least 0, because an attacker can always guess 0, the mean of a standardised
    column. Raises UnfitError if there is no such party.
    """
    figures, reasons = list[Figure](), list[str]()
    for sender, beginning in scene.beginnings.items():
        columns = scene.columns.get(sender)
        if columns is None or columns.image is not None or columns.codes is not None:
            reasons.append(f"{sender} has columns that are not numbers")
            continue
        sent = scene.embeddings[sender]()
        epochs = _split_epochs(
            batch
            for batch in sent
            if (batch.phase, batch.exchange) == (beginning.phase, "embedding")
        )
        rows = np.unique(
            np.concatenate(
                [np.empty(0, np.int64), *(batch.rows for epoch in epochs for batch in epoch)]
            )
        )
        if len(rows) < _MIN_ROWS:
            reasons.append(
                f"{sender} must send at least {_MIN_ROWS} rows in the first epochs (got "
                f"{len(rows)})"
            )
            continue
        figures += _yield_figures(scene, sender, beginning, epochs, rows)
    if not figures:
        raise UnfitError(
            list_names(reasons) if reasons else "no encoder is trained by split training first"
        )
    if reasons:
        figures[-1] = replace(figures[-1], note=f"not played: {'; '.join(reasons)}")
    return figures


def _split_epochs(sent: Iterator[Intercepted]) -> list[list[Intercepted]]:
    """Returns the batches of each epoch, up to the first round that was not recorded."""
    epochs: list[list[Intercepted]] = []
    rows_of_epoch, next_round = set[int](), 0
    for batch in sorted(sent, key=lambda batch: (batch.round, batch.batch)):
        if batch.round > next_round:
            break
        next_round = batch.round + 1
        rows = set(batch.rows.tolist())
        if not epochs or rows_of_epoch & rows:
            epochs.append([])
            rows_of_epoch = set()
        rows_of_epoch |= rows
        epochs[-1].append(batch)
    return epochs


def _add_gradients(
    epochs: Sequence[Sequence[Intercepted]], beginning: Beginning, rows: Rows
) -> list[list[ReplayedBatch]]:
    """Returns the batches with their gradients, up to the first batch without gradients."""
    replies = {
        (reply.round, reply.batch): reply.came
        for reply in beginning.replies()
        if reply.phase == beginning.phase
    }
    batches: list[list[ReplayedBatch]] = []
    for epoch in epochs:
        batches.append([])
        for sent in epoch:
            dz = replies.get((sent.round, sent.batch))
            if dz is None:
                return [epoch for epoch in batches if epoch]
            at = torch.from_numpy(np.searchsorted(rows, sent.rows))
            batches[-1].append(
                ReplayedBatch(at, sent.came.float().flatten(1), dz.float().flatten(1))
            )
    return batches


def _select_epochs(
    epochs: list[list[Intercepted]], beginning: Beginning
) -> list[list[Intercepted]]:
    """Returns the epochs that the attack uses: only the first epoch if it has too many rows,
    or if later epochs cannot be replayed.
    """
    sizes = itertools.accumulate(len(epoch.rows) for epoch in epochs[0])
    few = [epoch for epoch, size in zip(epochs[0], sizes, strict=True) if size <= _MAX_ROWS]
    return [few or epochs[0][:1]] if len(few) < len(epochs[0]) or not beginning.plain else epochs


def _yield_figures(
    scene: Scene, sender: str, beginning: Beginning, epochs: list[list[Intercepted]], rows: Rows
) -> Iterator[Figure]:
    used = _select_epochs(epochs, beginning)
    rows = np.intersect1d(rows, np.concatenate([batch.rows for epoch in used for batch in epoch]))
    batches = _add_gradients(used, beginning, rows)
    if not batches:
        raise UnfitError(f"{sender} got no gradients")
    columns = scene.columns[sender]
    truth_NF = columns.table(rows)
    order = np.random.default_rng(derive_seed(scene.seed, "auxiliary rows", sender)).permutation(
        len(rows)
    )
    known, judged = np.split(order, [count_known(len(rows))])
    identity_FF = torch.eye(truth_NF.shape[1])
    covariance_FF = torch.cov(truth_NF[known].T) + _SHRUNK * identity_FF
    roots = {"the recipe": beginning.known, "the true weights": beginning.true}
    if beginning.true == beginning.known:
        del roots["the true weights"]
    course = ReplayCourse(beginning.optimizer, beginning.epochs)
    for suffix, prior_FF in (
        ("", identity_FF),
        (f", covariance of {len(known)} rows", covariance_FF),
    ):

        def r2_of_judged(root: int, prior_FF: Tensor = prior_FF) -> list[float]:
            x_NF = reconstruct_columns(
                beginning.make(root), batches, (len(rows), len(identity_FF)), course, prior_FF
            )
            return r2_by_column(x_NF[judged], truth_NF[judged])

        chance = r2_of_judged(derive_seed(scene.seed, "random weights", sender))
        for knows, root in roots.items():
            r2 = _group_by_column(columns.names, r2_of_judged(root), chance, truth_NF[judged])
            only_mean = root != beginning.known
            mean, *others = yield_column_figures(
                sender, "column", r2, Figure("", f"{knows}{suffix}", "R²", 0.0), only_mean=only_mean
            )
            # If the true weights are secret, no attacker has them, so their figure is only for
            # comparison.
            yield replace(
                mean,
                value=max(0.0, mean.value),
                chance=max(0.0, mean.chance or 0.0),
                detail=only_mean,
            )
            yield from others


def _group_by_column(
    names: Sequence[str], r2: Sequence[float], chance: Sequence[float], truth_JF: Tensor
) -> dict[str, dict[str, float]]:
    """Returns {column: its R² with the weights, and with random weights}, without constant
    columns.
    """
    spread_F = truth_JF.double().var(dim=0, correction=0)
    return {
        name: {FOUND: r2[place], CHANCE: chance[place]}
        for place, name in enumerate(names)
        if spread_F[place] > 0
    }


ATTACK = Attack(
    "columns from an encoder whose first weights follow from the recipe", "active", play, "splitnn"
)

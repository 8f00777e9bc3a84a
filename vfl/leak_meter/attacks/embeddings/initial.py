"""Reconstructs columns from the embeddings of the first epochs, if the attacker can compute the
initial weights of the sender's encoder.

An attacker with the recipe knows the kind of the encoder and the recipe's seed. If the sender's
weights are derived from these, gradient descent finds the rows without any known row
(``vfl.leak_meter.learn.replay``). If they are derived from a secret, the attacker computes other
weights, which are as good as random ones (chance). In that case there are also lines for an
attacker that knows the true weights. The attacker knows the number of columns and that they are
standardised; in further lines also the covariance of the columns of a tenth of the rows, as many as
in the attack ``columns``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vfl.leak_meter.attacks.embeddings.columns import CHANCE, FOUND, figures_of
from vfl.leak_meter.learn.fitting import r2_by_column
from vfl.leak_meter.learn.replay import ReplayCourse, ReplayedBatch, columns_behind
from vfl.leak_meter.scene.pairs import count_known
from vfl.leak_meter.scene.scene import Attack, Beginning, Figure, Intercepted, Scene, UnfitError
from vfl_common.text import list_names
from vfl_party.base.seeds import Rows, derive_seed

# Maximum number of rows to find; with more, those of the first batches in the first epoch.
_MAX_ROWS = 20_000
_MIN_ROWS = 100
# Added to each variance in a covariance of few rows.
_SHRUNK = 0.05


def play(scene: Scene) -> list[Figure]:
    """Returns R² of each column of numbers and its mean, for each party whose encoder begins with
    the recipe.

    The mean is 0 at least: an attacker may always give what it knows, that columns have mean 0.
    Raises UnfitError if there is no such party.
    """
    figures, why = list[Figure](), list[str]()
    for sender, beginning in scene.beginnings.items():
        columns = scene.columns.get(sender)
        if columns is None or columns.image is not None or columns.codes is not None:
            why.append(f"{sender} has columns that are not numbers")
            continue
        sent = scene.embeddings[sender]()
        epochs = _epochs(
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
            why.append(
                f"{sender} must send at least {_MIN_ROWS} rows in the first epochs (got "
                f"{len(rows)})"
            )
            continue
        figures += _figures(scene, sender, beginning, epochs, rows)
    if not figures:
        raise UnfitError(
            list_names(why) if why else "no encoder is trained by split training first"
        )
    if why:
        figures[-1] = replace(figures[-1], note=f"not played: {'; '.join(why)}")
    return figures


def _epochs(sent: Iterator[Intercepted]) -> list[list[Intercepted]]:
    """Returns the batches of the first recorded epochs, up to the first round that was not
    recorded.
    """
    epochs: list[list[Intercepted]] = []
    here, next_round = set[int](), 0
    for batch in sorted(sent, key=lambda batch: (batch.round, batch.batch)):
        if batch.round > next_round:
            break
        next_round = batch.round + 1
        rows = set(batch.rows.tolist())
        if not epochs or here & rows:
            epochs.append([])
            here = set()
        here |= rows
        epochs[-1].append(batch)
    return epochs


def _batches(
    epochs: Sequence[Sequence[Intercepted]], beginning: Beginning, rows: Rows
) -> list[list[ReplayedBatch]]:
    """Returns the batches with their gradients, up to the first that got none."""
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


def _first(epochs: list[list[Intercepted]], beginning: Beginning) -> list[list[Intercepted]]:
    """Returns the epochs that the attack takes: the first alone if others cannot be replayed, or
    have too many rows.
    """
    sizes = itertools.accumulate(len(epoch.rows) for epoch in epochs[0])
    few = [epoch for epoch, size in zip(epochs[0], sizes, strict=True) if size <= _MAX_ROWS]
    return [few or epochs[0][:1]] if len(few) < len(epochs[0]) or not beginning.plain else epochs


def _figures(
    scene: Scene, sender: str, beginning: Beginning, epochs: list[list[Intercepted]], rows: Rows
) -> Iterator[Figure]:
    taken = _first(epochs, beginning)
    rows = np.intersect1d(rows, np.concatenate([batch.rows for epoch in taken for batch in epoch]))
    batches = _batches(taken, beginning, rows)
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
    for also, prior_FF in (
        ("", identity_FF),
        (f", covariance of {len(known)} rows", covariance_FF),
    ):

        def r2_of_judged(root: int, prior_FF: Tensor = prior_FF) -> list[float]:
            x_NF = columns_behind(
                beginning.make(root), batches, (len(rows), len(identity_FF)), course, prior_FF
            )
            return r2_by_column(x_NF[judged], truth_NF[judged])

        chance = r2_of_judged(derive_seed(scene.seed, "random weights", sender))
        for knows, root in roots.items():
            r2 = _by_column(columns.names, r2_of_judged(root), chance, truth_NF[judged])
            only_mean = root != beginning.known
            mean, *others = figures_of(
                sender, "column", r2, Figure("", f"{knows}{also}", "R²", 0.0), only_mean=only_mean
            )
            # If the true weights are secret, no attacker has them: that figure is for comparison
            # only.
            yield replace(
                mean,
                value=max(0.0, mean.value),
                chance=max(0.0, mean.chance or 0.0),
                detail=only_mean,
            )
            yield from others


def _by_column(
    names: Sequence[str], r2: Sequence[float], chance: Sequence[float], truth_JF: Tensor
) -> dict[str, dict[str, float]]:
    """Returns {column: its R² with the weights and with random ones}; without columns of one
    value.
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

"""Label inference in a regression: with squared error, the length of a row's gradient is the error
of the model.

g = 2/B · (f(z) − y) · ∂f/∂z. If the top model is linear, ∂f/∂z is one direction for all rows, and a
row's position along it is f(z) − y up to sign and scale. Before training, f(z) is nearly the same
for all rows, so the first round reveals most: the position is y. Later it reveals the error of the
model for a row. The direction is the first singular vector of a round's gradients, which stands out
from isotropic noise (``iso``) that hides it in one batch. |ρ| is Spearman's rank correlation of
positions and labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from vfl.leak_meter.attacks.gradients.epochs import KNOWN, TIMES, means, rounds_of
from vfl.leak_meter.learn.directions import common_direction
from vfl.leak_meter.learn.regression import join, predict
from vfl.leak_meter.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError
from vfl.leak_meter.scene.scores import Numbers, Tally
from vfl_party.base.seeds import Rows, derive_seed


def play(scene: Scene) -> list[Figure]:
    """Scores each batch, the batches of the first round, and all rows by the sum over rounds.

    With 50 known numbers, a regression learns from all gradients of a row. Raises UnfitError if the
    labels are classes, or if nothing can be judged.
    """
    numbers_N, batches = scene.numbers.numpy(), [*_batches(scene)]
    if not batches:
        raise UnfitError("the attacker received no gradients")
    first = {
        place: min(batch.round for batch in batches if batch.at == place)
        for place in {batch.at for batch in batches}
    }
    every, begin = Tally(scene.seed), Tally(scene.seed)
    for batch in batches:
        for tally in (every, begin) if batch.round == first[batch.at] else (every,):
            tally.numbers(batch.places, numbers_N[batch.rows])
    figures = [every.figure("nothing, by direction", "|ρ|")]
    if len(first) < len({(batch.at, batch.round) for batch in batches}):
        figures.append(begin.figure("nothing, first round", "|ρ|"))
        rows = np.unique(np.concatenate([batch.rows for batch in batches]))
        together = Tally(scene.seed)
        added_N = _sum_places(batches, len(numbers_N))
        together.numbers(added_N[rows], numbers_N[rows])
        figure = together.figure(f"nothing, {ALL_EPOCHS}", "|ρ|")
        # There is one figure, so no quantile over batches.
        figures.append(replace(figure, high=None, chance_high=None))
        figures += _play_with_labels(scene, rows, torch.from_numpy(added_N))
    return figures


def _play_with_labels(scene: Scene, rows: Rows, added_N: Tensor) -> Iterator[Figure]:
    """Yields the figure of an attacker that knows some numbers: it learns from the sum of a row's
    places, the means of its gradients over parts of the training, and its own columns.
    """
    if len(rows) < TIMES * KNOWN:
        return
    random = np.random.default_rng(derive_seed(scene.seed, "auxiliary labels"))
    known, judged = np.split(random.permutation(rows), [KNOWN])
    rounds = rounds_of(scene)
    stacks = [means(rounds, len(scene.numbers), parts).stack_features() for parts in (1, 4)]
    came_ND = torch.cat([added_N[:, None], *stacks], 1)
    inputs = [(came_ND[known], came_ND[judged])]
    numbers_K1, baselines = scene.numbers[known][:, None], dict[str, float]()

    def figure(guess_N1: Tensor) -> Figure:
        tally = Tally(scene.seed)
        tally.numbers(guess_N1[:, 0].numpy(), scene.numbers.numpy()[judged])
        made = tally.figure(f"{KNOWN} labels, {ALL_EPOCHS}", "|ρ|")
        return replace(made, high=None, chance_high=None)

    if own := scene.columns.get(scene.attacker):
        alone = own.table(known).double(), own.table(judged).double()
        baselines["own columns"] = figure(predict([alone], numbers_K1, scene.seed)).value
        inputs = join(inputs[0], alone)
    yield replace(figure(predict(inputs, numbers_K1, scene.seed)), baselines=baselines)


@dataclass(frozen=True, eq=False)
class _Placed:
    """The rows of a batch with their places along a direction, which is turned so that it goes on
    from the last one.
    """

    at: str
    round: int
    rows: Rows
    places: Numbers


def _batches(scene: Scene) -> Iterator[_Placed]:
    """Yields the batches of each exchange in the order in which they came."""
    before: dict[str, Tensor] = {}
    whole = groupby(scene.gradients(), key=lambda batch: (batch.place, batch.round))
    for (place, round_), of in whole:
        batches = [*of]
        came = [batch.came.double().flatten(1) for batch in batches]
        direction_D = common_direction(torch.cat(came))
        last_D = before.get(place)
        if last_D is not None and last_D @ direction_D < 0:
            direction_D = -direction_D
        before[place] = direction_D
        for batch, g_BD in zip(batches, came, strict=True):
            yield _Placed(place, round_, batch.rows, (g_BD @ direction_D).numpy())


def _sum_places(batches: list[_Placed], count: int) -> Numbers:
    """Returns each row's sum of places over all rounds, [N]."""
    scores_N = np.zeros(count)
    for batch in batches:
        np.add.at(scores_N, batch.rows, batch.places)
    return scores_N


ATTACK = Attack("numbers as labels from each row's gradient", "passive", play, "gradients")

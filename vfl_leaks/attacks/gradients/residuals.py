"""Label inference in a regression: with the squared error, a row's gradient is proportional to the
error of the model.

g = 2/B · (f(z) − y) · ∂f/∂z. If the top model is linear, ∂f/∂z is the same direction for all rows.
A row's position along it is f(z) − y, up to sign and scale. Before training, f(z) is nearly the
same for all rows, so the positions in the first round reveal y. Later positions reveal the error of
the model for a row. The attack estimates the direction as the first singular vector of all
gradients of a round. Isotropic noise (``iso``) can hide the direction in one batch, but not in a
round. |ρ| is Spearman's rank correlation of positions and labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from vfl_leaks.attacks.gradients.epochs import KNOWN, TIMES, compute_means, split_rounds
from vfl_leaks.learn.directions import common_direction
from vfl_leaks.learn.regression import list_alternatives, predict
from vfl_leaks.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError
from vfl_leaks.scene.scores import Numbers, Tally
from vfl_party.base.seeds import Rows, derive_seed


def play(scene: Scene) -> list[Figure]:
    """Scores all batches, the batches of the first round, and the sum of each row's positions over
    rounds.

    Another figure is for an attacker that knows 50 numbers and trains a regression on all gradients
    of a row. Raises UnfitError if the labels are classes, or if no batch can be judged.
    """
    numbers_N, batches = scene.numbers.numpy(), [*_yield_positions(scene)]
    if not batches:
        raise UnfitError("the attacker received no gradients")
    first_rounds = {
        place: min(batch.round for batch in batches if batch.exchange == place)
        for place in {batch.exchange for batch in batches}
    }
    all_batches, first_batches = Tally(scene.seed), Tally(scene.seed)
    for batch in batches:
        for tally in (
            (all_batches, first_batches)
            if batch.round == first_rounds[batch.exchange]
            else (all_batches,)
        ):
            tally.numbers(batch.positions, numbers_N[batch.rows])
    figures = [all_batches.figure("nothing, by direction", "|ρ|")]
    if len(first_rounds) < len({(batch.exchange, batch.round) for batch in batches}):
        figures.append(first_batches.figure("nothing, first round", "|ρ|"))
        rows = np.unique(np.concatenate([batch.rows for batch in batches]))
        by_row = Tally(scene.seed)
        sums_N = _sum_positions(batches, len(numbers_N))
        by_row.numbers(sums_N[rows], numbers_N[rows])
        figure = by_row.figure(f"nothing, {ALL_EPOCHS}", "|ρ|")
        # There is one figure, so no quantile over batches.
        figures.append(replace(figure, high=None, chance_high=None))
        figures += _play_with_labels(scene, rows, torch.from_numpy(sums_N))
    return figures


def _play_with_labels(scene: Scene, rows: Rows, sums_N: Tensor) -> Iterator[Figure]:
    """Yields the figure of an attacker that knows some labels. Its regression uses the sum of a
    row's positions, the means of its gradients over parts of the training, and its own columns.
    """
    if len(rows) < TIMES * KNOWN:
        return
    random = np.random.default_rng(derive_seed(scene.seed, "auxiliary labels"))
    known, judged = np.split(random.permutation(rows), [KNOWN])
    rounds = split_rounds(scene)
    stacks = [compute_means(rounds, len(scene.numbers), parts).stack_features() for parts in (1, 4)]
    features_ND = torch.cat([sums_N[:, None], *stacks], 1)
    inputs = [(features_ND[known], features_ND[judged])]
    numbers_K1, baselines = scene.numbers[known][:, None], dict[str, float]()

    def figure(guess_N1: Tensor) -> Figure:
        tally = Tally(scene.seed)
        tally.numbers(guess_N1[:, 0].numpy(), scene.numbers.numpy()[judged])
        made = tally.figure(f"{KNOWN} labels, {ALL_EPOCHS}", "|ρ|")
        return replace(made, high=None, chance_high=None)

    if own := scene.columns.get(scene.attacker):
        own_pair = own.table(known).double(), own.table(judged).double()
        baselines["own columns"] = figure(predict([own_pair], numbers_K1, scene.seed)).value
        inputs = list_alternatives(inputs[0], own_pair)
    yield replace(figure(predict(inputs, numbers_K1, scene.seed)), baselines=baselines)


@dataclass(frozen=True, eq=False)
class _BatchPositions:
    """The positions of a batch's rows along the main direction of their round. The direction's sign
    agrees with the round before. ``exchange``: the phase and the exchange.
    """

    exchange: str
    round: int
    rows: Rows
    positions: Numbers


def _yield_positions(scene: Scene) -> Iterator[_BatchPositions]:
    """Yields the positions of each batch's rows, in the order in which the batches came."""
    previous: dict[str, Tensor] = {}
    by_round = groupby(scene.gradients(), key=lambda batch: (batch.place, batch.round))
    for (place, round_), group in by_round:
        batches = [*group]
        gradients = [batch.came.double().flatten(1) for batch in batches]
        direction_D = common_direction(torch.cat(gradients))
        previous_D = previous.get(place)
        if previous_D is not None and previous_D @ direction_D < 0:
            direction_D = -direction_D
        previous[place] = direction_D
        for batch, g_BD in zip(batches, gradients, strict=True):
            yield _BatchPositions(place, round_, batch.rows, (g_BD @ direction_D).numpy())


def _sum_positions(batches: list[_BatchPositions], count: int) -> Numbers:
    """Returns the sum of each row's positions over all rounds, [N]."""
    scores_N = np.zeros(count)
    for batch in batches:
        np.add.at(scores_N, batch.rows, batch.positions)
    return scores_N


ATTACK = Attack("numbers as labels from each row's gradient", "passive", play, "gradients")

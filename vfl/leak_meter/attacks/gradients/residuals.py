"""Reads numbers as labels from gradients: under squared error a row's gradient is as long as the
model is wrong.

g = 2/B · (f(z) − y) · ∂f/∂z. If the top model is linear, ∂f/∂z is one direction for all rows, and a
row's place along it is f(z) − y but for sign and scale. Before training f(z) is nearly the same for
all rows, so the first round tells most: then the place is y. Later it tells how wrong the model is
about a row. The direction is that which most of a batch's gradients share, their first singular
vector. |ρ| is Spearman's rank correlation of places and labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from vfl.leak_meter.learn.directions import shared
from vfl.leak_meter.scene.scene import ALL_EPOCHS, Attack, Figure, Scene, UnfitError
from vfl.leak_meter.scene.scores import Numbers, Tally
from vfl_party.base.seeds import Rows


def play(scene: Scene) -> list[Figure]:
    """Scores each batch, those of the first round, and all rows by what all rounds add up to.

    Raises UnfitError if the labels are classes, or if nothing can be judged.
    """
    numbers_N, batches = scene.numbers.numpy(), [*_batches(scene)]
    if not batches:
        raise UnfitError("no gradient came")
    first = {
        place: min(each.round for each in batches if each.at == place)
        for place in {each.at for each in batches}
    }
    every, begin = Tally(scene.seed), Tally(scene.seed)
    for each in batches:
        for tally in (every, begin) if each.round == first[each.at] else (every,):
            tally.numbers(each.places, numbers_N[each.rows])
    found = [every.figure("nothing, by direction", "|ρ|")]
    if len(first) < len({(each.at, each.round) for each in batches}):
        found.append(begin.figure("nothing, first round", "|ρ|"))
        rows = np.unique(np.concatenate([each.rows for each in batches]))
        together = Tally(scene.seed)
        together.numbers(_added(batches, len(numbers_N))[rows], numbers_N[rows])
        figure = together.figure(f"nothing, {ALL_EPOCHS}", "|ρ|")
        # There is one figure.
        found.append(replace(figure, high=None, chance_high=None))
    return found


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
    for batch in scene.gradients():
        g_BD = batch.came.double().flatten(1)
        direction_D = shared(g_BD)
        last_D = before.get(batch.place)
        if last_D is not None and last_D @ direction_D < 0:
            direction_D = -direction_D
        before[batch.place] = direction_D
        yield _Placed(batch.place, batch.round, batch.rows, (g_BD @ direction_D).numpy())


def _added(batches: list[_Placed], count: int) -> Numbers:
    """Returns each row's sum of places over all rounds, [N]."""
    scores_N = np.zeros(count)
    for each in batches:
        np.add.at(scores_N, each.rows, each.places)
    return scores_N


ATTACK = Attack("numbers as labels from each row's gradient", "passive", play, "gradients")

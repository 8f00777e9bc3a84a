"""Reads labels from all gradients that a row has had, not from one batch: noise that is drawn anew
adds up to little.

A row has one gradient a round. Its score is the sum over rounds of its place along a direction:
that which most of the round's gradients share (the first singular vector of the rows scaled to
length one, turned so that it agrees with the rounds before), or that of rows whose label is known.
It is one figure for all training rows, so it also stands for batches of one row or of one class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from vfl.leak_meter.learn.directions import shared, towards, unit
from vfl.leak_meter.scene.scene import Attack, Figure, Scene, UnfitError
from vfl.leak_meter.scene.scores import Classes, Numbers, Tally
from vfl_party.base.seeds import Rows, derive_seed

# Rows of each class; of two classes, positives.
_KNOWN = 5


def play(scene: Scene) -> list[Figure]:
    """Scores all rows that have had a gradient. Raises UnfitError if nothing can be judged."""
    rounds, labels_N = [*_rounds(scene)], scene.labels.numpy()
    if not rounds:
        raise UnfitError("no gradient came")
    rows = np.unique(np.concatenate([each for each, _ in rounds]))
    found = []
    if scene.classes == 2:
        found.append(
            _binary(scene, "nothing", _shared(rounds, len(labels_N))[rows], labels_N[rows])
        )
    classes = [1] if scene.classes == 2 else np.unique(labels_N[rows]).tolist()
    of_class = [rows[labels_N[rows] == c] for c in classes]
    if all(len(each) > _KNOWN for each in of_class):
        random = np.random.default_rng(derive_seed(scene.seed, "known rows of all epochs"))
        known = [random.choice(each, _KNOWN, replace=False) for each in of_class]
        scores_NC = _along(rounds, known, len(labels_N))
        judged = np.setdiff1d(rows, np.concatenate(known))
        if scene.classes == 2:
            found.append(
                _binary(scene, f"{_KNOWN} positives", scores_NC[judged, 0], labels_N[judged])
            )
        else:
            tally = Tally(scene.seed)
            tally.named(np.array(classes)[scores_NC[judged].argmax(axis=1)], labels_N[judged])
            found.append(_alone(tally.figure(f"{_KNOWN} rows of each class", "accuracy")))
    if not found:
        raise UnfitError(f"a class has no more than {_KNOWN} rows")
    return found


def _rounds(scene: Scene) -> Iterator[tuple[Rows, Tensor]]:
    """Yields the rows of each round, and their gradients scaled to length one, float64 [B, D]."""
    for _, batches in groupby(scene.gradients(), key=lambda batch: (batch.place, batch.round)):
        of = [*batches]
        yield (
            np.concatenate([each.rows for each in of]),
            torch.cat([unit(each.came) for each in of]),
        )


def _shared(rounds: list[tuple[Rows, Tensor]], count: int) -> Numbers:
    """Returns each row's sum of places along its rounds' shared directions, [N]."""
    scores_N = np.zeros(count)
    for rows, unit_BD in rounds:
        place_B = (unit_BD @ shared(unit_BD)).numpy()
        np.add.at(scores_N, rows, -place_B if place_B @ scores_N[rows] < 0 else place_B)
    return scores_N


def _along(rounds: list[tuple[Rows, Tensor]], known: list[Rows], count: int) -> Numbers:
    """Returns each row's sum of cosines to the known rows of each class, [N, C]; only rounds that
    have some count.
    """
    scores_NC = np.zeros((count, len(known)))
    for rows, unit_BD in rounds:
        for c, of in enumerate(known):
            here = np.isin(rows, of)
            if here.any():
                direction_D = towards(unit_BD[torch.from_numpy(here)])
                np.add.at(scores_NC[:, c], rows, (unit_BD @ direction_D).numpy())
    return scores_NC


def _binary(scene: Scene, knows: str, scores_R: Numbers, labels_R: Classes) -> Figure:
    tally = Tally(scene.seed)
    tally.binary(scores_R, labels_R == 1)
    return _alone(tally.figure(knows, "AUC"))


def _alone(figure: Figure) -> Figure:
    """Leaves the quantiles over batches out: there is one figure."""
    return replace(figure, high=None, chance_high=None)


ATTACK = Attack("labels from all gradients that a row has had", "passive", play, "gradients")

"""Model completion: a passive party trains a head on its trained encoder (Fu et al., USENIX
Security 2022).

The attacker knows the labels of a stratified sample of 80 rows. It freezes the encoder (frozen),
trains the encoder with the head (tuned), or also uses its unlabelled rows (MixMatch). In a
regression, the attacker knows the numbers of 80 rows, and the head predicts a number. Three
baselines need no message: the most frequent class, the same attack on an untrained encoder, and the
same attack on an encoder that the attacker has trained alone without labels. The difference between
the attack and the baselines is the leak of federated training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vfl_leaks.learn.fitting import (
    Inputs,
    classify,
    estimate,
    r2_by_column,
    train_self_supervised,
)
from vfl_leaks.learn.mixmatch import train_mixmatch
from vfl_leaks.scene.scene import Attack, Figure, Scene, UnfitError
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.statistics import auc

KNOWN = 80
FROZEN, TUNED, MIXMATCH = (
    f"{KNOWN} labels, frozen",
    f"{KNOWN} labels, tuned",
    f"{KNOWN} labels, MixMatch",
)
# {attack: its baselines, the same attack on other encoders}
_BASELINES = {
    FROZEN: ("from scratch", "own SSL, frozen", "own SSL, tuned"),
    TUNED: ("from scratch", "own SSL, frozen", "own SSL, tuned"),
    MIXMATCH: ("from scratch, MixMatch", "own SSL, MixMatch"),
}


def play(scene: Scene) -> list[Figure]:
    """Judges the heads on the test rows, or on the validation rows if there are no test rows.

    In a regression, heads are judged by R², and MixMatch is left out because it needs classes.
    Raises UnfitError if the attacker has no encoder, or not enough rows.
    """
    if scene.task.kind == "regression":
        return _play_regression(scene)
    logits_by_attack, without_messages, truth = (
        recover_labels(scene),
        compute_baselines(scene),
        scene.labels[_select_judged_rows(scene)],
    )
    figures = []
    for unit, score in (("accuracy", accuracy), *((("AUC", _auc),) if scene.classes == 2 else ())):
        for knows, logits in logits_by_attack.items():
            baselines = {name: score(without_messages[name], truth) for name in _BASELINES[knows]}
            if unit == "accuracy":
                baselines["majority"] = float(torch.bincount(truth).max()) / len(truth)
            figures.append(Figure("labels", knows, unit, score(logits, truth), baselines=baselines))
    return figures


def _play_regression(scene: Scene) -> list[Figure]:
    """Returns the figures of a regression with 80 random known rows."""
    encoder, make, inputs = scene.encoder, scene.make_encoder, scene.inputs
    if encoder is None or make is None or inputs is None:
        raise UnfitError("the attacker has no encoder")
    train, judged = _select_training_rows(scene), _select_judged_rows(scene)
    random = np.random.default_rng(derive_seed(scene.seed, "auxiliary labels"))
    known_rows = np.sort(random.permutation(train)[:KNOWN])
    known_inputs, device = inputs(known_rows), inputs(known_rows[:1])[0].device
    untrained = make("attack from scratch").to(device)
    self_trained = train_self_supervised(
        make("attack by itself").to(device), inputs(train), scene.seed
    )

    def r2(model: nn.Module, *, tuned: bool) -> float:
        numbers_K = scene.numbers[known_rows].to(device)
        numbers_N = estimate(model, known_inputs, numbers_K, inputs(judged), tuned=tuned)
        return r2_by_column(numbers_N[:, None], scene.numbers[judged][:, None])[0]

    baselines = {
        "from scratch": r2(untrained, tuned=True),
        "own SSL, frozen": r2(self_trained, tuned=False),
        "own SSL, tuned": r2(self_trained, tuned=True),
    }
    return [
        Figure("labels", knows, "R²", r2(encoder, tuned=tuned), chance=0.0, baselines=baselines)
        for knows, tuned in ((FROZEN, False), (TUNED, True))
    ]


def recover_labels(scene: Scene) -> Mapping[str, Tensor]:
    """Returns {attack: logits of the judged rows, [N, classes]}. Raises UnfitError if the attacker
    has no encoder, or not enough rows.
    """
    known = _gather_knowledge(scene)
    encoder = scene.encoder
    if encoder is None:
        raise UnfitError("the attacker has no encoder")
    return {
        FROZEN: known.logits(encoder, tuned=False),
        TUNED: known.logits(encoder, tuned=True),
        MIXMATCH: known.mixmatch(encoder),
    }


def compute_baselines(scene: Scene) -> Mapping[str, Tensor]:
    """Returns {baseline without any message: logits of the judged rows, [N, classes]}. They depend
    only on the rows and the seed.

    Raises UnfitError if the attacker has no encoder, or not enough rows.
    """
    known = _gather_knowledge(scene)
    make = scene.make_encoder
    if make is None:
        raise UnfitError("the attacker has no encoder")
    untrained = make("attack from scratch").to(known.classes_K.device)
    self_trained = train_self_supervised(
        make("attack by itself").to(known.classes_K.device), known.train, scene.seed
    )
    return {
        "from scratch": known.logits(untrained, tuned=True),
        "own SSL, frozen": known.logits(self_trained, tuned=False),
        "own SSL, tuned": known.logits(self_trained, tuned=True),
        "from scratch, MixMatch": known.mixmatch(untrained),
        "own SSL, MixMatch": known.mixmatch(self_trained),
    }


@dataclass(frozen=True, eq=False)
class _Knowledge:
    """The attacker's knowledge: the inputs and classes of the known rows, and the inputs of its
    training rows and of the judged rows.
    """

    x: Inputs
    classes_K: Tensor  # noqa: N815 - the shape
    train: Inputs
    judged: Inputs
    classes: int
    seed: int

    def logits(self, encoder: nn.Module, *, tuned: bool) -> Tensor:
        return classify(
            encoder, self.x, self.classes_K, self.judged, self.classes, self.seed, tuned=tuned
        )

    def mixmatch(self, encoder: nn.Module) -> Tensor:
        return train_mixmatch(
            encoder, self.x, self.classes_K, self.train, self.judged, self.classes, self.seed
        )


def _gather_knowledge(scene: Scene) -> _Knowledge:
    classes, train, judged = scene.classes, _select_training_rows(scene), _select_judged_rows(scene)
    if scene.inputs is None:
        raise UnfitError("the attacker has no encoder")
    known = draw_stratified(scene.labels, train, classes, scene.seed)
    x = scene.inputs(known)
    classes_K = scene.labels[known].to(x[0].device)
    return _Knowledge(x, classes_K, scene.inputs(train), scene.inputs(judged), classes, scene.seed)


def _select_training_rows(scene: Scene) -> Rows:
    """Returns the attacker's training rows. Raises UnfitError if there are too few rows to train or
    to judge.
    """
    # The attacker also uses its rows without labels, and its rows that no other party has.
    train = scene.rows.get("local", scene.rows["train"])
    # The rows that no other party has come last, and have no label.
    train = train[train < len(scene.labels)]
    if len(train) < 2 * KNOWN or not len(_select_judged_rows(scene)):
        raise UnfitError(
            f"the attack needs at least {2 * KNOWN} training rows, and test or validation rows"
        )
    return train


def _select_judged_rows(scene: Scene) -> Rows:
    return scene.rows["test"] if len(scene.rows["test"]) else scene.rows["validation"]


def draw_stratified(
    labels: Tensor, rows: Rows, classes: int, seed: int, count: int = KNOWN
) -> Rows:
    """Draws a stratified sample of ``count`` rows, with at least one row of each class.

    With more classes than ``count``, it draws one row of each class.

    Args:
        labels: the class of each row, int64 [N].
        rows: the rows to draw from, int64 [R].
        classes: the number of classes.
        seed: the seed of the sample.
        count: the number of rows.
    """
    random, y = np.random.default_rng(derive_seed(seed, "auxiliary labels")), labels.numpy()[rows]
    order = random.permutation(len(rows))
    of_class = [rows_of_class for c in range(classes) if len(rows_of_class := order[y[order] == c])]
    counts = [max(1, round(count * len(rows_of_class) / len(rows))) for rows_of_class in of_class]
    # Each rare class gets one row, and the largest classes get fewer rows.
    while sum(counts) > max(count, len(counts)):
        counts[int(np.argmax(counts))] -= 1
    sample = np.concatenate(
        [rows_of_class[:size] for rows_of_class, size in zip(of_class, counts, strict=True)]
    )
    return np.sort(rows[sample])


def accuracy(logits: Tensor, truth: Tensor) -> float:
    """Returns the share of rows whose largest logit is the logit of their class."""
    return float((logits.argmax(dim=1) == truth).double().mean())


def _auc(logits: Tensor, truth: Tensor) -> float:
    return auc((logits[:, 1] - logits[:, 0]).numpy(), truth.numpy() == 1)


ATTACK = Attack("labels from a head on the trained encoder", "passive", play, "encoder")

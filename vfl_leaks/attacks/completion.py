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

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vfl_leaks.fitting import (
    AdamDescent,
    Inputs,
    classify,
    embed,
    estimate,
    r2_by_column,
    train_self_supervised,
)
from vfl_leaks.scene import Attack, Figure, Scene, UnfitError
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.base.statistics import auc
from vfl_party.models import seed_torch

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


def play_completion(scene: Scene) -> list[Figure]:
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


COMPLETION = Attack(
    "labels from a head on the trained encoder", "passive", play_completion, "encoder"
)


_STEPS, _BATCH, _LR, _DECAY = 1024, 16, 2e-3, 0.99


_ALPHA, _TEMPERATURE, _WEIGHT = 0.75, 0.8, 50.0


# MixMatch: a head and an encoder learn from a few labelled rows and many unlabelled rows.
#
# The method is by Berthelot et al., NeurIPS 2019. Fu et al. use it for model completion (USENIX
# Security 2022). A step takes B labelled and B unlabelled rows. The target of an unlabelled row is
# the model's own prediction, sharpened: q_c = p_c^(1/T) / Σ p^(1/T). All 2B rows and targets are
# mixed with the same rows in another order: x = l·x_i + (1 − l)·x_j, with l = max(b, 1 − b) and b ~
# Beta(α, α). The loss is the cross-entropy of the first B rows, plus λ·t times the mean squared
# error of the probabilities of the last B rows, where t grows from 0 to 1. Rows are not augmented,
# so each row has one prediction. The predictions of the attack use a moving average of the weights.
# Its decay is lower than in the paper, because there are fewer steps.
class MixMatchModel(nn.Module):
    """An encoder with a linear head on its standardised embeddings. The head's initial weights are
    random, so build it inside ``seed_torch``.
    """

    def __init__(self, encoder: nn.Module, z_KD: Tensor, classes: int) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(z_KD.shape[1], classes)
        self.mean_D, self.std_D = z_KD.mean(dim=0), z_KD.std(dim=0).clamp_min(1e-6)

    def standardize(self, inputs: Inputs) -> Tensor:
        z: Tensor = (self.encoder(*inputs).flatten(1) - self.mean_D) / self.std_D
        return z


def train_mixmatch(
    encoder: nn.Module,
    known: Inputs,
    classes_K: Tensor,
    unlabelled: Inputs,
    judged: Inputs,
    classes: int,
    seed: int,
) -> Tensor:
    """Trains a copy of an encoder with a head by MixMatch, and returns the logits of the judged
    rows, [N, classes].

    ``unlabelled``: rows without labels. MixMatch mixes the inputs of rows. If some inputs are codes
    of categories, it mixes the embeddings instead.
    """
    encoder = copy.deepcopy(encoder).eval()
    with seed_torch(derive_seed(seed, "init", "mixmatch")), torch.no_grad():
        model = MixMatchModel(encoder, encoder(*known).flatten(1), classes).to(classes_K.device)
    averaged = copy.deepcopy(model)
    random = np.random.default_rng(derive_seed(seed, "mixmatch"))
    descent = AdamDescent(model.parameters(), _LR)
    averaged_weights, weights = tuple(averaged.parameters()), tuple(model.parameters())
    size = min(_BATCH, len(classes_K), len(unlabelled[0]))
    hot_KC = functional.one_hot(classes_K, classes).float()
    for step in range(_STEPS):
        labelled_rows = torch.from_numpy(random.choice(len(classes_K), size, replace=False))
        unlabelled_rows = torch.from_numpy(random.choice(len(unlabelled[0]), size, replace=False))
        inputs = tuple(
            torch.cat([known_[labelled_rows], unlabelled_[unlabelled_rows]])
            for known_, unlabelled_ in zip(known, unlabelled, strict=True)
        )
        with torch.no_grad():
            guess_BC = sharpen(
                model.head(model.standardize(tuple(input_[size:] for input_ in inputs)))
            )
        targets = torch.cat([hot_KC[labelled_rows], guess_BC])
        b = float(random.beta(_ALPHA, _ALPHA))
        share, order = max(b, 1 - b), torch.from_numpy(random.permutation(2 * size))
        if all(input_.is_floating_point() for input_ in inputs):
            z = model.standardize(tuple(mix(input_, share, order) for input_ in inputs))
        else:
            z = mix(model.standardize(inputs), share, order)
        descent.step(
            mixmatch_loss(model.head(z), mix(targets, share, order), size, _WEIGHT * step / _STEPS)
        )
        with torch.no_grad():
            torch._foreach_lerp_(averaged_weights, weights, 1 - _DECAY)
    with torch.no_grad():
        logits: Tensor = averaged.head(
            (embed(averaged.encoder, judged) - averaged.mean_D) / averaged.std_D
        )
    return logits.cpu()


def sharpen(logits_BC: Tensor) -> Tensor:
    """Returns the softmax probabilities to the power of 1/T, scaled to a sum of 1."""
    return torch.softmax(torch.log_softmax(logits_BC, dim=1) / _TEMPERATURE, dim=1)


def mix(rows: Tensor, share: float, order: Tensor) -> Tensor:
    """Returns share · rows + (1 − share) · rows[order]."""
    return share * rows + (1 - share) * rows[order]


def mixmatch_loss(logits: Tensor, targets: Tensor, labelled: int, weight: float) -> Tensor:
    """Returns the cross-entropy of the first ``labelled`` rows, plus ``weight`` times the squared
    error of the remaining rows' probabilities.
    """
    error = functional.mse_loss(torch.softmax(logits[labelled:], dim=1), targets[labelled:])
    return functional.cross_entropy(logits[:labelled], targets[:labelled]) + weight * error

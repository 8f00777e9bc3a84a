"""Model completion: a passive party puts a head on its trained encoder (Fu et al., USENIX Security 2022).

The attacker knows the labels of 80 rows, drawn class by class in proportion. Three baselines need no message: the most
frequent class, the same head and rows on an encoder from scratch, and on one that the attacker has trained by itself
without labels. What the trained encoder finds beyond them is what training with the others has given away.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vfl_party.attacks.fitting import classify, self_supervised
from vfl_party.attacks.scene import Attack, Figure, Scene, UnfitError
from vfl_party.attacks.scores import auc
from vfl_party.seeds import Rows, derive_seed

KNOWN = 80


def play(scene: Scene) -> list[Figure]:
    """Judges heads on the test rows, or the validation rows. Raises UnfitError without an encoder or enough rows."""
    classes = scene.classes
    if scene.encoder is None or scene.inputs is None or scene.make_encoder is None:
        raise UnfitError("the attacker has no encoder")
    judged = scene.rows["test"] if len(scene.rows["test"]) else scene.rows["validation"]
    train = scene.rows["train"]
    if len(train) < 2 * KNOWN or not len(judged):
        raise UnfitError(f"it needs {2 * KNOWN} training rows, and test or validation rows")
    known = stratified(scene.labels, train, classes, scene.seed)
    known_x, judged_x = scene.inputs(known), scene.inputs(judged)
    y_K = scene.labels[known].to(known_x[0].device)
    fresh = scene.make_encoder("attack from scratch").to(y_K.device)
    own = self_supervised(scene.make_encoder("attack by itself").to(y_K.device), scene.inputs(train), scene.seed)

    def logits(encoder: torch.nn.Module, tuned: bool) -> Tensor:
        return classify(encoder, known_x, y_K, judged_x, classes, scene.seed, tuned=tuned)

    truth = scene.labels[judged]
    found = {
        f"{KNOWN} labels, frozen": logits(scene.encoder, False),
        f"{KNOWN} labels, tuned": logits(scene.encoder, True),
    }
    beside = {
        "from scratch": logits(fresh, True),
        "own SSL, frozen": logits(own, False),
        "own SSL, tuned": logits(own, True),
    }
    figures = []
    for unit, score in (("accuracy", _accuracy), *((("AUC", _auc),) if classes == 2 else ())):
        baselines = {name: score(each, truth) for name, each in beside.items()}
        if unit == "accuracy":
            baselines["majority"] = float(torch.bincount(truth).max()) / len(truth)
        figures += [
            Figure("labels", knows, unit, score(each, truth), baselines=baselines) for knows, each in found.items()
        ]
    return figures


def stratified(labels: Tensor, rows: Rows, classes: int, seed: int) -> Rows:
    """Draws ``KNOWN`` of the rows, of each class in proportion and at least one if it occurs."""
    random, y = np.random.default_rng(derive_seed(seed, "auxiliary labels")), labels.numpy()[rows]
    order = random.permutation(len(rows))
    found: list[int] = []
    for c in range(classes):
        of_class = order[y[order] == c]
        found += of_class[: max(1, round(KNOWN * len(of_class) / len(rows)))].tolist()
    return np.sort(rows[np.array(found[:KNOWN])])


def _accuracy(logits: Tensor, truth: Tensor) -> float:
    return float((logits.argmax(dim=1) == truth).double().mean())


def _auc(logits: Tensor, truth: Tensor) -> float:
    return auc((logits[:, 1] - logits[:, 0]).numpy(), truth.numpy() == 1)


ATTACK = Attack("labels from a head on the trained encoder", "passive", play)

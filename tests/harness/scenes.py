"""Made-up scenes for attacks: gradients whose leak is known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl_common.config.models import TaskSettings
from vfl_party.attacks.scene import Batch, Scene

Make = Callable[[np.random.Generator, Tensor], Tensor]  # the gradients of rows of these classes


def scene(
    make: Make,
    *,
    classes: int = 2,
    share: float = 0.3,
    batches: int = 25,
    size: int = 1000,
    seed: int = 5,
    **more: Any,
) -> Scene:
    """Returns a passive party's scene: ``batches`` batches of gradients, ``share`` of the rows positive if binary."""
    random = np.random.default_rng(seed)
    chances = [1 - share, share] if classes == 2 else [1 / classes] * classes
    labels = torch.from_numpy(random.choice(classes, batches * size, p=chances))
    found: list[Batch] = []
    for number in range(batches):
        rows = np.arange(number * size, (number + 1) * size)
        found.append(of(make(random, labels[rows]), rows, number))
    task = TaskSettings(kind="binary") if classes == 2 else TaskSettings(kind="multiclass", classes=classes)
    return Scene("p1", "passive", task, labels, {}, seed, gradients=replayed(found), **more)


def of(g: Tensor, rows: Any, number: int = 0) -> Batch:
    return Batch("splitnn", 0, number, rows, g, g)


def replayed(found: Sequence[Batch]) -> Callable[[], Iterator[Batch]]:
    return lambda: iter(found)

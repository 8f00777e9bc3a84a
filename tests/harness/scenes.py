"""Made-up scenes for attacks: gradients whose leak is known in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from vfl_common.config.task import TaskSettings
from vfl_leaks.scene import Attack, EncoderInputs, Figure, Image, Intercepted, Scene
from vfl_leaks.scores import Tally

# The gradients of rows of these classes.
Make = Callable[[np.random.Generator, Tensor], Tensor]


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
    """Returns a passive party's scene: ``batches`` batches of gradients, ``share`` of the rows
    positive if binary.
    """
    random = np.random.default_rng(seed)
    chances = [1 - share, share] if classes == 2 else [1 / classes] * classes
    labels = torch.from_numpy(random.choice(classes, batches * size, p=chances))
    found: list[Intercepted] = []
    for number in range(batches):
        rows = np.arange(number * size, (number + 1) * size)
        found.append(of(make(random, labels[rows]), rows, number))
    task = (
        TaskSettings(kind="binary")
        if classes == 2
        else TaskSettings(kind="multiclass", classes=classes)
    )
    return Scene("p1", "passive", task, labels, {}, seed, gradients=replayed(found), **more)


def of(g: Tensor, rows: Any, number: int = 0) -> Intercepted:
    return Intercepted("splitnn", 0, number, rows, g, g)


def replayed(found: Sequence[Intercepted]) -> Callable[[], Iterator[Intercepted]]:
    return lambda: iter(found)


def linear_scene(
    noise: float,
    *,
    rows: int = 1200,
    width: int = 6,
    own: bool = False,
    rounds: int = 1,
    moves: bool = False,
    seed: int = 2,
) -> Scene:
    """Returns an active party's scene: z = x A + noise, with an orthogonal A; ``own``: it has the
    first column, too.

    Each of ``rounds`` has noise of its own; with ``moves`` another A, too.
    """
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=made)
    columns = {"p1": EncoderInputs(tuple(f"c{n}" for n in range(width)), x)}
    if own:
        columns["p0"] = EncoderInputs(("c0",), x[:, :1])
    batches = []
    for number in range(rounds):
        if not number or moves:
            turned = torch.linalg.qr(torch.randn(width, width, generator=made)).Q
        z = x @ turned + noise * torch.randn(rows, width, generator=made)
        batches += [
            replace(of(z[part], part.numpy()), round=number)
            for part in torch.arange(rows).split(256)
        ]
    sent = replayed(batches)
    labels = torch.zeros(rows, dtype=torch.int64)
    task = TaskSettings(kind="binary")
    return Scene(
        "p0",
        "active",
        task,
        labels,
        {},
        seed,
        replayed([]),
        embeddings={"p1": sent},
        columns=columns,
    )


def number_scene(
    noise: float, *, rounds: int = 1, size: int = 400, rows: int = 2000, seed: int = 5
) -> Scene:
    """Returns a passive party's scene of a regression: y is N(0, 1), and each round's gradients are
    y w + noise in 3D.

    It is what squared error gives a linear top model that always answers the mean.
    """
    made = torch.Generator().manual_seed(seed)
    y = torch.randn(rows, generator=made, dtype=torch.float64)
    w = torch.tensor([0.6, 0.0, -0.8], dtype=torch.float64)
    batches = []
    for number in range(rounds):
        for place, part in enumerate(torch.randperm(rows, generator=made).split(size)):
            g = y[part, None] * w + noise * torch.randn(
                len(part), 3, generator=made, dtype=torch.float64
            )
            batches.append(replace(of(g, part.numpy(), place), round=number))
    task, labels = TaskSettings(kind="regression"), torch.full((rows,), -1)
    return Scene("p1", "passive", task, labels, {}, seed, gradients=replayed(batches), targets=y)


def image_scene(
    encode: Callable[[Tensor], Tensor], *, own: bool = False, high: float = 1.0, seed: int = 2
) -> Scene:
    """Returns an active party's scene: 1,200 digits with pixels from 0 to ``high``, standardised,
    and their embeddings.

    ``own``: it has the upper half of each image, too.
    """
    images = torch.tensor(load_digits().images[:1200] / 16.0, dtype=torch.float32) * high
    shift, scale = images.mean().item(), images.std().item()
    x = ((images - shift) / scale).flatten(1)
    names = tuple(f"x{n}" for n in range(64))
    columns = {"p1": EncoderInputs(names, x, image=Image((1, 8, 8), (shift,), (scale,)))}
    if own:
        columns["p0"] = EncoderInputs(names[:32], x[:, :32])
    z = encode(x)
    sent = replayed([of(z[part], part.numpy()) for part in torch.arange(1200).split(256)])
    labels, task = torch.zeros(1200, dtype=torch.int64), TaskSettings(kind="binary")
    return Scene(
        "p0",
        "active",
        task,
        labels,
        {},
        seed,
        replayed([]),
        embeddings={"p1": sent},
        columns=columns,
    )


class Scaled(nn.Module):
    """An encoder that gives the first ``columns`` of its input times a number, and zeros for the
    others.
    """

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns, self.factor = columns, nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * torch.cat(
            [x[:, : self.columns], torch.zeros_like(x[:, self.columns :])], dim=1
        )


def labelled_scene(
    informed: bool, *, numbers: bool = False, rows: int = 2000, seed: int = 4
) -> Scene:
    """Returns a passive party's scene with an encoder: ``informed``, it adds the label; its columns
    say nothing.

    ``numbers``: the labels are those of a regression, 0 and 1 with noise.
    """
    made = torch.Generator().manual_seed(seed)
    labels = (torch.rand(rows, generator=made) < 0.3).long()
    x = torch.randn(rows, 4, generator=made)
    hidden = torch.cat([x, labels[:, None] + 0.1 * torch.randn(rows, 1, generator=made)], dim=1)

    return Scene(
        "p1",
        "passive",
        TaskSettings(kind="regression" if numbers else "binary"),
        torch.full((rows,), -1) if numbers else labels,
        {"train": np.arange(1000), "test": np.arange(1000, rows), "validation": np.arange(0)},
        seed,
        replayed([]),
        encoder=Scaled(5 if informed else 4),
        inputs=lambda at: (hidden[torch.from_numpy(at)],),
        make_encoder=lambda _label: Scaled(4),
        targets=hidden[:, 4].double() if numbers else None,
    )


def first_element(scene: Scene) -> list[Figure]:
    """The guide's attack: scores each row by the sign of its gradient's first element."""
    tally = Tally(scene.seed)
    for batch in scene.gradients():
        tally.binary(batch.came[:, 0].sign().numpy(), scene.labels[batch.rows].numpy() == 1)
    return [tally.figure("nothing", "AUC")]


FIRST = Attack("labels from the first element of each gradient", "passive", first_element)

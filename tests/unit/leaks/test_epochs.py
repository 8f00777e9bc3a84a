"""The attack ``epochs`` reads through the noise of each defence of gradients, within seconds, and
finds nothing where gradients tell nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.harness.scenes import of, replayed
from vfl_common.config.task import TaskSettings
from vfl_leaks import attacks
from vfl_leaks.scene import EncoderInputs, Figure, Scene
from vfl_party.outbound.filter import NoisyFilter
from vfl_party.outbound.transforms import IsoNoise, Marvell, MarvellSettings

ROWS, SIZE, WIDTH, ROUNDS = 800, 80, 8, 12

Defence = TypeVar("Defence", bound=NoisyFilter)
# The gradients that leave for rows: their own, their labels, and those of each class.
Leave = Callable[[Tensor, Tensor, Tensor], Tensor]


def played(leave: Leave, classes: int = 2, *, blind: bool = False) -> dict[str, Figure]:
    """Plays the attack on made-up training: g = Jᵀ(p − y), where all J of a batch are nearly one.

    ``blind``: p and y are drawn anew in each round, so that gradients tell nothing of the labels.
    """
    random = np.random.default_rng(3)
    shares = [0.8, 0.2] if classes == 2 else [1 / classes] * classes
    labels = torch.from_numpy(random.choice(classes, ROWS, p=shares))
    own = torch.from_numpy(random.standard_normal((ROWS, 3))).float()
    weight_CD = torch.from_numpy(random.standard_normal((classes, WIDTH)))
    batches = []
    for round_ in range(ROUNDS):
        order = random.permutation(ROWS)
        weight_CD = weight_CD + 0.05 * torch.from_numpy(random.standard_normal((classes, WIDTH)))
        for number in range(ROWS // SIZE):
            rows = order[number * SIZE : (number + 1) * SIZE]
            y_B = labels[rows] if not blind else torch.from_numpy(random.choice(classes, SIZE))
            p_BC = torch.from_numpy(random.dirichlet(4 * np.array(shares), SIZE))
            turned = 0.1 * torch.from_numpy(random.standard_normal((SIZE, classes, WIDTH)))
            of_class = torch.stack(
                [
                    torch.einsum("bc,bcd->bd", p_BC - torch.eye(classes)[c], weight_CD + turned)
                    for c in range(classes)
                ]
            )
            g_BD = of_class[y_B, torch.arange(SIZE)]
            came = leave(g_BD.float(), y_B, of_class)
            batches.append(replace(of(came, rows, number), round=round_))
    task = (
        TaskSettings(kind="binary")
        if classes == 2
        else TaskSettings(kind="multiclass", classes=classes)
    )
    scene = Scene(
        "p1",
        "passive",
        task,
        labels,
        {},
        5,
        gradients=replayed(batches),
        columns={"p1": EncoderInputs(("a", "b", "c"), own)},
    )
    return {figure.knows: figure for figure in attacks.load("epochs", "test").play(scene)}


def seeded(defence: Defence) -> Defence:
    """Lets a defence draw the same noise in each test."""
    defence._random._random = np.random.Generator(np.random.Philox(key=7))
    return defence


def marvell(scale: float) -> Leave:
    defence = seeded(Marvell(MarvellSettings(scale=scale)))
    return lambda g_BD, y_B, _: defence.noise(g_BD, y_B == 1)


def iso(amplifier: float) -> Leave:
    defence = seeded(IsoNoise(amplifier))
    return lambda g_BD, _, __: defence.noise(g_BD)


def laplace(epsilon: float) -> Leave:
    """Laplace noise on the one-hot label, drawn for each message (Yang et al., arXiv 2203.02073)."""
    draw = np.random.default_rng(7).laplace

    def leave(g_BD: Tensor, _: Tensor, of_class_CBD: Tensor) -> Tensor:
        u_CB = torch.from_numpy(draw(scale=2 / epsilon, size=of_class_CBD.shape[:2]))
        return g_BD + torch.einsum("cb,cbd->bd", u_CB, of_class_CBD).float()

    return leave


def test_all_labels_are_read_through_marvell_with_no_label_known() -> None:
    figures = played(marvell(25.0))
    assert figures["nothing, mixture by batch"].value >= 0.99
    assert figures["nothing, mixture by batch"].chance == pytest.approx(0.5, abs=0.08)
    # What the meter had before.
    assert figures["nothing, sum by round"].value < 0.9
    assert figures["50 labels, mixture by batch"].value >= 0.99


def test_labels_are_read_through_noise_in_all_directions_by_a_sum() -> None:
    assert played(iso(1.0))["nothing, sum by round"].value >= 0.99


def test_several_classes_are_read_through_noise_of_each_message_with_some_labels_known() -> None:
    figures = played(laplace(4.0), 4)
    known = figures["200 labels, regression"]
    assert known.value >= 0.9
    assert known.baselines["own columns"] < 0.4
    assert figures["50 labels, regression"].value >= 0.8
    # Groups without names are named as well as they can be.
    assert figures["nothing, mixture of means"].value > 0.4


@pytest.mark.parametrize("classes", [2, 4])
def test_where_gradients_tell_nothing_the_attack_reads_nothing(classes: int) -> None:
    for figure in played(lambda g_BD, _, __: g_BD, classes, blind=True).values():
        assert figure.chance is not None
        most = max(figure.chance, *figure.baselines.values(), 1 / classes)
        assert figure.value < most + 0.08, figure.knows

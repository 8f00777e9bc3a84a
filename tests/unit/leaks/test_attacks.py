"""The attacks of the leak meter find exactly what made-up gradients give away, and nothing where
there is nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom
from scipy.stats import norm as normal
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional

from tests.harness.errors import raises
from tests.harness.scenes import of, replayed, scene
from vfl_common.bundle import StepKey
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_leaks import attacks
from vfl_leaks.attacks.completion import KNOWN, draw_stratified
from vfl_leaks.recording import Key, Record, Seen
from vfl_leaks.scene import Figure, Scene, UnfitError
from vfl_leaks.scores import Tally, best_accuracy
from vfl_leaks.wiretap import read_sizes
from vfl_party.base.statistics import auc

GAP = 0.8
# How often the gradient of a positive, a negative points up.
UP, DOWN = 0.9, 0.2


def lengths(random: np.random.Generator, y_B: Tensor) -> Tensor:
    """Directions at random; lengths 10 + N(0, 1), a positive's longer by ``GAP``: AUC = Φ(GAP /
    √2).
    """
    g_BD = torch.from_numpy(random.standard_normal((len(y_B), 6)))
    length_B = 10 + torch.from_numpy(random.standard_normal(len(y_B))) + GAP * y_B
    found: Tensor = g_BD / g_BD.norm(dim=1, keepdim=True) * length_B[:, None]
    return found


def signs(random: np.random.Generator, y_B: Tensor) -> Tensor:
    """Up or down, by chance: AUC = 1/2 + (UP - DOWN) / 2. The lengths say nothing."""
    up = torch.from_numpy(random.random(len(y_B))) < torch.where(y_B == 1, UP, DOWN)
    return (
        torch.where(up, 1.0, -1.0)[:, None] * torch.from_numpy(1 + random.random(len(y_B)))[:, None]
    )


def nothing(random: np.random.Generator, y_B: Tensor) -> Tensor:
    return torch.from_numpy(random.standard_normal((len(y_B), 6)))


def play(kind: str, where: Scene) -> dict[str, Figure]:
    return {figure.knows: figure for figure in attacks.load(kind, "test").play(where)}


def test_auc_is_the_area_under_the_curve_with_ties() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        scores, y = random.integers(0, 6, 60).astype(float), random.random(60) < 0.3
        assert auc(scores, y) == pytest.approx(roc_auc_score(y, scores), abs=1e-12)
    assert math.isnan(auc(np.ones(3), np.ones(3, bool)))


def test_groups_are_named_as_well_as_they_can_be() -> None:
    label = np.array([0, 0, 1, 1, 2, 2])
    assert best_accuracy(np.array([2, 2, 0, 0, 1, 1]), label, 3) == 1.0
    assert best_accuracy(np.array([2, 2, 0, 0, 0, 1]), label, 3) == pytest.approx(5 / 6)


def test_the_length_gives_what_its_closed_form_says() -> None:
    figure = play("norm", scene(lengths))["nothing"]
    assert figure.value == pytest.approx(normal.cdf(GAP / math.sqrt(2)), abs=0.01)
    assert figure.value < (figure.high or 0) < figure.value + 0.04
    assert figure.batches == 25


@pytest.mark.parametrize("kind", ["cosine", "clusters", "direct"])
def test_the_direction_gives_what_its_closed_form_says(kind: str) -> None:
    for knows, figure in play(kind, scene(signs)).items():
        if figure.unit == "AUC" and not knows.startswith(("3", "5")):
            wanted = 0.5 + (UP - DOWN) / 2
        elif figure.unit == "accuracy":
            wanted = 0.3 * UP + 0.7 * (1 - DOWN)
        else:
            continue
        assert figure.value == pytest.approx(wanted, abs=0.02), knows
    if kind == "cosine":
        assert [*play(kind, scene(signs))] == ["1 positive", "3 positives", "5 positives"]


def rounds_of(count: int, size: int) -> Scene:
    """The same 600 rows in each of ``count`` rounds, in batches of ``size``; ``signs``, drawn anew
    in each.
    """
    random, labels = (
        np.random.default_rng(3),
        torch.from_numpy(np.random.default_rng(4).choice(2, 600, p=[0.7, 0.3])),
    )
    found = []
    for round_ in range(count):
        for number, rows in enumerate(np.split(random.permutation(600), 600 // size)):
            found.append(replace(of(signs(random, labels[rows]), rows, number), round=round_))
    return Scene(
        "p1", "passive", TaskSettings(kind="binary"), labels, {}, 5, gradients=replayed(found)
    )


@pytest.mark.parametrize("size", [1, 600])
def test_over_all_rounds_a_row_has_the_sum_of_its_signs(size: int) -> None:
    """Of 7 rounds: AUC = P(Bin(7, UP) > Bin(7, DOWN)) + P(they are equal) / 2, however small the
    batches are.
    """
    more, fewer = binom(7, UP).pmf(range(8)), binom(7, DOWN).pmf(range(8))
    wanted = sum(p * (fewer[:k].sum() + fewer[k] / 2) for k, p in enumerate(more))
    figures = play("epochs", rounds_of(7, size))
    hows = ["regression", "mixture by batch", "mixture of means"]
    assert [*figures] == [
        "nothing, sum by round",
        "nothing, sum by batch",
        *(f"nothing, {how}" for how in hows[1:]),
        *(f"50 labels, {how}" for how in hows),
        # Of 600 rows, too few are left to know 200 labels.
    ]
    for knows in ("nothing, sum by round", "50 labels, regression"):
        assert figures[knows].value == pytest.approx(wanted, abs=0.02)
        assert figures[knows].chance == pytest.approx(0.5, abs=0.1)
    assert wanted > 0.98
    one = play("epochs", rounds_of(1, size))["nothing, sum by round"]
    assert one.value == pytest.approx(0.5 + (UP - DOWN) / 2, abs=0.05)


def test_over_all_rounds_many_classes_are_told_by_known_rows() -> None:
    figure = play(
        "epochs", scene(lambda _, y_B: 5 * functional.one_hot(y_B, 4).double(), classes=4, size=100)
    )
    assert figure["50 labels, regression"].value == 1.0
    with raises(UnfitError):
        play("epochs", Scene(**{**scene(nothing).__dict__, "gradients": replayed([])}))


def test_each_class_that_occurs_is_known_by_one_row_at_least() -> None:
    labels = torch.tensor([0] * 900 + [1] * 900 + [2] * 3 + [3])
    known = draw_stratified(labels, np.arange(len(labels)), 5, 1)
    assert len(known) == KNOWN
    assert torch.bincount(labels[known])[2:].tolist() == [1, 1]
    many = torch.arange(1000) % 100
    assert len(np.unique(many[draw_stratified(many, np.arange(1000), 100, 1)])) == 100


@pytest.mark.parametrize("kind", ["norm", "cosine", "clusters"])
def test_without_the_information_an_attack_finds_what_chance_finds(kind: str) -> None:
    for knows, figure in play(kind, scene(nothing)).items():
        assert figure.chance is not None
        assert figure.value == pytest.approx(figure.chance, abs=0.012), knows


@pytest.mark.parametrize("kind", ["norm", "cosine", "clusters", "direct"])
def test_shuffled_labels_give_one_half(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients leak, the labels that judge them are shuffled: before folding, AUC is 0.50."""
    tallies: list[Tally] = []
    made = Tally.__post_init__

    def note(self: Tally) -> None:
        made(self)
        tallies.append(self)

    monkeypatch.setattr(Tally, "__post_init__", note)
    leaking = scene(lengths if kind == "norm" else signs)
    order = torch.from_numpy(np.random.default_rng(1).permutation(len(leaking.labels)))
    shuffled = Scene(**{**leaking.__dict__, "labels": leaking.labels[order]})
    figures = play(kind, shuffled)
    judged = [tally for tally in tallies if tally.found]
    assert len(judged) >= len(figures)
    for figure, tally in zip(figures.values(), judged, strict=False):
        if figure.unit == "AUC":
            assert np.mean(tally.found) == pytest.approx(0.5, abs=0.02)
            assert np.mean(tally.chance) == pytest.approx(0.5, abs=0.02)


def test_an_oracle_knows_a_gradient_without_its_noise_if_there_is_noise() -> None:
    whole = scene(signs, batches=5)
    noisy = [replace(batch, came=batch.came + 0.1) for batch in whole.gradients()]
    found = play("cosine", Scene(**{**whole.__dict__, "gradients": replayed(noisy)}))
    assert next(iter(found)) == "1 positive without its noise"
    assert len(found) == 4


def test_many_classes_are_found_by_direction() -> None:
    def one_hot(random: np.random.Generator, y_B: Tensor) -> Tensor:
        noise = 0.05 * torch.from_numpy(random.standard_normal((len(y_B), 4)))
        return 0.25 - torch.eye(4, dtype=torch.float64)[y_B] + noise

    where = scene(one_hot, classes=4, batches=5, size=120)
    for kind in ("cosine", "clusters", "direct"):
        for figure in play(kind, where).values():
            assert (figure.unit, figure.value) == ("accuracy", pytest.approx(1.0))
            assert (figure.chance or 1) < 0.5
    with raises(UnfitError):
        play("norm", where)


def test_batches_of_one_class_are_skipped_and_counted() -> None:
    whole = scene(lengths, batches=2, size=50)
    one_class = np.flatnonzero(whole.labels.numpy() == 0)[:20]
    batches = [*whole.gradients(), of(torch.randn(20, 6), one_class, 2)]
    figure = play("norm", Scene(**{**whole.__dict__, "gradients": replayed(batches)}))["nothing"]
    assert (figure.batches, figure.skipped) == (2, 1)
    with raises(UnfitError):
        play("norm", Scene(**{**whole.__dict__, "gradients": replayed(batches[2:])}))


def test_a_regression_and_other_widths_are_said_to_be_unfit() -> None:
    whole = scene(lengths, batches=1, size=50)
    with raises(UnfitError):
        play("norm", Scene(**{**whole.__dict__, "task": TaskSettings(kind="regression")}))
    with raises(UnfitError):
        play("direct", whole)


def test_an_attack_that_nobody_has_is_named() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("nrm", "norm")):
        attacks.load("nrm", "attacks")


def test_a_record_keeps_what_came_in_order_in_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vfl_leaks.recording._AT_ONCE", 200)
    record = Record(tmp_path, every=2)
    sent = {}
    for round_ in range(4):
        for receiver in ("a", "b"):
            tensor = torch.randn(5, 4)
            record.note("embedding", StepKey("splitnn", round_, 0), tensor, "p0", receiver)
            sent[round_, receiver] = tensor.clone()
            # The receiver may change what came.
            tensor.zero_()
    found = [*record.messages(receiver="a")]
    assert [key for key, _ in found] == [
        Key("splitnn", "embedding", r, 0, "p0", "a") for r in (0, 2)
    ]
    assert all(torch.equal(tensor, sent[key.round, "a"]) for key, tensor in found)
    assert len([*record.messages(sender="p0")]) == 4
    assert len([*tmp_path.iterdir()]) > 1


def test_sizes_tell_rows_batches_and_rounds() -> None:
    seen = [
        Seen("splitnn", "embedding", "p1", "p0", round_, rows * 32)
        for round_ in range(3)
        for rows in (64, 64, 12)
    ]
    (line,) = read_sizes(seen, 32)
    assert line.sizes == ((2048, 6), (384, 3))
    assert line.tells == "140 rows per round, in batches of 64; 3 rounds"


def test_a_plug_in_brings_an_attack(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("first", "tests.harness.scenes:FIRST", "vfl.attacks")
    monkeypatch.setattr(
        "vfl_party.base.plugins.entry_points",
        lambda group: [entry] if group == "vfl.attacks" else [],
    )
    assert {"first", "norm"} <= set(attacks.REGISTRY.names())
    assert play("first", scene(signs))["nothing"].value == pytest.approx(
        0.5 + (UP - DOWN) / 2, abs=0.02
    )

"""Attacks that train: on columns with a known share of noise, and on encoders with and without the
label in them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.errors import assert_names, raises
from tests.harness.scenes import labelled_scene, linear_scene, of, replayed
from vfl_leaks import attacks, scene
from vfl_leaks.attacks.completion import FROZEN, KNOWN, MIXMATCH, TUNED, draw_stratified
from vfl_leaks.fitting import decode, r2_by_column
from vfl_leaks.result import ALL_EPOCHS, AttackLine, Rehearsed, Spread
from vfl_leaks.scene import EncoderInputs, Figure, Scene, UnfitError

_BEST = "best-read category"


def play(kind: str, where: Scene) -> dict[str, Figure]:
    return {
        f"{figure.of} {figure.unit} {figure.knows}": figure
        for figure in attacks.load(kind, "test").play(where)
    }


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_columns_are_decoded_as_well_as_the_noise_lets(noise: float) -> None:
    """z = xA + N(0, noise²): the best decoder has R² = 1 / (1 + noise²)."""
    found = play("columns", linear_scene(noise, rows=4000))
    best = 1 / (1 + noise**2)
    mean = found["p1: mean of columns R² 400 rows"]
    assert best - 0.12 < mean.value < best + 0.03
    assert len(found) == 3 + 6
    assert abs(mean.chance or 0) < 0.1
    assert dict(mean.baselines) == {}


@pytest.mark.parametrize("rounds", [2, 9])
def test_over_all_epochs_noise_averages_out_if_the_encoder_stays(rounds: int) -> None:
    """z = xA + N(0, 1) in each round: R² = 1/2 of one, and rounds / (rounds + 1) of their mean."""
    found = play("columns", linear_scene(1.0, rows=4000, rounds=rounds))
    last, every = (
        found[f"p1: mean of columns R² 400 rows{knows}"] for knows in ("", ", all epochs")
    )
    assert 0.5 - 0.12 < last.value < 0.5 + 0.03
    assert rounds / (rounds + 1) - 0.12 < every.value < rounds / (rounds + 1) + 0.03
    assert every.chance == last.chance
    # Single columns stand there once.
    assert len(found) == 3 + 6


def test_rows_are_found_again_more_often_over_all_epochs() -> None:
    """N(0, 0.3) on each of nine messages hides a row from one of them, and less from their mean."""
    last, every = play("reidentify", linear_scene(0.3, rows=4000, rounds=9)).values()
    assert every.knows == f"{last.knows}, {scene.ALL_EPOCHS}"
    assert every.value > last.value + 0.2
    (one,) = play("reidentify", linear_scene(0.3, rows=4000)).values()
    assert not one.knows.endswith(scene.ALL_EPOCHS)


def test_over_all_epochs_an_encoder_that_moves_is_read_as_well_as_in_the_last() -> None:
    """Side by side nine unrelated encoders say as much as the last alone."""
    found = play("columns", linear_scene(0.0, rows=4000, rounds=9, moves=True))
    last, every = (
        found[f"p1: mean of columns R² 400 rows{knows}"] for knows in ("", ", all epochs")
    )
    assert every.value == pytest.approx(last.value, abs=0.02)
    assert last.value > 0.9


def test_all_epochs_are_a_line_of_their_own_beside_the_last() -> None:
    (all_epochs,) = {ALL_EPOCHS, scene.ALL_EPOCHS}
    made = {
        knows: AttackLine(
            "columns", "p0", "p1: mean of columns", knows, "R²", Spread((value,)), place=place
        )
        for knows, value, place in (
            ("125 rows", 0.2, "splitnn/embedding"),
            (f"125 rows, {all_epochs}", 0.6, "splitnn/embedding"),
            ("50 rows", 0.3, "evaluate/embedding"),
        )
    }
    worst = Rehearsed("one", (1,), "", None, 0, tuple(made.values())).worst
    assert [line.knows for line in worst] == ["50 rows", f"125 rows, {all_epochs}"]


def test_without_the_information_columns_are_as_unknown_as_by_chance() -> None:
    mean = play("columns", linear_scene(1e4))["p1: mean of columns R² 120 rows"]
    assert mean.value == pytest.approx(mean.chance or 0, abs=0.06)
    assert mean.value < 0.05


def test_what_own_columns_tell_stands_beside() -> None:
    found = play("columns", linear_scene(0.5, own=True))
    assert found["p1: c0 R² 120 rows"].baselines["own columns"] > 0.9
    assert found["p1: c1 R² 120 rows"].baselines["own columns"] < 0.1


def test_an_input_of_one_value_in_the_known_rows_tells_nothing_of_others() -> None:
    """Divided by next to nothing, it would drown all that the others say."""
    made = torch.Generator().manual_seed(1)
    x = torch.randn(600, 3, generator=made)
    beside = torch.cat([x, torch.zeros(600, 1)], dim=1)
    beside[300:, 3] = 1.0
    alone, found = (
        decode(each[:300], x[:300], each[300:], 1)
        for each in (torch.cat([x, 0 * x[:, :1]], dim=1), beside)
    )
    assert torch.equal(found, alone)
    assert min(r2_by_column(found, x[300:])) > 0.9


@pytest.mark.parametrize("noise", [0.1, 1e4])
def test_categories_are_decoded_and_stand_beside_the_most_frequent(noise: float) -> None:
    """One column of three categories, of which the embeddings tell all or nothing, and a number
    that never changes.
    """
    made = torch.Generator().manual_seed(3)
    codes_N1 = torch.multinomial(
        torch.tensor([0.2, 0.5, 0.3]), 1200, replacement=True, generator=made
    )[:, None]
    # Categories that training did not have are not judged.
    codes_N1[::100] = -1
    hot = torch.eye(4)[codes_N1[:, 0]]
    z = hot @ torch.randn(4, 5, generator=made) + noise * torch.randn(1200, 5, generator=made)
    names = ("same", "town=missing", "town=Gera", "town=Kiel")
    columns = EncoderInputs(names, torch.ones(1200, 1), codes_N1, {"town": range(1, 4)})
    sent = replayed([of(z, np.arange(1200))])
    whole = linear_scene(0.0)
    where = Scene(**{**whole.__dict__, "embeddings": {"p1": sent}, "columns": {"p1": columns}})
    found = play("columns", where)
    figure = found["p1: town accuracy 120 rows"]
    assert [figure.of for figure in found.values()] == [
        f"p1: {of}" for of in ("mean of categories", _BEST, "town", "mean of categories")
    ]
    assert figure.baselines["most frequent"] == pytest.approx(0.5, abs=0.05)
    if noise < 1:
        assert figure.value > 0.95
        assert (figure.chance or 1) < 0.6
    else:
        assert figure.value < 0.6
    assert_names(found["p1: mean of categories accuracy 120 rows"].note, "p1")
    (again,) = play("reidentify", where).values()
    # Many rows have the same town.
    assert again.value < 0.02


def test_columns_of_one_value_are_nothing_to_read() -> None:
    whole = linear_scene(0.0)
    where = Scene(
        **{**whole.__dict__, "columns": {"p1": EncoderInputs(("same",), torch.ones(1200, 1))}}
    )
    for kind in ("columns", "reidentify"):
        with raises(UnfitError):
            play(kind, where)


def test_when_the_decoder_learns_nothing_it_says_so() -> None:
    mean = play("columns", linear_scene(1e4))["p1: mean of columns R² 120 rows"]
    wanted = "from embeddings of splitnn and from shuffled embeddings (chance) the decoder learned nothing"
    assert mean.note.startswith(f"p1: {wanted}")
    assert_names(mean.note, "p1")
    assert mean.value == mean.chance


def test_a_category_of_many_values_silences_no_other_column() -> None:
    """Its 200 columns of 0 and 1 cannot be read; those of numbers can, as they can without it."""
    whole = linear_scene(0.1)
    alone = play("columns", whole)["p1: mean of columns R² 120 rows"]
    own, values = (
        whole.columns["p1"],
        torch.from_numpy(np.random.default_rng(1).integers(0, 200, 1200)),
    )
    group = range(6, 206)
    wide = EncoderInputs(
        (*own.names, *(f"k={n}" for n in range(200))), own.values, values[:, None], {"k": group}
    )
    beside = replace(whole, columns={"p1": wide})
    mean = play("columns", beside)["p1: mean of columns R² 120 rows"]
    assert mean.value == alone.value > 0.8
    (found,) = play("reidentify", beside).values()
    assert found.value > 0.5


def test_rows_are_found_again_only_if_their_embeddings_tell() -> None:
    (clear,) = play("reidentify", linear_scene(0.0)).values()
    (blurred,) = play("reidentify", linear_scene(1e4)).values()
    assert clear.value > 0.8
    assert clear.chance == pytest.approx(1 / 500)
    assert blurred.value < 0.02


def test_a_sender_of_too_few_rows_is_unfit() -> None:
    with raises(UnfitError, names="100"):
        play("columns", linear_scene(0.0, rows=60))


def test_completion_finds_what_training_put_into_the_encoder_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vfl_leaks.attacks.completion._STEPS", 512)
    informed, blind = (
        play("completion", labelled_scene(True)),
        play("completion", labelled_scene(False)),
    )
    for knows, alone in (
        (FROZEN, "from scratch"),
        (TUNED, "from scratch"),
        (MIXMATCH, "from scratch, MixMatch"),
    ):
        found = informed[f"labels AUC {knows}"]
        assert found.value > 0.95
        assert max(found.baselines.values()) < 0.65
        none = blind[f"labels AUC {knows}"]
        # Nothing beyond the baseline.
        assert none.value == pytest.approx(none.baselines[alone], abs=0.05)
    accuracy = blind[f"labels accuracy {KNOWN} labels, frozen"]
    assert accuracy.baselines["majority"] == pytest.approx(0.7, abs=0.03)
    assert set(accuracy.baselines) == {
        "from scratch",
        "own SSL, frozen",
        "own SSL, tuned",
        "majority",
    }


def test_completion_of_a_regression_is_judged_by_r2() -> None:
    informed, blind = (
        play("completion", labelled_scene(each, numbers=True)) for each in (True, False)
    )
    assert [*informed] == [f"labels R² {FROZEN}", f"labels R² {TUNED}"]
    for name, figure in informed.items():
        assert figure.value > 0.9
        assert max(figure.baselines.values()) < 0.1
        assert blind[name].value < 0.1
    tuned = blind[f"labels R² {TUNED}"]
    assert tuned.value == pytest.approx(tuned.baselines["from scratch"], abs=0.05)


def test_auxiliary_labels_are_stratified() -> None:
    labels = torch.tensor([0] * 900 + [1] * 99 + [2])
    rows = draw_stratified(labels, np.arange(1000), 3, 1)
    # The rare class costs the largest one a row.
    assert torch.bincount(labels[rows]).tolist() == [71, 8, 1]
    assert len(set(rows.tolist())) == KNOWN
    assert np.array_equal(rows, draw_stratified(labels, np.arange(1000), 3, 1))


def test_completion_needs_an_encoder_and_rows() -> None:
    whole = labelled_scene(True)

    def other(**more: Any) -> Scene:
        return Scene(**{**whole.__dict__, **more})

    with raises(UnfitError):
        play("completion", other(encoder=None))
    with raises(UnfitError, names="160"):
        play("completion", other(rows={**whole.rows, "train": np.arange(100)}))
    with raises(UnfitError, names="100"):
        play("columns", other(embeddings={"p2": replayed([])}))

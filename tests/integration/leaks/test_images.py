"""The attack on images: what an encoder that hides nothing gives, what noise gives, and what is no
image.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

from tests.harness.errors import assert_names, raises
from tests.harness.scenes import image_scene, linear_scene, replayed
from vfl_leaks import attacks
from vfl_leaks.api import Leaks
from vfl_leaks.attacks.images import decode_images
from vfl_leaks.rehearsal import Played
from vfl_leaks.result import AttackLine, Drawing, Rehearsed, Spread, collect_drawings
from vfl_leaks.scene import ALL_EPOCHS, Figure, Scene, UnfitError
from vfl_party.methods.mocosfl.resist import measure_likeness


def play(where: Scene) -> dict[str, Figure]:
    """Returns the figures of the last epoch, by unit."""
    figures = attacks.load("images", "test").play(where)
    return {figure.unit: figure for figure in figures if not figure.knows.endswith(ALL_EPOCHS)}


def turned(x: Tensor) -> Tensor:
    """An encoder that can be undone: an orthogonal matrix."""
    made = torch.Generator().manual_seed(1)
    found: Tensor = x @ torch.linalg.qr(torch.randn(64, 64, generator=made)).Q
    return found


def noise(x: Tensor, seed: int = 1) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))


def noisy(x: Tensor, seed: int = 1) -> Tensor:
    return turned(x) + 2 * noise(x, seed)


def floor() -> tuple[float, float]:
    """SSIM and MSE of the mean of all images: what is known without a message, but for the few
    known rows' spread.
    """
    images = torch.tensor(load_digits().images[:1200, None] / 16.0, dtype=torch.float32)
    like = measure_likeness(images.mean(dim=0).expand_as(images), images)
    return like.ssim, like.mse


@pytest.mark.parametrize("high", [1.0, 16.0])
def test_an_encoder_that_can_be_undone_gives_the_images(high: float) -> None:
    """Whatever the scale of pixels and inputs: SSIM is near 1, and MSE near 0."""
    found = play(image_scene(turned, high=high))
    ssim, mse = found["SSIM"], found["MSE"]
    assert ssim.value > 0.85
    assert mse.value < 0.1 * mse.baselines["mean image"]
    assert (ssim.knows, ssim.of, ssim.detail, mse.detail) == ("120 rows", "p1: images", False, True)
    wanted_ssim, wanted_mse = floor()
    for each, wanted in ((ssim, wanted_ssim), (mse, wanted_mse)):
        assert each.baselines["mean image"] == pytest.approx(wanted, rel=0.05)
        # From shuffled embeddings.
        assert each.chance == pytest.approx(wanted, rel=0.06)
        assert "own columns" not in each.baselines


def test_over_all_epochs_noise_averages_out() -> None:
    whole = image_scene(noisy)
    more = [image_scene(partial(noisy, seed=n)) for n in range(2, 10)]
    batches = [
        replace(b, round=n)
        for n, each in enumerate((whole, *more))
        for b in each.embeddings["p1"]()
    ]
    figures = attacks.load("images", "test").play(
        replace(whole, embeddings={"p1": replayed(batches)})
    )
    found = {(figure.unit, figure.knows): figure for figure in figures}
    last, every = (found["SSIM", f"120 rows{knows}"] for knows in ("", ", all epochs"))
    assert last.baselines == every.baselines
    assert every.value > last.value + 0.1 > last.baselines["mean image"]
    assert found["MSE", "120 rows, all epochs"].value < found["MSE", "120 rows"].value


def test_noise_gives_the_mean_image() -> None:
    found = play(image_scene(noise))
    for each in found.values():
        assert each.value == pytest.approx(each.baselines["mean image"], rel=0.03)
    if found["SSIM"].value == found["SSIM"].baselines["mean image"]:
        assert_names(found["SSIM"].note, "p1")


def test_what_the_own_half_tells_stands_beside() -> None:
    found = play(image_scene(noise, own=True))["SSIM"]
    assert found.baselines["own columns"] > found.baselines["mean image"] + 0.1
    assert found.value < found.baselines["own columns"] - 0.1


def test_with_many_rows_the_convolutional_decoder_is_tried_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is taken where it has less error on the rows that decide: here the dense one gives nothing
    but grey.
    """
    monkeypatch.setattr("vfl_leaks.attacks.images._MIN_CONVOLUTIONAL", 200)
    monkeypatch.setattr(
        "vfl_leaks.attacks.images.decode_pixels",
        lambda _z, y, to, _seed: torch.ones(len(to), y.shape[1]),
    )
    monkeypatch.setattr("vfl_leaks.attacks.images._STEPS", 150)
    images = torch.tensor(load_digits().images[:300, None] / 16.0, dtype=torch.float32)
    guess = decode_images(images.flatten(1)[:250], images[:250], images.flatten(1)[250:], 1)
    assert guess.by == "convolutional"
    assert guess.images.shape == (50, 1, 8, 8)
    few = decode_images(images.flatten(1)[:100], images[:100], images.flatten(1)[250:], 1)
    assert few.by == "mean image"


def test_pixels_are_left_to_images_and_columns_to_columns() -> None:
    with raises(UnfitError):
        play(linear_scene(0.0))
    pixels, table = image_scene(turned), linear_scene(0.0)
    with raises(UnfitError):
        attacks.load("columns", "test").play(pixels)
    both = replace(
        pixels,
        embeddings={"p1": pixels.embeddings["p1"], "p2": table.embeddings["p1"]},
        columns={"p1": pixels.columns["p1"], "p2": table.columns["p1"]},
    )
    figures = attacks.load("columns", "test").play(both)
    assert {figure.of.partition(":")[0] for figure in figures} == {"p2"}
    assert_names(figures[-1].note, "p1")
    assert {figure.of for figure in play(both).values()} == {"p1: images"}


def error(mse: float, place: str, *, mean: float = 0.1, chance: float = 0.08) -> AttackLine:
    beside = {"mean image": Spread((mean,))}
    return AttackLine(
        "images",
        "p0",
        "p1: images",
        "9 rows",
        "MSE",
        Spread((mse,)),
        None,
        Spread((chance,)),
        None,
        beside,
        place=place,
    )


def test_of_an_error_less_is_a_larger_leak() -> None:
    small, large = error(0.02, "splitnn/embedding"), error(0.06, "evaluate/embedding")
    assert (small.floor, small.excess) == (0.08, pytest.approx(0.75))
    assert error(0.0, "").excess == 1.0
    assert error(0.08, "").excess == 0.0
    for lines in ((small, large), (large, small)):
        (worst,) = Rehearsed("one", (1,), "", None, 0, lines).worst
        assert worst.place == "splitnn/embedding"


def test_the_exchange_that_gives_most_is_drawn_for_each_recipe_and_party() -> None:
    (figure,) = [each for each in play(image_scene(turned)).values() if each.shown]
    better = replace(figure, value=1.0, place="evaluate/embedding")
    (drawing,) = collect_drawings([Played("images", "", "p0", (figure, better))])
    assert (drawing.place, drawing.attacker, drawing.shown.party) == (
        "evaluate/embedding",
        "p0",
        "p1",
    )
    assert [name for name, _ in drawing.shown.rows] == ["private", "reconstructed", "mean image"]
    assert all(images.shape == (16, 1, 8, 8) for _, images in drawing.shown.rows)

    def rehearsed(name: str, of: Drawing) -> Rehearsed:
        return Rehearsed(name, (1,), "", None, 0, (), drawings=(of,))

    drawn = Leaks(
        tuple(rehearsed(name, drawing) for name in ("a/plain.toml", "a plain.toml", "b"))
    ).images()
    assert [*drawn] == [
        "images-a-plain.toml-p1.png",
        "images-a-plain.toml-p1-2.png",
        "images-b-p1.png",
    ]
    assert all(png.startswith(b"\x89PNG") for png in drawn.values())

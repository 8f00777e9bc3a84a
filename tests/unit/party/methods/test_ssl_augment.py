"""Views of images against torchvision's functional transforms, image by image; of tables by what
they promise.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torchvision.transforms.v2 import RandomResizedCrop
from torchvision.transforms.v2 import functional as oracle

from vfl_common.config.base import parse
from vfl_common.errors import InputError
from vfl_party.data.inputs.features import HIDDEN, Features
from vfl_party.selfsup.augment import (
    YIQ,
    blur,
    crop,
    draw_blurs,
    draw_colours,
    draw_crops,
    get_radius,
    make_augment,
    recolour,
)
from vfl_party.selfsup.settings import AugmentSettings

SHAPES = [(1, 14, 14), (3, 32, 32), (3, 32, 16), (2, 9, 14)]
# Every value tells its row and its column.
TABLE = torch.arange(40, dtype=torch.float32).reshape(10, 4)
CODES = torch.randint(3, 8, (10, 2), generator=torch.Generator().manual_seed(0))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(shape: tuple[int, ...], n: int = 24, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(n, *shape, generator=seeded(1))


def one_by_one(x_BCHW: Tensor, change: Callable[[Tensor, int], Tensor]) -> Tensor:
    return torch.stack([change(image, i) for i, image in enumerate(x_BCHW)])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("flip", [0.0, 0.5, 1.0])
def test_crops_are_torchvisions_for_the_same_boxes(
    shape: tuple[int, int, int], flip: float
) -> None:
    x_BCHW, (_, H, W) = images(shape, low=-2, high=3), shape
    boxes = draw_crops(
        len(x_BCHW), H, W, AugmentSettings(flip=flip, crop_scale=(0.05, 1.0)), seeded()
    )
    # The smallest, in the corner.
    boxes[0, :4] = torch.tensor([H - 1, W - 1, 1, 1])
    boxes[1, :4] = torch.tensor([0, 0, H, W])

    def expected(image: Tensor, i: int) -> Tensor:
        top, left, height, width, mirrored = map(int, boxes[i].tolist())
        cut = oracle.resized_crop(image[None], top, left, height, width, [H, W], antialias=False)[0]
        return torch.as_tensor(oracle.horizontal_flip(cut) if mirrored else cut)

    torch.testing.assert_close(crop(x_BCHW, boxes), one_by_one(x_BCHW, expected), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 14), (10, 60)])
def test_boxes_are_distributed_as_torchvisions(height: int, width: int) -> None:
    settings, n = AugmentSettings(), 3000
    boxes = draw_crops(n, height, width, settings, seeded())
    top, left, h, w = boxes[:, :4].T
    assert torch.equal(boxes, boxes.round())
    assert bool(
        (
            (top >= 0)
            & (left >= 0)
            & (h >= 1)
            & (w >= 1)
            & (top + h <= height)
            & (left + w <= width)
        ).all()
    )
    theirs = RandomResizedCrop((height, width), settings.crop_scale, settings.crop_ratio)
    blank = torch.zeros(1, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        params = [theirs.make_params([blank]) for _ in range(n)]
    expected = torch.tensor(
        [[p["top"], p["left"], p["height"], p["width"]] for p in params], dtype=torch.float32
    )
    for ours, other in zip(boxes[:, :4].T, expected.T, strict=True):
        error = math.hypot(ours.std().item(), other.std().item()) / math.sqrt(n)
        assert ours.mean().item() == pytest.approx(other.mean().item(), abs=5 * error + 1e-6)
    assert boxes[:, 4].mean().item() == pytest.approx(0.5, abs=0.05)


def test_a_box_that_never_fits_is_the_middle() -> None:
    settings = AugmentSettings(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0)
    assert draw_crops(2, 10, 20, settings, seeded()).tolist() == [[0, 5, 10, 10, 0]] * 2
    assert draw_crops(1, 21, 10, settings, seeded()).tolist() == [[5, 0, 10, 10, 0]]


def factors(column: int, values: Tensor) -> Tensor:
    colour_B5 = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]).repeat(len(values), 1)
    colour_B5[:, column] = values
    return colour_B5


@pytest.mark.parametrize("shape", [(1, 14, 14), (3, 32, 16)])
@pytest.mark.parametrize(
    ("column", "change"),
    [(0, oracle.adjust_brightness), (1, oracle.adjust_contrast), (2, oracle.adjust_saturation)],
)
def test_colours_are_torchvisions_where_it_need_not_clamp(
    shape: tuple[int, ...], column: int, change: Callable[[Tensor, float], Tensor]
) -> None:
    x_BCHW = images(shape, low=0.4, high=0.6)
    values = torch.linspace(0.6, 1.4, len(x_BCHW))
    expected = one_by_one(x_BCHW, lambda image, i: change(image, values[i].item()))
    torch.testing.assert_close(
        recolour(x_BCHW, factors(column, values)), expected, rtol=0, atol=1e-5
    )


def test_one_matrix_is_all_steps_one_after_the_other() -> None:
    x_BCHW = images((3, 8, 8), low=0.4, high=0.6)
    colour_B5 = draw_colours(
        len(x_BCHW), AugmentSettings(hue=0.0, jitter=1.0, grayscale=0.5), seeded(3)
    )
    assert set(colour_B5[:, 4].tolist()) == {0.0, 1.0}

    def expected(image: Tensor, i: int) -> Tensor:
        brightness, contrast, saturation, _, gray = colour_B5[i].tolist()
        image = oracle.adjust_contrast(oracle.adjust_brightness(image, brightness), contrast)
        image = oracle.adjust_saturation(image, saturation)
        return oracle.rgb_to_grayscale(image, 3) if gray else image

    torch.testing.assert_close(
        recolour(x_BCHW, colour_B5), one_by_one(x_BCHW, expected), rtol=0, atol=1e-5
    )


def test_hue_turns_the_colour_plane_and_leaves_brightness_and_grays() -> None:
    x_BCHW = images((3, 6, 6), low=-2, high=2)
    turns = torch.linspace(-0.5, 0.5, len(x_BCHW))
    yiq = torch.tensor(YIQ)
    before, after = (
        torch.einsum("kc,bchw->bkhw", yiq, x) for x in (x_BCHW, recolour(x_BCHW, factors(3, turns)))
    )
    torch.testing.assert_close(after[:, 0], before[:, 0], rtol=0, atol=1e-5)
    plane_before, plane_after = (torch.complex(x[:, 1], x[:, 2]) for x in (before, after))
    turned = plane_before * torch.exp(-2j * math.pi * turns)[:, None, None]
    torch.testing.assert_close(plane_after, turned, rtol=0, atol=1e-5)
    grays = images((1, 4, 4)).expand(-1, 3, -1, -1)
    torch.testing.assert_close(recolour(grays, factors(3, turns)), grays, rtol=0, atol=1e-5)


def test_hue_turns_the_way_that_torchvisions_does() -> None:
    red = torch.tensor([0.8, 0.2, 0.2]).reshape(1, 3, 1, 1)
    for turn in (0.1, -0.1, 0.3):
        ours, theirs = recolour(red, factors(3, torch.tensor([turn]))), oracle.adjust_hue(red, turn)
        one, other = (x.flatten() - x.mean() for x in (ours, theirs))
        assert torch.cosine_similarity(one, other, dim=0).item() > 0.9


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 14, 14), (1, 64, 32)])
def test_blur_is_torchvisions(shape: tuple[int, int, int]) -> None:
    x_BCHW, (_, H, W) = images(shape, low=-1), shape
    sigma_B = draw_blurs(len(x_BCHW), AugmentSettings(blur=0.5), seeded())
    assert 0 < (sigma_B > 0).sum() < len(sigma_B)
    kernel = [2 * get_radius(W) + 1, 2 * get_radius(H) + 1]

    def expected(image: Tensor, i: int) -> Tensor:
        sigma = sigma_B[i].item()
        return oracle.gaussian_blur(image, kernel, [sigma, sigma]) if sigma else image

    torch.testing.assert_close(
        blur(x_BCHW, sigma_B), one_by_one(x_BCHW, expected), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("shape", [*SHAPES, (1, 1, 1)])
def test_views_of_images_differ_and_repeat_with_the_seed(shape: tuple[int, ...]) -> None:
    x_BCHW = images(shape)
    augment = make_augment(AugmentSettings(blur=0.5), Features(x_BCHW), np.arange(len(x_BCHW)))
    (first,), (second,) = augment.two_views((x_BCHW,), seeded(5))
    assert first.shape == second.shape == x_BCHW.shape
    assert first.isfinite().all()
    again = augment.two_views((x_BCHW,), seeded(5))
    assert torch.equal(first, again[0][0])
    assert torch.equal(second, again[1][0])
    if x_BCHW[0].numel() > 1:
        assert bool((first - second).flatten(1).abs().amax(1).gt(1e-3).float().mean() > 0.9)


def test_each_image_has_random_numbers_of_its_own() -> None:
    x_BCHW = images((1, 14, 14), n=1).repeat(20, 1, 1, 1)
    ((first,), _) = make_augment(AugmentSettings(), Features(x_BCHW), np.arange(20)).two_views(
        (x_BCHW,), seeded()
    )
    assert len(torch.unique(first, dim=0)) > 15


def test_without_any_change_a_view_is_the_image() -> None:
    x_BCHW = images((3, 7, 7), low=-3)
    settings = AugmentSettings(crop_scale=(1, 1), crop_ratio=(1, 1), flip=0, jitter=0, grayscale=0)
    ((view,), _) = make_augment(settings, Features(x_BCHW), np.arange(3)).two_views(
        (x_BCHW,), seeded()
    )
    torch.testing.assert_close(view, x_BCHW, rtol=0, atol=1e-5)


def test_numbers_are_replaced_by_others_of_their_column_from_the_pool() -> None:
    pool = np.array([7, 8, 9])
    augment = make_augment(AugmentSettings(corruption=0.3), Features(TABLE), pool)
    x_BF = TABLE[:3].repeat(2000, 1)
    views = augment.two_views((x_BF,), seeded())
    assert not torch.equal(views[0][0], views[1][0])
    for (view,) in views:
        # The pool's rows are not among those of the batch.
        replaced = view != x_BF
        assert replaced.float().mean(0).tolist() == pytest.approx([0.3] * 4, abs=0.03)
        # The column.
        assert torch.equal(view % 4, x_BF % 4)
        rows, counts = torch.unique(view[replaced] // 4, return_counts=True)
        assert rows.tolist() == pool.tolist()
        assert (counts / counts.sum()).tolist() == pytest.approx([1 / 3] * 3, abs=0.02)
        # Features are replaced one by one, not whole rows.
        assert int(replaced.sum(1).unique().numel()) == 5


def test_categories_are_hidden_as_often_as_numbers_are_replaced() -> None:
    features = Features(TABLE, CODES, (8, 8))
    augment = make_augment(AugmentSettings(), features, np.arange(10))
    rows = np.arange(10).repeat(500)
    codes = features.inputs(rows)[1]
    for _, view in augment.two_views(features.inputs(rows), seeded()):
        assert view.dtype is torch.int64
        assert (view == HIDDEN).float().mean(0).tolist() == pytest.approx([0.3, 0.3], abs=0.03)
        assert torch.equal(view[view != HIDDEN], codes[view != HIDDEN])


@pytest.mark.parametrize(("corruption", "changed"), [(0.0, False), (1.0, True)])
def test_none_or_all_of_a_table_is_replaced(corruption: float, changed: bool) -> None:
    features = Features(TABLE[:5], CODES[:5], (8, 8))
    augment = make_augment(AugmentSettings(corruption=corruption), features, np.array([4]))
    first, _ = augment.two_views(features.inputs(np.arange(4)), seeded())
    assert torch.equal(first[0], TABLE[4].expand(4, 4) if changed else TABLE[:4])
    assert torch.equal(first[1], torch.full((4, 2), HIDDEN) if changed else CODES[:4])


def test_one_view_of_a_table_may_stay_as_it_is_and_views_repeat_with_the_seed() -> None:
    features = Features(TABLE, CODES, (8, 8))
    inputs = features.inputs(np.arange(10))
    augment = make_augment(AugmentSettings(corrupt="one"), features, np.arange(10))
    first, second = augment.two_views(inputs, seeded())
    assert all(torch.equal(ours, given) for ours, given in zip(first, inputs, strict=True))
    assert not torch.equal(second[0], inputs[0])
    again = augment.two_views(inputs, seeded())[1]
    assert all(torch.equal(ours, other) for ours, other in zip(second, again, strict=True))


def test_the_released_code_replaces_the_same_number_of_features_in_each_row_from_their_range() -> (
    None
):
    # Six numbers and four categories.
    x = torch.arange(600.0).reshape(100, 6)
    codes = torch.full((100, 4), 5)
    settings = AugmentSettings(exact_share=True, replacement="uniform", corrupt="one")
    augment = make_augment(settings, Features(x, codes, (9,) * 4), np.arange(50))
    first, (view, hidden) = augment.two_views((x, codes), torch.Generator().manual_seed(3))
    assert torch.equal(first[0], x)
    changed = (view != x).sum(dim=1) + (hidden != codes).sum(dim=1)
    assert changed.eq(3).all()
    # Of the pool's rows, which are the first half; between what these have.
    new = view[view != x]
    assert new.max() <= 299
    assert not torch.isin(new, x).all()
    assert (view != x).float().mean().item() == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize(
    ("share", "columns", "count"), [(0.3, 10, 3), (0.29, 100, 29), (0.3, 3, 0)]
)
def test_exactly_a_share_of_the_features_is_rounded_down(
    share: float, columns: int, count: int
) -> None:
    x = torch.arange(2 * columns, dtype=torch.float32).reshape(2, columns)
    settings = AugmentSettings(corruption=share, exact_share=True)
    ((view,), _) = make_augment(settings, Features(x), np.array([1])).two_views(
        (x[:1].repeat(50, 1),), seeded()
    )
    assert (view != x[0]).sum(1).tolist() == [count] * 50


def test_a_table_may_have_categories_alone() -> None:
    features = Features(torch.empty(10, 0), CODES, (8, 8))
    views = make_augment(AugmentSettings(), features, np.arange(10)).two_views(
        features.inputs(np.arange(4)), seeded()
    )
    assert [view[0].shape for view in views] == [(4, 0)] * 2


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"crop_scale": [0.5, 0.2]}, "(got [0.5, 0.2]). Correct crop_scale"),
        ({"crop_scale": [0.0, 1.0]}, "crop_scale"),
        ({"crop_ratio": [0.0, 1.0]}, "(got [0.0, 1.0]). Correct crop_ratio"),
        ({"hue": 0.6}, "hue: "),
        ({"corruption": 1.5}, "corruption: "),
        ({"corrupt": "none"}, "corrupt: "),
        ({"rotate": 1}, "unknown key 'rotate'"),
    ],
)
def test_settings_out_of_range_are_refused(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(AugmentSettings, given, "recipe.toml")
    assert complaint in str(caught.value)

"""Rows in blocks, and the check that chooses the blocks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vfl_party.models.row_blocks import (
    Blocks,
    describe_inexact,
    find_blocks,
    in_blocks,
    sample_rows,
)

VECTORS, IMAGES, CONSTANT = Blocks(32, 512), Blocks(8, 32), Blocks(64, 64)


def sample(*shape: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(sample_rows(shape), *shape, generator=generator),)


class Counted:
    """Doubles its rows, and notes how many come at once."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return 2 * x


@pytest.mark.parametrize(
    ("n", "blocks", "sizes"),
    [
        (1, None, [32]),
        (33, None, [64]),
        (600, None, [512, 96]),
        (70, CONSTANT, [64, 64]),
        (0, None, [0]),
    ],
)
def test_rows_are_computed_in_whole_blocks(n: int, blocks: Blocks | None, sizes: list[int]) -> None:
    x, double = torch.randn(n, 3), Counted()
    assert torch.equal(in_blocks(double, blocks, x), 2 * x)
    assert double.sizes == sizes


def test_images_have_smaller_blocks() -> None:
    double = Counted()
    for side in (9, 8):
        assert len(in_blocks(double, None, torch.randn(42, 1, side, side))) == 42
    # Small ones are computed as vectors are.
    assert double.sizes == [32, 16, 64]


def by_count(x: Tensor) -> Tensor:
    """Depends on the number of rows alone, which a constant block holds constant."""
    return x + len(x)


def by_remainder(x: Tensor) -> Tensor:
    return torch.cat([x[: len(x) // 64 * 64], x[len(x) // 64 * 64 :] + 1e-7])


def by_mean(x: Tensor) -> Tensor:
    return x - x.mean(dim=0)


def by_place(x: Tensor) -> Tensor:
    return x + torch.arange(len(x))[:, None]


def drawn(x: Tensor) -> Tensor:
    return x + torch.rand(len(x), 1)


def broken(x: Tensor) -> Tensor:
    raise ZeroDivisionError(len(x))


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (lambda x: 2 * x, VECTORS),
        # Not a number is the same bits again.
        (lambda x: x / 0 * 0, VECTORS),
        (by_count, CONSTANT),
        (by_remainder, CONSTANT),
    ],
)
def test_the_check_chooses_blocks_in_which_rows_keep_their_bits(
    model: Callable[[Tensor], Tensor], blocks: Blocks
) -> None:
    assert find_blocks(model, [sample(5)]) == blocks


@pytest.mark.parametrize("model", [by_mean, by_place, drawn, broken])
def test_the_check_says_that_no_blocks_do(model: Callable[[Tensor], Tensor]) -> None:
    found = find_blocks(model, [sample(5)])
    assert (found.rows, found.most) == (VECTORS.rows, VECTORS.most)
    why = "failed with ZeroDivisionError" if model is broken else "a row has other bits among"
    assert why in found.why
    assert describe_inexact({"top": VECTORS, "encoder": found}) == f"encoder: {found.why}"


def test_one_sample_of_several_decides() -> None:
    model = lambda x: by_mean(x) if x.shape[1] == 2 else x  # noqa: E731
    assert not find_blocks(model, [sample(3)]).why
    assert find_blocks(model, [sample(3), sample(2)]).why


@pytest.mark.parametrize("n", [1, 2, 7, 8, 31, 32, 33, 257, 600])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(8, 10), (8,)),
        (nn.Sequential(nn.Linear(30, 5), nn.SiLU(), nn.Linear(5, 3), nn.Sigmoid()), (30,)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(196, 5)), (1, 9, 9)),
    ],
)
@torch.no_grad()
def test_what_the_check_has_chosen_holds_for_other_rows(
    layer: nn.Module, shape: tuple[int, ...], n: int
) -> None:
    """Those of the check come from a generator with another seed."""
    blocks = find_blocks(layer.eval(), [sample(*shape)])
    if blocks.why:
        pytest.skip(f"exact: false is said here: {blocks.why}")
    x = torch.randn(700, *shape, generator=torch.Generator().manual_seed(1))
    whole = in_blocks(layer, blocks, x)
    for start in (0, 13, 700 - n):
        assert torch.equal(in_blocks(layer, blocks, x[start : start + n]), whole[start : start + n])

"""Numbers in a few bits, the largest of a row, halves: what arrives is as near as promised,
whatever is sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.harness.errors import raises
from vfl_common.bundle import DType, TensorSpec
from vfl_common.packing import bits as halves
from vfl_common.packing import coders
from vfl_common.packing.bits import (
    LARGEST,
    Dither,
    PackedRows,
    bytes_per_row,
    derive_subseed,
    pack,
    unpack,
)
from vfl_common.packing.coders import Bits, Coder, Half, TopK

WIDTHS = (8, 4, 2)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
TABLES = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 4), st.integers(1, 19)), elements=FLOATS
)


def worst(x_RW: Any, sent: PackedRows, bits: int, steps: float) -> None:
    """Asserts that no number has moved by more than ``steps`` of its row, but for float32's own
    rounding.
    """
    got_RW = unpack(sent, x_RW.shape[1], bits)
    assert np.isfinite(got_RW).all()
    step_R = sent.scale.astype(np.float64)[:, None]
    largest_R = np.abs(x_RW).max(axis=1, keepdims=True).astype(np.float64)
    slack = 2.0**-21 * (largest_R + step_R * 2**bits) + 2.0**-149
    assert (np.abs(got_RW.astype(np.float64) - x_RW) <= steps * step_R + slack).all()
    range_R = x_RW.max(axis=1).astype(np.float64) - sent.low
    rounding = 2.0**-7 if (sent.scale.view(np.uint32) << 16 == 0).all() else 2.0**-22
    assert (sent.scale <= range_R / (2**bits - 1) * (1 + rounding) + 2.0**-133).all()


@pytest.mark.parametrize("bits", WIDTHS)
@given(x_RW=TABLES)
def test_minimum_and_step_in_two_bytes_still_span_the_row(bits: Any, x_RW: Any) -> None:
    # bfloat16 has no larger number.
    if np.abs(x_RW).max() > 2.0**127 * (2 - 2.0**-7):
        return
    sent = pack(x_RW, bits, Dither(3), halves=True)
    for each in (sent.low, sent.scale):
        assert (halves.from_bfloat16(halves.to_bfloat16(each)) == each).all()
    assert (sent.low <= x_RW.min(axis=1)).all()
    # What is not negative stays so.
    assert ((sent.low >= 0) | (x_RW.min(axis=1) < 0)).all()
    worst(x_RW, sent, bits, 1.0)
    coder, plain = Bits(bits, half=True), Bits(bits)
    if coder.parts(x_RW.shape) is None:
        return
    got_RW = coder.decode(coder.encode(x_RW, 3), x_RW.shape)
    assert (got_RW == unpack(pack(x_RW, bits, Dither(3), halves=True), x_RW.shape[1], bits)).all()
    spec, whole = coder.parts(x_RW.shape), plain.parts(x_RW.shape)
    assert whole is None or sum(each.nbytes for each in whole.values()) - 4 * len(x_RW) == sum(
        each.nbytes for each in (spec or {}).values()
    )


@pytest.mark.parametrize("bits", WIDTHS)
@given(x_RW=TABLES)
def test_a_number_moves_by_half_a_step_to_nearest_and_a_step_at_random(
    bits: int, x_RW: Any
) -> None:
    for dither, steps in ((None, 0.5), (Dither(3), 1.0)):
        sent = pack(x_RW, bits, dither)
        assert sent.packed.shape == (len(x_RW), bytes_per_row(x_RW.shape[1], bits))
        worst(x_RW, sent, bits, steps)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_odd_rows_survive(bits: int, stochastic: bool) -> None:
    tiny = np.float32(1e-45)
    x_RW = np.array(
        [
            [0.0] * 5,
            [7.25] * 5,
            [tiny, 0.0, 3 * tiny, -tiny, 0.0],
            [LARGEST, -LARGEST, 0.0, LARGEST, 1.0],
            [LARGEST] * 5,
            [1e38, 3e38, 2e38, 1e38, 3e38],
            [-1e-38, 1e-38, 0.0, 1e-39, -1e-39],
            [1e6, 1e6 + 0.0625, 1e6, 1e6, 1e6],
        ],
        np.float32,
    )
    sent = pack(x_RW, bits, Dither(1) if stochastic else None)
    worst(x_RW, sent, bits, 1.0 if stochastic else 0.5)
    got_RW = unpack(sent, 5, bits)
    # Constant.
    for row in (0, 1, 4):
        assert (got_RW[row] == x_RW[row]).all()
    # A row's minimum is exact: what is not negative stays so.
    assert (got_RW.min(axis=1) == x_RW.min(axis=1)).all()


@pytest.mark.parametrize("shape", [(3, 1), (1, 1), (40_000, 1), (2, 70_001), (0, 7), (3, 0)])
@pytest.mark.parametrize("bits", WIDTHS)
def test_narrow_wide_and_empty_tables_survive(shape: tuple[int, int], bits: int) -> None:
    x_RW = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    sent = pack(x_RW, bits, Dither(2))
    got_RW = unpack(sent, shape[1], bits)
    assert got_RW.shape == shape
    if x_RW.size:
        worst(x_RW, sent, bits, 1.0)


@pytest.mark.parametrize("bits", WIDTHS)
def test_rounding_at_random_is_right_in_the_mean(bits: int) -> None:
    x_RW = np.random.default_rng(5).uniform(-1, 1, (4, 33)).astype(np.float32)
    n, total = 4000, np.zeros(x_RW.shape)
    for seed in range(n):
        total += unpack(pack(x_RW, bits, Dither(seed)), 33, bits)
    step_R = pack(x_RW, bits, None).scale[:, None]
    off = np.abs(total / n - x_RW) / step_R
    # Five times the largest standard deviation of a mean.
    assert off.max() < 5 * 0.5 / np.sqrt(n)
    nearest = np.abs(unpack(pack(x_RW, bits, None), 33, bits) - x_RW) / step_R
    # Which rounding to nearest is not.
    assert nearest.max() > 10 * off.max()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others() -> None:
    x_RW = np.random.default_rng(1).normal(size=(50, 37)).astype(np.float32)
    one, same, other = (
        pack(x_RW, 4, Dither(derive_subseed(7, "p1", 0, seed, "z"))).packed.tobytes()
        for seed in (1, 1, 2)
    )
    assert one == same
    assert one != other
    # Row after row, however many are worked on at a time.
    dither = Dither(derive_subseed(7, "p1", 0, 1, "z"))
    assert b"".join(pack(row[None], 4, dither).packed.tobytes() for row in x_RW) == one


def test_what_is_drawn_is_the_same_with_every_version_of_numpy() -> None:
    assert derive_subseed(7, "p1", 0, 1, "z") == 2750350685137052510
    assert Dither(7).sixteenths(1, 5).tolist()[0] == [
        24271,
        64080,
        29299,
        2874,
        47803,
        537,
        39982,
        38487,
    ]


def test_packed_bits_are_where_the_format_says() -> None:
    x_RW = np.array([[0.0, 1.0, 2.0, 3.0, 0.0, 3.0]], np.float32)
    assert pack(x_RW, 2, None).packed.tolist() == [[0b11_10_01_00, 0b11_00]]
    x_RW = np.array([[0.0, 15.0, 7.0]], np.float32)
    assert pack(x_RW, 4, None).packed.tolist() == [[0xF0, 0x07]]
    assert pack(np.array([[0.0, 255.0, 7.0]], np.float32), 8, None).packed.tolist() == [[0, 255, 7]]


@pytest.mark.parametrize(
    ("low", "scale"), [(np.nan, 1.0), (0.0, np.inf), (0.0, -1.0), (3e38, 3e38)]
)
def test_minimum_and_step_of_a_stranger_are_checked(low: float, scale: float) -> None:
    sent = PackedRows(
        np.zeros((2, 1), np.uint8), np.array([0, low], np.float32), np.array([1, scale], np.float32)
    )
    with raises(ValueError):
        unpack(sent, 2, 4)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_minimum_beyond_two_bytes_is_refused(bits: int) -> None:
    with raises(ValueError):
        pack(np.array([[-LARGEST, 1.0]], np.float32), bits, None, halves=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "coder",
    [Bits(4), Bits(4, half=True), TopK(2), TopK(2, 0.5), Half(DType.FLOAT16), Half(DType.BFLOAT16)],
)
def test_what_is_not_finite_is_refused(bad: float, coder: Coder) -> None:
    x = np.arange(60, dtype=np.float32).reshape(3, 20)
    x[1, 4] = bad
    with raises(ValueError):
        coder.encode(x, 1)


# -- the largest


@given(x_RW=TABLES, share=st.floats(0.01, 0.99))
def test_the_largest_arrive_and_the_others_are_zero(x_RW: Any, share: float) -> None:
    width = x_RW.shape[1]
    k = TopK(share).count(width)
    places_RK = coders.find_largest(x_RW, k)
    assert (np.diff(places_RK, axis=1) > 0).all()
    # By the definition: sorted by size, the first of equal ones first.
    want = np.sort(np.argsort(-np.abs(x_RW), axis=1, kind="stable")[:, :k], axis=1)
    assert (places_RK == want).all()
    assert (coders.unpack_places(coders.pack_places(places_RK, width), k, width) == places_RK).all()
    coder = TopK(share)
    got = coder.decode(coder.encode(x_RW, 0), x_RW.shape)
    assert (np.take_along_axis(got, places_RK, 1) == np.take_along_axis(x_RW, places_RK, 1)).all()
    np.put_along_axis(got, places_RK, np.float32(0), 1)
    assert not got.any()


def test_random_top_k_draws_from_the_others_as_often_as_alpha_says() -> None:
    rows, width, k, alpha = 20_000, 12, 4, 0.25
    # The first k are the largest.
    x_RW = np.tile(np.arange(width, 0, -1, dtype=np.float32), (rows, 1))
    places_RK = coders.draw_places(x_RW, k, alpha, Dither(9))
    assert (np.diff(places_RK, axis=1) > 0).all()
    others = (places_RK >= k).sum(axis=1)
    chances = np.array(
        [0.75**4, 4 * 0.25 * 0.75**3, 6 * 0.25**2 * 0.75**2, 4 * 0.25**3 * 0.75, 0.25**4]
    )
    found = np.bincount(others, minlength=5) / rows
    assert np.abs(found - chances).max() < 5 * 0.5 / np.sqrt(rows)
    within = np.bincount(places_RK.ravel(), minlength=width)
    # Every place of a group is as likely.
    for group in (within[:k], within[k:]):
        assert np.abs(group / group.mean() - 1).max() < 0.06


def test_random_top_k_may_keep_all() -> None:
    x_RW = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    assert (coders.draw_places(x_RW, 5, 0.9, Dither(1)) == np.arange(5)).all()
    assert (coders.draw_places(x_RW, 4, 0.99, Dither(1))[:, 0] >= 0).all()


@pytest.mark.parametrize("places", [[[3, 1]], [[1, 1]], [[1, 6]]])
def test_indices_of_a_stranger_are_checked(places: list[list[int]]) -> None:
    sent = coders.pack_places(np.array(places), 6)
    with raises(ValueError):
        coders.unpack_places(sent, 2, 6)


# -- coders

CODERS: list[Coder] = [
    *(Bits(bits, stochastic) for bits in (8, 4, 2) for stochastic in (True, False)),
    TopK(3),
    TopK(0.2, half=True),
    TopK(0.1, 0.3),
    Half(DType.FLOAT16),
    Half(DType.BFLOAT16),
]
NUMPY = {
    DType.UINT8: np.uint8,
    DType.FLOAT32: np.float32,
    DType.FLOAT16: np.float16,
    DType.BFLOAT16: np.uint16,
}


@pytest.mark.parametrize("coder", CODERS, ids=lambda coder: coder.text)
@pytest.mark.parametrize(
    "shape", [(), (1,), (50,), (4, 50), (4, 1), (4, 2), (3, 2, 5, 5), (0, 9), (9, 0)]
)
def test_a_coder_makes_what_its_parts_say_of_any_shape(
    coder: Coder, shape: tuple[int, ...]
) -> None:
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    parts = coder.parts(shape)
    if parts is None:
        # Only what is small goes as it is.
        assert x.size < 50
        return
    assert x.size == 0 or sum(each.nbytes for each in parts.values()) < x.nbytes
    found = coder.encode(x, 11)
    assert {name: (each.dtype, each.shape) for name, each in found.items()} == {
        name: (NUMPY[each.dtype], each.shape) for name, each in parts.items()
    }
    back = coder.decode(found, shape)
    assert (back.dtype, back.shape) == (np.float32, shape)
    assert np.abs(back - x).max(initial=0.0) <= (5.0 if isinstance(coder, TopK) else 2.0)


def test_a_vector_is_one_row_and_short_rows_go_as_they_are() -> None:
    assert Bits(4).parts((100,)) == {
        "packed": TensorSpec(DType.UINT8, (1, 50)),
        "low": TensorSpec(DType.FLOAT32, (1,)),
        "scale": TensorSpec(DType.FLOAT32, (1,)),
    }
    # 10 bytes for 8.
    assert Bits(8).parts((100, 2)) is None
    assert Bits(8).parts((100, 3)) is not None
    assert TopK(0.1).parts((7, 1024)) == {
        "index": TensorSpec(DType.UINT8, (7, -(-103 * 10 // 8))),
        "value": TensorSpec(DType.FLOAT32, (7, 103)),
    }


@given(
    x=arrays.arrays(np.float32, 40, elements=st.floats(width=32, min_value=-60000, max_value=60000))
)
def test_halves_are_those_of_torch(x: Any) -> None:
    given_ = torch.from_numpy(x)
    assert torch.equal(given_.half(), torch.from_numpy(halves.to_float16(x)))
    assert torch.equal(
        given_.bfloat16().float(), torch.from_numpy(halves.from_bfloat16(halves.to_bfloat16(x)))
    )


def test_halves_refuse_what_they_cannot_write() -> None:
    with raises(ValueError):
        halves.to_float16(np.array([7e4], np.float32))
    with raises(ValueError):
        halves.to_bfloat16(np.array([LARGEST], np.float32))

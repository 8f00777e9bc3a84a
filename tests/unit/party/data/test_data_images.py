"""Images that stay bytes: their inputs, sizes and channels, and how much memory they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.party.data.test_data_sources import folder, load, npz, refused
from vfl_common.config.data import DataSettings, ViewSettings
from vfl_party.data import Features, Preprocessor, Table, load_table
from vfl_party.data.inputs.scaled import ScaledPixels
from vfl_party.data.pixels import to_unit
from vfl_party.data.row_arrays import MappedArray

RANDOM = np.random.default_rng(0)
COLOURS = RANDOM.integers(0, 200, (30, 6, 5, 3), dtype=np.uint8)
DEEP = RANDOM.integers(0, 65_536, (30, 6, 5), dtype=np.uint16)
ORDER = np.array([7, 0, 29, 7, 3])


def prepared(
    source: str, scale: str = "standard", *, flatten: bool = False, **more: Any
) -> tuple[Table, Preprocessor, Features]:
    settings = DataSettings(source=source, **{"scale": scale, **more})
    table = load_table(settings, with_label=False)
    rows = np.arange(0, len(table), 2)
    found = Preprocessor.fit(table, rows, one_hot=True, flatten=flatten, settings=settings)
    return table, found, found.transform(table)


@pytest.mark.parametrize("memory_mib", [0, 256], ids=["in a file", "in memory"])
@pytest.mark.parametrize("flatten", [False, True], ids=["images", "rows"])
@pytest.mark.parametrize("scale", ["standard", "minmax", "none"])
@pytest.mark.parametrize("images", [COLOURS, DEEP], ids=["bytes", "16 bits"])
def test_whole_numbers_give_the_inputs_of_their_float32(
    tmp_path: Path, images: np.ndarray, scale: str, *, flatten: bool, memory_mib: int
) -> None:
    whole = npz(tmp_path / "whole.npz", x=images)
    parts = npz(tmp_path / "parts.npz", x=to_unit(images))
    table, ours, found = prepared(whole, scale, flatten=flatten, memory_mib=memory_mib)
    _, theirs, wanted = prepared(parts, scale, flatten=flatten)
    assert table.images_NCHW is not None
    assert table.images_NCHW.dtype == images.dtype
    assert isinstance(table.images_NCHW, MappedArray) == (memory_mib == 0)
    assert isinstance(found.numbers, ScaledPixels)
    assert isinstance(wanted.numbers, torch.Tensor)
    assert ours.state() == theirs.state()
    assert found.spec == wanted.spec
    for rows in (ORDER, np.arange(0), np.arange(30)):
        # A batch that is read ahead, one that is not, and one that is asked for in place of it.
        for ahead in (rows, rows[::-1]):
            found.expect(ahead)
            assert torch.equal(found.inputs(rows)[0], wanted.inputs(rows)[0])
    assert torch.equal(found.x, wanted.x)
    assert torch.equal(torch.cat(list(found.blocks())), wanted.x)
    if flatten:
        cells = torch.from_numpy(RANDOM.integers(0, 30, (4, wanted.x.shape[1])))
        assert torch.equal(found.cells(cells), wanted.cells(cells))


@pytest.mark.parametrize("fits", [True, False], ids=["all there", "a batch at a time"])
@pytest.mark.parametrize("images", [COLOURS, DEEP], ids=["bytes", "16 bits"])
def test_a_device_gives_the_inputs_of_the_processor(
    tmp_path: Path, images: np.ndarray, *, fits: bool
) -> None:
    """What a GPU does, on the CPU; there is none in these tests."""
    _, _, found = prepared(npz(tmp_path / "x.npz", x=images))
    scaled = found.numbers
    assert isinstance(scaled, ScaledPixels)
    wanted = [scaled.rows(ORDER), scaled.rows(slice(3, 9))]
    whole = scaled._move(scaled.pixels) if fits else torch.empty(0)
    scaled._device_data = whole, torch.from_numpy(scaled._inputs_CV)
    assert scaled.reads is not fits
    assert torch.equal(scaled.rows(ORDER), wanted[0])
    assert torch.equal(scaled.rows(slice(3, 9)), wanted[1])


def test_batches_come_in_their_order_while_the_next_is_read(tmp_path: Path) -> None:
    _, _, found = prepared(npz(tmp_path / "x.npz", x=COLOURS), memory_mib=0)
    batches = [np.arange(start, start + 7) for start in (0, 14, 21, 0)]
    seen = [found.inputs(batch)[0] for batch in found.expecting(batches)]
    assert all(map(torch.equal, seen, (found.x[batch] for batch in batches)))


def test_rows_that_follow_keep_their_numbers(tmp_path: Path) -> None:
    table, ours, found = prepared(npz(tmp_path / "x.npz", x=COLOURS))
    for other in (COLOURS[::-1], to_unit(COLOURS[::-1])):
        more = load_table(DataSettings(source=npz(tmp_path / "y.npz", x=other)), with_label=False)
        both = found.concat(ours.transform(more), table.space)
        assert torch.equal(both.x, torch.cat([found.x, found.x.flip(0)]))


def test_pixels_of_a_table_are_those_of_the_source(tmp_path: Path) -> None:
    table = load(npz(tmp_path / "x.npz", x=COLOURS), memory_mib=0)
    np.testing.assert_array_equal(
        table.pixels(ORDER), to_unit(COLOURS[ORDER].transpose(0, 3, 1, 2))
    )
    left = load(
        npz(tmp_path / "x.npz", x=COLOURS),
        memory_mib=0,
        view=ViewSettings(scheme="halves", part=0, parts=2),
    )
    np.testing.assert_array_equal(left.pixels(), table.pixels()[..., :3])


def test_the_callers_array_is_not_changed_and_not_kept() -> None:
    from vfl_party.data import make_loader

    given = COLOURS.copy()
    table = make_loader({"a": {"x": given}})(DataSettings(source="frame of a"), False)
    given[:] = 0
    np.testing.assert_array_equal(table.pixels(), to_unit(COLOURS.transpose(0, 3, 1, 2)))


@pytest.mark.parametrize("images", [COLOURS, DEEP, to_unit(COLOURS)], ids=["bytes", "16", "float"])
def test_resize_takes_the_mean_of_what_becomes_one_pixel(
    tmp_path: Path, images: np.ndarray
) -> None:
    images = np.repeat(np.repeat(images[:, :4, :4], 4, axis=1), 4, axis=2)
    source = npz(tmp_path / "x.npz", x=images)
    table = load(source, resize=(2, 4))
    assert table.pixels().shape[2:] == (2, 4)
    whole = load(source).pixels()
    # Pillow's triangle reaches into the neighbours; the mean of all stays.
    np.testing.assert_allclose(table.pixels().mean((2, 3)), whole.mean((2, 3)), atol=0.15)
    assert load(source, resize=16).pixels().tolist() == whole.tolist()
    again = load(source, resize=(2, 4), memory_mib=0)
    assert again.pixels().tolist() == table.pixels().tolist()


def test_images_of_several_sizes_and_channels_become_alike(tmp_path: Path) -> None:
    images = {
        "a": Image.fromarray(COLOURS[0]),
        "b": Image.fromarray(np.full((9, 4), 100, np.uint8)),
        "c": Image.new("P", (3, 3)),
    }
    source = folder(tmp_path / "set", "file\na.png\nb.png\nc.png\n", **images)
    for channels in (1, 3):
        table = load(source, resize=[6, 5], channels=channels)
        assert table.pixels().shape == (3, channels, 6, 5)
        assert (table.pixels()[1] == np.float32(100) / np.float32(255)).all()
    np.testing.assert_array_equal(table.pixels()[0], to_unit(COLOURS[0].transpose(2, 0, 1)))
    grey = load(npz(tmp_path / "x.npz", x=COLOURS), channels=1).pixels()
    expected = np.asarray(Image.fromarray(COLOURS[5]).convert("L"))
    np.testing.assert_array_equal(grey[5, 0], to_unit(expected))
    refused(source, channels=3)
    refused(npz(tmp_path / "deep.npz", x=DEEP), channels=3)
    refused(npz(tmp_path / "columns.npz", x=COLOURS.reshape(30, -1)), resize=4)

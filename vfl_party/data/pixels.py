"""Converts images from a source: their scale, size and channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vfl_common.config.data import DataSettings
from vfl_party.base.devices import map_in_order
from vfl_party.data import checks
from vfl_party.data.row_arrays import Space, parts_of, release

Pixels = npt.NDArray[Any]
# Integer types of pixels, whose range is scaled to 0..1.
WHOLE = (np.uint8, np.uint16)


def is_whole(pixels: Pixels) -> bool:
    """Returns whether pixels are 8-bit or 16-bit integers, whose range is scaled to 0..1."""
    return pixels.dtype in WHOLE


def is_shortened(image: Image.Image) -> bool:
    """Returns whether Pillow reads only 8 of 16 bits of an image, as it does for colour images.
    Call this before the pixels are read.
    """
    # The attribute says how the file stores the pixels. Pillow's type stubs lack it.
    tiles = getattr(image, "tile", ())
    return not image.mode.startswith("I") and any(";16" in str(tile[3]) for tile in tiles)


def to_unit(pixels: Pixels) -> npt.NDArray[np.float32]:
    """Converts pixels to float32. 8-bit integers (0..255) and 16-bit integers (0..65535) are scaled
    to 0..1. Other values are not scaled.
    """
    scaled = pixels.astype(np.float32, order="C")
    if is_whole(pixels):
        scaled /= np.float32(np.iinfo(pixels.dtype).max)
    return scaled


def in_numbers(pixels: Pixels, space: Space) -> Pixels:
    """Stores images [N, ...] in ``space``: 8-bit and 16-bit integers unchanged, other types as
    float32.

    Raises InputError if the disk is full.
    """
    return space.store(pixels, None if is_whole(pixels) else np.float32)


def fit_images(source: str, images_NCHW: Pixels, settings: DataSettings, space: Space) -> Pixels:
    """Converts images [N, C, H, W] to ``data.channels`` and ``data.resize``. Raises InputError if
    this is not possible.

    The size is changed with Pillow's bilinear filter.
    """
    channels, height, width = images_NCHW.shape[1:]
    new_channels = settings.channels or channels
    size = settings.resize or (height, width)
    if (new_channels, *size) == (channels, height, width):
        return images_NCHW
    if new_channels != channels and (channels not in (1, 3) or not is_byte(images_NCHW)):
        raise checks.unusable(
            source,
            "data.channels needs images of bytes with 1 or 3 channels (got "
            f"{channels} x {height} x {width} in {images_NCHW.dtype}). Remove data.channels.",
        )
    dtype = images_NCHW.dtype if is_whole(images_NCHW) else np.float32
    result = space.empty((len(images_NCHW), new_channels, *size), dtype)
    for part in parts_of(images_NCHW):
        block = images_NCHW[part]
        result[part] = np.stack(list(map_in_order(_make_fit(new_channels, size), list(block))))
        release(images_NCHW, result)
    return result


def is_byte(pixels: Pixels) -> bool:
    """Returns whether pixels are bytes."""
    return pixels.dtype == np.uint8


def _make_fit(channels: int, size: tuple[int, int]) -> Callable[[Pixels], Pixels]:
    def fit(image_CHW: Pixels) -> Pixels:
        if channels != len(image_CHW):
            mode = "L" if channels == 1 else "RGB"
            image_CHW = to_planes(np.asarray(_to_pillow(image_CHW).convert(mode)))
        return resize_image(image_CHW, size)

    return fit


def resize_image(image_CHW: Pixels, size: tuple[int, int]) -> Pixels:
    """Resizes an image [C, H, W] to another height and width. The number type stays the same."""
    if image_CHW.shape[1:] == size:
        return image_CHW
    width_and_height = (size[1], size[0])
    if is_byte(image_CHW):
        planes_of_bytes = [
            np.asarray(Image.fromarray(plane).resize(width_and_height, Image.Resampling.BILINEAR))
            for plane in np.ascontiguousarray(image_CHW)
        ]
        return np.stack(planes_of_bytes)
    planes_CHW = [
        np.asarray(
            Image.fromarray(plane.astype(np.float32)).resize(
                width_and_height, Image.Resampling.BILINEAR
            )
        )
        for plane in image_CHW
    ]
    stacked = np.stack(planes_CHW)
    return np.rint(stacked).astype(image_CHW.dtype) if is_whole(image_CHW) else stacked


def to_planes(image: Pixels) -> Pixels:
    """Converts an image [H, W] or [H, W, C] to [C, H, W]."""
    return image[None] if image.ndim == 2 else image.transpose(2, 0, 1)


def _to_pillow(image_CHW: Pixels) -> Image.Image:
    is_grey = len(image_CHW) == 1
    return Image.fromarray(
        image_CHW[0] if is_grey else np.ascontiguousarray(image_CHW.transpose(1, 2, 0))
    )

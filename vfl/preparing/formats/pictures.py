"""Decodes compressed images into arrays of bytes of one size, several at once."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from vfl_common.errors import Code, InputError

Pixels = npt.NDArray[np.uint8]
# How many times as long as wide a picture is at most: it is scaled by its shorter side.
_LONGEST = 50
# Modes of PIL with more bits, which it would cut off at 255.
_DEEP = ("I", "F")


class PictureDecoder:
    """Decodes images to RGB of ``size`` × ``size``, and counts those that had another size.

    An image is scaled, with PIL's bilinear filter over all pixels, so that its shorter side is
    ``size``, and cut to the middle. Threads take part: PIL works outside of Python's lock.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.resized = 0
        # Of a decoded image.
        self.bytes = 3 * size * size
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def of(self, sources: Sequence[Path | bytes], names: Sequence[object]) -> Pixels:
        """Returns [n, size, size, 3] of files or their contents; ``names``: for messages. Raises
        InputError.
        """
        found = np.empty((len(sources), self._size, self._size, 3), np.uint8)
        into = partial(self._one, found, sources, names)
        self.resized += sum(self._threads.map(into, range(len(sources))))
        return found

    def said(self) -> tuple[str, ...]:
        """Returns a sentence about images of other sizes, if there were some."""
        size = self._size
        told = f"{self.resized:,} images had another size, and were brought to {size} × {size}."
        return (told,) if self.resized else ()

    def _one(
        self,
        into: Pixels,
        sources: Sequence[Path | bytes],
        names: Sequence[object],
        place: int,
    ) -> bool:
        source = sources[place]
        try:
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                self._refuse(image, names[place])
                other = image.size != (self._size, self._size)
                into[place] = np.asarray(self._fitted(image.convert("RGB")))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            text = f"{names[place]}: is no image that can be read; get it from its makers again"
            raise InputError(Code.FILE_INVALID, text) from None
        return other

    def _refuse(self, image: Image.Image, name: object) -> None:
        """Raises InputError if an image would lose its pixels' depth, or become too large."""
        from vfl_party.data.pixels import is_shortened

        if image.mode.startswith(_DEEP) or is_shortened(image):
            what = "has pixels of more than 8 bits"
        elif max(image.size) > _LONGEST * min(image.size):
            what = f"is {image.width} × {image.height}, and no picture is so thin"
        else:
            return
        text = f"{name}: {what}; get it from its makers again"
        raise InputError(Code.FILE_INVALID, text)

    def _fitted(self, image: Image.Image) -> Image.Image:
        size, (width, height) = self._size, image.size
        if (width, height) == (size, size):
            return image
        scale = size / min(width, height)
        wide, high = max(size, round(width * scale)), max(size, round(height * scale))
        left, top = (wide - size) // 2, (high - size) // 2
        scaled = image.resize((wide, high), Image.Resampling.BILINEAR)
        return scaled.crop((left, top, left + size, top + size))

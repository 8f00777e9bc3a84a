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
# The largest ratio of length to width of an image, which is scaled by its shorter side.
_MAX_RATIO = 50
# The modes of PIL with more than 8 bits, which it clips at 255.
_DEEP = ("I", "F")


class PictureDecoder:
    """Decodes images to RGB of ``size`` × ``size``, and counts those that had another size.

    An image is scaled, with PIL's bilinear filter over all pixels, so that its shorter side is
    ``size``, and cut to the middle. Threads take part: PIL works outside of Python's lock.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.resized = 0
        # The size of a decoded image.
        self.bytes = 3 * size * size
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1))

    def of(self, sources: Sequence[Path | bytes], names: Sequence[object]) -> Pixels:
        """Returns [n, size, size, 3] of files or their contents; ``names``: for messages. Raises
        InputError.
        """
        pixels = np.empty((len(sources), self._size, self._size, 3), np.uint8)
        into = partial(self._one, pixels, sources, names)
        self.resized += sum(self._threads.map(into, range(len(sources))))
        return pixels

    def notes(self) -> tuple[str, ...]:
        """Returns a note about images of other sizes, if there were some."""
        if not self.resized:
            return ()
        size = self._size
        return (f"{self.resized:,} images had another size, and were scaled to {size} × {size}.",)

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
                into[place] = np.asarray(self._fit(image.convert("RGB")))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise InputError(
                Code.FILE_INVALID, f"{names[place]}: is not a readable image. Download it again."
            ) from None
        return other

    def _refuse(self, image: Image.Image, name: object) -> None:
        """Raises InputError if an image has more than 8 bits, or is too long."""
        from vfl_party.data.pixels import is_shortened

        if image.mode.startswith(_DEEP) or is_shortened(image):
            raise InputError(
                Code.FILE_INVALID, f"{name}: has pixels of more than 8 bits. Download it again."
            )
        if max(image.size) > _MAX_RATIO * min(image.size):
            raise InputError(
                Code.FILE_INVALID,
                f"{name}: must be at most {_MAX_RATIO} times as long as wide (got {image.width} "
                f"× {image.height}). Download it again.",
            )

    def _fit(self, image: Image.Image) -> Image.Image:
        size, (width, height) = self._size, image.size
        if (width, height) == (size, size):
            return image
        scale = size / min(width, height)
        wide, high = max(size, round(width * scale)), max(size, round(height * scale))
        left, top = (wide - size) // 2, (high - size) // 2
        scaled = image.resize((wide, high), Image.Resampling.BILINEAR)
        return scaled.crop((left, top, left + size, top + size))

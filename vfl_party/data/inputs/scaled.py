"""Holds images in the integer type of their source, and scales them batch by batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from vfl_party.data.pixels import Pixels, to_unit
from vfl_party.data.row_arrays import some_rows

Floats = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
# The maximum share of a GPU's free memory that images may take.
SHARE = 0.5


class ScaledPixels:
    """Images of 8 or 16 bits that are converted to encoder inputs by a table.

    Args:
        pixels: The images, uint8 or uint16 [N, C, H, W]. Large images are in a mapped file. They
            are copied to a GPU only if they need less than half of its free memory.
        inputs_CV: The encoder input of each pixel value in each channel, float32 [C, V], where V is
            256 or 65,536.
        flatten: Whether the input of an image is a row of C * H * W numbers.
        device: The device of the inputs.
    """

    def __init__(
        self,
        pixels: Pixels,
        inputs_CV: Floats,
        *,
        flatten: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self.pixels, self._inputs_CV, self._flatten = pixels, inputs_CV, flatten
        self.device = torch.device(device)
        channels, height, width = pixels.shape[1:]
        input_shape: tuple[int, ...] = (channels * height * width,) if flatten else pixels.shape[1:]
        self.shape = (len(pixels), *input_shape)
        values_V = np.arange(inputs_CV.shape[1], dtype=pixels.dtype)
        self._is_unit_scale = bool((inputs_CV == to_unit(values_V)).all())
        self._arrow_tables = [pa.array(inputs_V) for inputs_V in inputs_CV]
        self._device_data: tuple[torch.Tensor, torch.Tensor] | None = None
        if self.device.type != "cpu":
            table_CV = torch.from_numpy(inputs_CV).to(self.device)
            fits = pixels.nbytes < SHARE * _get_free_bytes(self.device)
            device_pixels = self._move(pixels) if fits else torch.empty(0, device=self.device)
            self._device_data = device_pixels, table_CV

    def __len__(self) -> int:
        return len(self.pixels)

    def rows(self, rows: Positions | slice) -> torch.Tensor:
        """Returns the inputs of the given rows, float32 [B, *shape[1:]], on the device."""
        if self._device_data is None:
            return torch.from_numpy(self._look_up(self._read(rows)))
        device_pixels, table_CV = self._device_data
        if len(device_pixels):
            indices = rows if isinstance(rows, slice) else torch.as_tensor(rows, device=self.device)
            pixels_B = device_pixels[indices]
        else:
            pixels_B = self._move(self._read(rows))
        channels = torch.arange(len(table_CV), device=self.device).view(1, -1, 1, 1)
        return table_CV[channels, pixels_B.long()].reshape(len(pixels_B), *self.shape[1:])

    def cells(self, rows_BF: torch.Tensor) -> torch.Tensor:
        """Returns the input of each column in a separate row, [B, F], for flattened inputs.
        ``rows_BF``: The rows, int64 [B, F].
        """
        rows = rows_BF.cpu().numpy()
        size = rows.shape[1] // self.pixels.shape[1]
        columns_F = np.arange(rows.shape[1])
        pixels_BF = self.pixels.reshape(len(self.pixels), -1)[rows, columns_F]
        return torch.from_numpy(self._inputs_CV[columns_F // size, pixels_BF]).to(self.device)

    def with_pixels(self, pixels: Pixels) -> ScaledPixels:
        """Returns other images with the same scaling."""
        return ScaledPixels(pixels, self._inputs_CV, flatten=self._flatten, device=self.device)

    def to(self, device: torch.device | str) -> ScaledPixels:
        """Returns the same images with inputs on ``device``."""
        return ScaledPixels(self.pixels, self._inputs_CV, flatten=self._flatten, device=device)

    @property
    def reads(self) -> bool:
        """Whether a batch takes CPU time or reads the disk."""
        return self._device_data is None or not len(self._device_data[0])

    def _read(self, rows: Positions | slice) -> Pixels:
        return some_rows(self.pixels, rows)

    def _look_up(self, pixels_B: Pixels) -> Floats:
        if self._is_unit_scale:
            x_B = to_unit(pixels_B)
        else:
            x_B = np.empty(pixels_B.shape, np.float32)
            for channel, table in enumerate(self._arrow_tables):
                # Arrow accepts indices of one byte. NumPy would first convert them to eight bytes.
                places = np.ascontiguousarray(pixels_B[:, channel])
                scaled = table.take(pa.array(places.reshape(-1)))
                x_B[:, channel] = scaled.to_numpy().reshape(places.shape)
        return x_B.reshape(len(x_B), *self.shape[1:])

    def _move(self, pixels: Pixels) -> torch.Tensor:
        # torch has no 16-bit unsigned indices.
        indices: Any = pixels if pixels.dtype == np.uint8 else pixels.astype(np.int32)
        return torch.from_numpy(np.asarray(indices)).to(self.device)


def _get_free_bytes(device: torch.device) -> int:
    """Returns the free memory of a device in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 62

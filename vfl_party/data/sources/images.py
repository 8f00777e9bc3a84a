"""Reads folders of images with an index file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vfl_common.config.data import IMAGES, DataSettings
from vfl_party.data import checks
from vfl_party.data.collect import collect
from vfl_party.data.columns import Columns, Rows
from vfl_party.data.sources.text import open_text

FILE = "file"
# All other modes are read as RGB.
_CHANNELS = {"1": "L", "L": "L", "LA": "L", "I;16": "I;16"}


def read_image_folder(settings: DataSettings, with_label: bool) -> Rows:
    """Reads the images in the column ``file`` of ``index.csv``, with an id (default: the file's
    name) and a label.

    All have one size, and the channels of the first: 1 for grey, else 3. Raises InputError with the
    index's row.
    """
    source = settings.source
    index = str(Path(source) / IMAGES)
    if not Path(index).is_file():
        what = (
            f"is a folder with neither Parquet files nor {IMAGES}, which lists images in a "
            f"column {FILE!r}"
        )
        raise checks.unreadable(source, f"{what}; correct data.source, or write one")
    checks.refuse_column_settings(source, settings, ("columns", "drop", "numeric", "categorical"))
    ids = settings.id or (FILE,)
    listed = {"source": index, "id": ids, "columns": (FILE,), "categorical": (FILE,), "view": None}
    alone = settings.model_copy(update=listed)
    stream = open_text(alone)
    if FILE not in stream.names:
        raise checks.unusable(index, f"has no column {FILE!r} for the images' files; add it")
    rows = collect(stream, alone, with_label)
    assert isinstance(rows.features, Columns)  # noqa: S101 - of an index
    found = (
        rows.ids[ids.index(FILE)].to_pylist()
        if FILE in ids
        else rows.features.categorical.texts()[:, 0].tolist()
    )
    files = [file or "" for file in found]
    checks.require_present(
        index, f"column {FILE!r}", ~np.array(files, bool), "every row needs an image"
    )
    return replace(rows, features=_read_all(Path(source), index, files))


def to_unit(pixels: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Returns pixels as float32; scales bytes (0..255) and 16-bit values (0..65535) to 0..1, not
    others.
    """
    scaled = pixels.astype(np.float32, order="C")
    if pixels.dtype in (np.uint8, np.uint16):
        scaled /= np.float32(np.iinfo(pixels.dtype).max)
    return scaled


def _read_all(folder: Path, index: str, files: list[str]) -> npt.NDArray[Any]:
    """Reads all images as [N, C, H, W], uint8 or uint16."""
    first = _read_one(folder / files[0], index, 1, None)
    images = np.empty((len(files), *first.shape), first.dtype)
    for row, file in enumerate(files, 1):
        image = _read_one(folder / file, index, row, first)
        if image.shape != first.shape:
            sizes = (
                f"{image.shape[1]} x {image.shape[0]}, the first has {first.shape[1]} x "
                f"{first.shape[0]}"
            )
            where = checks.rows(index, row)
            raise checks.unusable(
                index, f"the image in {where} has {sizes} pixels; bring all to one size"
            )
        images[row - 1] = image
    return images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)


def _read_one(path: Path, index: str, row: int, like: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
    """Reads an image as [H, W] or [H, W, 3], with the channels of ``like`` if given."""
    try:
        with Image.open(path) as image:
            mode = _CHANNELS.get(image.mode, "RGB")
            if like is not None and like.dtype == np.uint8:
                mode = "L" if like.ndim == 2 else "RGB"
            pixels: npt.NDArray[Any] = np.asarray(
                image if image.mode == mode else image.convert(mode)
            )
    except FileNotFoundError:
        where = checks.rows(index, row)
        raise checks.unreadable(
            index, f"the image in {where} does not exist; correct or remove the row"
        ) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        where = checks.rows(index, row)
        raise checks.unreadable(
            index, f"the image in {where} cannot be read; replace it or remove the row"
        ) from None
    return pixels

"""Reads folders of images with an index file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import IMAGES
from vfl_party.base.devices import map_in_order
from vfl_party.data import checks
from vfl_party.data.pixels import is_shortened, resize_image, to_planes
from vfl_party.data.reading import collect
from vfl_party.data.row_arrays import Space, release
from vfl_party.data.sources.text import open_text
from vfl_party.data.table import Columns, Rows

FILE = "file"
# The memory of images is released each time after this number of images.
RELEASED_ROWS = 256
# The mode in which each of Pillow's modes is read. Other modes are read as RGB.
_CHANNELS = {"1": "L", "L": "L", "LA": "L"}
_DEEP = "I;16"
# 16-bit modes in other byte orders.
_CHANNELS |= dict.fromkeys((_DEEP, "I;16B", "I;16L", "I;16N"), _DEEP)
# Modes of 32-bit integers and floats, whose values Pillow would cut off at 255.
_NO_PIXELS = ("I", "F")
_KINDS = {"L": "grey", "RGB": "colour", _DEEP: "grey of 16 bits"}


def read_image_folder(settings: DataSettings, with_label: bool) -> Rows:
    """Reads the images that the column ``file`` of ``index.csv`` names, with ids (by default the
    file names) and labels.

    All images must be grey or coloured like the first image, unless ``data.channels`` is set, and
    must have the same size, unless ``data.resize`` is set. Raises InputError, which names the row
    of the index.
    """
    source = settings.source
    index = str(Path(source) / IMAGES)
    if not Path(index).is_file():
        raise checks.unreadable(
            source,
            f"is a folder with neither Parquet files nor {IMAGES}, which lists images in a column "
            f"{FILE!r}. Correct data.source, or write {IMAGES}.",
        )
    checks.refuse_column_settings(source, settings, ("columns", "drop", "numeric", "categorical"))
    ids = settings.id or (FILE,)
    index_keys = {
        "source": index,
        "id": ids,
        "columns": (FILE,),
        "categorical": (FILE,),
        "view": None,
    }
    index_settings = settings.model_copy(update=index_keys)
    stream = open_text(index_settings)
    if FILE not in stream.names:
        raise checks.unusable(
            index, f"has no column {FILE!r} for the names of image files. Add it."
        )
    rows = collect(stream, index_settings, with_label)
    assert isinstance(rows.features, Columns)  # noqa: S101 - of an index
    listed_files = (
        rows.ids[ids.index(FILE)].to_pylist()
        if FILE in ids
        else rows.features.categorical.texts()[:, 0].tolist()
    )
    files = [file or "" for file in listed_files]
    checks.require_present(
        index, f"column {FILE!r}", ~np.array(files, bool), "Name an image in every row."
    )
    return replace(rows, features=_read_images(Path(source), index, files, settings))


def _read_images(
    folder: Path, index: str, files: list[str], settings: DataSettings
) -> npt.NDArray[Any]:
    """Reads all images, uint8 or uint16 [N, C, H, W], with several threads."""
    mode = {None: None, 1: "L", 3: "RGB"}[settings.channels]
    first = _read_image(folder / files[0], index, 1, mode)
    kind = _get_mode(first)
    space = Space.of(settings)
    shape = (len(first), *(settings.resize or first.shape[1:]))
    images = space.empty((len(files), *shape), first.dtype)

    def read(row: int) -> npt.NDArray[Any]:
        image = _read_image(folder / files[row - 1], index, row, mode)
        where = checks.rows(index, row)
        mode_of_image = _get_mode(image)
        if _DEEP in (mode_of_image, kind) and (mode_of_image != kind or mode == "RGB"):
            raise checks.unusable(
                index,
                f"the image in {where} is {_KINDS[mode_of_image]}, the first is {_KINDS[kind]}. "
                "Convert all to 8 bits, or all to grey of 16 bits without data.channels.",
            )
        if mode_of_image != kind:
            raise checks.unusable(
                index,
                f"the image in {where} is {_KINDS[mode_of_image]}, the first is {_KINDS[kind]}. "
                "Set data.channels to 1 (grey) or 3 (colour), or convert the image.",
            )
        if settings.resize is not None:
            return resize_image(image, settings.resize)
        if image.shape != first.shape:
            raise checks.unusable(
                index,
                f"the image in {where} has {image.shape[2]} x {image.shape[1]} pixels, the first "
                f"has {first.shape[2]} x {first.shape[1]}. Set data.resize to one size.",
            )
        return image

    for row, image in enumerate(map_in_order(read, range(1, len(files) + 1))):
        images[row] = image
        if row % RELEASED_ROWS == 0:
            release(images)
    release(images)
    return images


def _get_mode(image_CHW: npt.NDArray[Any]) -> str:
    """Returns the mode of an image: ``L``, ``RGB`` or ``I;16``."""
    return _DEEP if image_CHW.dtype == np.uint16 else "L" if len(image_CHW) == 1 else "RGB"


def _read_image(path: Path, index: str, row: int, wanted: str | None) -> npt.NDArray[Any]:
    """Reads an image as [1, H, W] or [3, H, W], converted to the mode ``wanted`` if it is given."""
    try:
        with Image.open(path) as image:
            if image.mode in _NO_PIXELS or is_shortened(image):
                where = checks.rows(index, row)
                raise checks.unusable(
                    index,
                    f"the image in {where} must have colours of 8 bits or greys of 8 or 16 bits "
                    f"(got mode {image.mode}). Convert it to 8 bits, or to grey of 16 bits.",
                )
            mode = _CHANNELS.get(image.mode, "RGB")
            # A conversion of 16 bits would cut values off at 255, so these images are not
            # converted.
            mode = mode if wanted is None or mode == _DEEP else wanted
            if mode == _DEEP:
                # Pillow cannot convert between byte orders.
                return to_planes(np.asarray(image).astype(np.uint16))
            return to_planes(np.asarray(image if image.mode == mode else image.convert(mode)))
    except FileNotFoundError:
        where = checks.rows(index, row)
        raise checks.unreadable(
            index, f"the image in {where} does not exist. Correct or remove the row."
        ) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        where = checks.rows(index, row)
        raise checks.unreadable(
            index, f"the image in {where} cannot be read. Replace it, or remove the row."
        ) from None

"""Reads NPZ files of images and labels, which are no official form of a data set."""

from __future__ import annotations

import zipfile
import zlib

import numpy as np

from vfl.preparing.content import Content, blocks_of
from vfl.preparing.dataset import Files, Request
from vfl_common.errors import Code, InputError


def read_npz(name: str, files: Files, _: Request) -> Content:
    """Reads the arrays ``images``, uint8 [N, H, W] or [N, H, W, C], and ``labels``, uint8 [N].
    Raises InputError.
    """
    path = files[name]
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
    except (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not an NPZ file of plain arrays `images` and `labels`. Write it again.",
        ) from None
    fits = images.dtype == np.uint8 and images.ndim in (3, 4) and labels.shape == images.shape[:1]
    if not fits or labels.dtype.kind not in "iu":
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: `images` must be bytes [N, H, W] or [N, H, W, C], and `labels` [N] "
            "classes. Write it again.",
        )
    return Content(labels.astype(np.int64), None, blocks_of(images))

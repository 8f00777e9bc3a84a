"""The data sets that are four IDX files, as MNIST: grey images of 28 × 28 in ten classes."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_papers import recipes
from vfl_papers.dataset import (
    TEST,
    TRAIN,
    Array,
    Content,
    DataSet,
    Files,
    Form,
    Need,
    PaperUse,
    Request,
    blocks_of,
)
from vfl_papers.dividing import IMAGE_DIVISIONS

_ROWS = {TRAIN: 60_000, TEST: 10_000}
# The values of Table 5.
_FEDONCE = recipes.fedonce(
    recipes.CNN0, [128], (1e-4, 1e-5, 128, 100), (1e-3, 1e-5, 128, 200), d=16, f=3
)
_SILENT = (
    "The paper does not say which of the training images are for validation; it tunes by five "
    "folds."
)


def idx_set(
    title: str,
    folder: str,
    publisher: str,
    what: str,
    files: Mapping[str, tuple[int, str]],
    where: str,
    ten_thousand: str | None = None,
) -> DataSet:
    """Returns the data set of four files: images and labels of training, images and labels of
    testing.

    Args:
        title: its name.
        folder: torchvision's folder of it, whose files may be meant.
        publisher: who publishes it.
        what: its images show.
        files: {official name: (bytes, MD5)}, in the order above.
        where: FedOnce's tables and figures of it.
        ten_thousand: the name of an NPZ file of its test images alone, as another form.
    """
    needs = tuple(
        Need(name, _others(name, folder), size, md5) for name, (size, md5) in files.items()
    )
    forms = [Form(needs, partial(_read, tuple(files)), _ROWS)]
    if ten_thousand is not None:
        forms.append(
            Form(
                (Need(ten_thousand),),
                partial(read_npz, ten_thousand),
                unofficial="an NPZ file of the 10,000 test images, without the training images",
            )
        )
    use = PaperUse("FedOnce", where, "quadrants", 4, _FEDONCE, silent=_SILENT)
    return DataSet(
        title=title,
        publisher=publisher,
        holds=f"grey images of 28 × 28, {what}",
        rows=70_000,
        task={"kind": "multiclass", "classes": 10},
        forms=tuple(forms),
        divisions=IMAGE_DIVISIONS,
        uses=(use,),
        memory="about 200 MB",
    )


def _others(name: str, folder: str) -> tuple[str, ...]:
    plain = name.removesuffix(".gz")
    return plain, *(f"{folder}/raw/{other}" for other in (name, plain))


def _read(names: tuple[str, ...], files: Files, _: Request) -> Content:
    images, labels = [], []
    for pixels, classes in (names[:2], names[2:]):
        pixels_, own = _bytes(files[pixels], 3), _bytes(files[classes], 1)
        if len(pixels_) != len(own):
            raise InputError(
                Code.FILE_INVALID,
                f"{files[pixels]}: holds {len(pixels_):,} images, and {files[classes].name} "
                f"{len(own):,} labels. Download both again.",
            )
        images.append(pixels_)
        labels.append(own)
    splits = np.repeat(np.array([TRAIN, TEST], object), [len(part) for part in labels])
    return Content(
        np.concatenate(labels).astype(np.int64), splits, blocks_of(np.concatenate(images))
    )


def _bytes(path: Path, dims: int) -> Array:
    """Returns the array of an IDX file. Raises InputError unless it has bytes in ``dims``
    dimensions.
    """
    # Imported late: it imports torch, which a list of data sets does not need.
    from vfl_common.config.data import DataSettings
    from vfl_party.data.row_arrays import Space
    from vfl_party.data.sources.research.idx import read_array

    array = read_array(str(path), Space.of(DataSettings(source=str(path))))
    if array.dtype != np.uint8 or array.ndim != dims:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: must hold bytes in {dims} dimensions (got {array.dtype} in {array.ndim}). "
            "Download it again.",
        )
    return array


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

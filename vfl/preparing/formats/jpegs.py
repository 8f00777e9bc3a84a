"""Reads tables of small JPEG images, which are no official form of a data set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vfl.preparing.content import TEST, TRAIN, Block, Content, Rows, split_into_blocks
from vfl.preparing.dataset import Files, Request
from vfl.preparing.formats.pictures import PictureDecoder
from vfl_common.errors import Code, InputError

_COLUMNS = ("id", "jpeg", "label", "part")


def read_jpegs(name: str, size: int, files: Files, _: Request) -> Content:
    """Reads a Parquet table with ``id``, ``jpeg`` (bytes of RGB), ``label`` (0, 1, …) and ``part``
    (train, test). Raises InputError.
    """
    path = files[name]
    try:
        table = pq.read_table(path, columns=list(_COLUMNS))
        ids, jpegs, labels, parts = (table[name].to_pylist() for name in _COLUMNS)
    except (OSError, pa.ArrowException):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a Parquet table with {', '.join(_COLUMNS)}. Write it again.",
        ) from None
    typed = ((jpegs, bytes), (labels, int), (parts, str))
    sound = all(type(value) is kind for column, kind in typed for value in column)
    if not sound or not {TRAIN, TEST}.issuperset(parts):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: a row lacks its jpeg, its label, or its part (train or test). Write it "
            "again.",
        )
    decoder = PictureDecoder(size)

    def blocks(rows: Rows) -> Iterator[Block]:
        for some in split_into_blocks(rows, decoder.bytes):
            names = [f"{path}: row {row + 1}" for row in some]
            yield decoder.of([jpegs[row] for row in some], names)

    texts = np.array([str(id_).encode() for id_ in ids])
    classes, splits = np.array(labels, np.int64), np.array(parts, object)
    return Content(classes, splits, blocks, texts, afterwards=decoder.notes)

"""Reads tables of small JPEG images: no official form of any data set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vfl.preparing.content import TEST, TRAIN, Block, Content, Rows, in_blocks
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
        ids, jpegs, labels, parts = (table[each].to_pylist() for each in _COLUMNS)
    except (OSError, pa.ArrowException):
        text = f"{path}: is no Parquet table with {', '.join(_COLUMNS)}; write it again"
        raise InputError(Code.FILE_INVALID, text) from None
    typed = ((jpegs, bytes), (labels, int), (parts, str))
    sound = all(type(each) is kind for column, kind in typed for each in column)
    if not sound or not {TRAIN, TEST}.issuperset(parts):
        text = f"{path}: a row lacks its jpeg, its label, or its part, which is train or test"
        raise InputError(Code.FILE_INVALID, f"{text}; write it again")
    decoder = PictureDecoder(size)

    def blocks(rows: Rows) -> Iterator[Block]:
        for some in in_blocks(rows, decoder.bytes):
            names = [f"{path}: row {row + 1}" for row in some]
            yield decoder.of([jpegs[row] for row in some], names)

    texts = np.array([str(each).encode() for each in ids])
    found, splits = np.array(labels, np.int64), np.array(parts, object)
    return Content(found, splits, blocks, texts, afterwards=decoder.said)

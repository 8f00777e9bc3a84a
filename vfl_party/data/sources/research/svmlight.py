"""Reads libsvm and svmlight files in blocks of rows. A line is ``LABEL INDEX:VALUE INDEX:VALUE …``.

A value that a line omits is 0. The indices of a line must ascend. Text after ``#`` is a comment.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.config.data import MAX_COLUMNS, DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.packed import BROKEN, open_bytes
from vfl_party.data.sources.text_layout import MAX_LINE, make_length_error, make_names
from vfl_party.data.sources.unchanged import require_unchanged, state_of
from vfl_party.data.stream import RowStream

LABEL = "label"
# A query id that is not in a comment.
_QUERY = re.compile(rb"(?m)^[^#\n]*qid:")
# The number of bytes that are parsed at once, and the maximum number of cells in a block.
_READ, _MAX_CELLS = 1 << 22, 1 << 22


def open_svmlight(settings: DataSettings) -> RowStream:
    """Opens a file. Its columns are ``label``, then ``f1``, ``f2`` and so on, named by their
    indices.

    If a line has the index 0, the features begin with ``f0``. Without ``data.names`` the file is
    read once more to find the largest index. Raises InputError.
    """
    source, before = settings.source, state_of(settings.source)
    if settings.names is None:
        first, last = _find_index_range(source)
        names = tuple(f"f{at}" for at in range(first, last + 1))
    else:
        first, names = 1, make_names(settings.names)

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        positions = {name: at for at, name in enumerate(names)}
        columns = np.array([positions[name] for name in wanted if name != LABEL], np.int64)
        with require_unchanged(source, before):
            for number, labels, cells in _parse(source):
                if (
                    cells.nnz
                    and not first <= cells.indices.min() <= cells.indices.max() < first + len(names)
                ):
                    raise _make_index_error(source, number, cells, first, len(names))
                yield from _make_batches(labels, cells, first, columns, wanted)

    return RowStream(source, (LABEL, *names), False, blocks)


def _find_index_range(source: str) -> tuple[int, int]:
    """Returns the first and the last index of the columns. Raises InputError."""
    first, last = 1, 0
    for _, _, cells in _parse(source):
        if cells.nnz:
            first, last = min(first, int(cells.indices.min())), max(last, int(cells.indices.max()))
        if last > MAX_COLUMNS:
            raise checks.unusable(
                source,
                f"must have at most {MAX_COLUMNS:,} columns (got the index {last:,}). Write fewer "
                "columns.",
            )
    return first, last


def _parse(source: str) -> Iterator[tuple[int, npt.NDArray[np.float64], Any]]:
    """Yields blocks of rows: the number of the first line, the labels, float64 [B], and the cells,
    a sparse matrix [B, F].
    """
    from sklearn.datasets import load_svmlight_file

    number = 1
    for lines in _read_lines(source):
        try:
            cells, labels = load_svmlight_file(io.BytesIO(lines), zero_based=True)
        except (ValueError, OverflowError):
            raise _make_line_error(source, lines, number) from None
        if _QUERY.search(lines):
            raise checks.unusable(
                source,
                "holds qid, the queries of a ranking, which are not read from libsvm files. Remove "
                "them, or write a CSV file with a column for data.group.",
            )
        if not np.isfinite(labels).all():
            raise _make_line_error(source, lines, number)
        yield number, labels, cells
        number += lines.count(b"\n")


def _read_lines(source: str) -> Iterator[bytes]:
    """Yields the bytes of a file in chunks of complete lines. Raises InputError."""
    tail, number = b"", 1
    try:
        with open_bytes(source) as file:
            while data := file.read(_READ):
                data = tail + data
                end = data.rfind(b"\n") + 1
                tail = data[end:]
                if len(tail) > MAX_LINE:
                    raise make_length_error(source, number + data.count(b"\n"))
                if end:
                    yield data[:end]
                    number += data.count(b"\n")
        if tail:
            yield tail
    except BROKEN:
        raise checks.unreadable(
            source, "is not a readable libsvm file. Write the file again."
        ) from None


def _make_line_error(source: str, lines: bytes, number: int) -> Exception:
    """Returns the InputError for the first invalid line."""
    from sklearn.datasets import load_svmlight_file

    at = number
    for line in lines.split(b"\n"):
        try:
            _, labels = load_svmlight_file(io.BytesIO(line), zero_based=True)
        except (ValueError, OverflowError):
            break
        if not np.isfinite(labels).all():
            break
        at += 1
    return checks.unreadable(
        source,
        f"line {at:,} is not LABEL INDEX:VALUE INDEX:VALUE with ascending indices. Correct it.",
    )


def _make_index_error(source: str, number: int, cells: Any, first: int, count: int) -> Exception:
    """Returns the InputError for an index without a column."""
    is_wrong = (cells.indices < first) | (cells.indices >= first + count)
    index = int(cells.indices[is_wrong.argmax()])
    return checks.unusable(
        source,
        f"a line after {number - 1:,} has the index {index:,}, but there are {count:,} columns, "
        "counted from 1. Correct data.names, or remove it.",
    )


def _make_batches(
    labels: npt.NDArray[np.float64],
    cells: Any,
    first: int,
    columns: npt.NDArray[np.int64],
    wanted: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yields blocks of the wanted columns, with at most ``_MAX_CELLS`` cells each."""
    step = max(1, _MAX_CELLS // max(1, cells.shape[1]))
    for start in range(0, len(labels), step):
        dense = cells[start : start + step].toarray()
        values = np.zeros((len(dense), len(columns)))
        is_present = columns + first < dense.shape[1]
        values[:, is_present] = dense[:, columns[is_present] + first]
        remaining = iter(np.ascontiguousarray(values.T))
        arrays = [
            pa.array(labels[start : start + step] if name == LABEL else next(remaining))
            for name in wanted
        ]
        yield pa.RecordBatch.from_arrays(arrays, list(wanted))

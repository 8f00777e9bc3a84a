"""Reads libsvm and svmlight files in blocks of rows: ``LABEL INDEX:VALUE INDEX:VALUE …`` a line.

A value that a line omits is 0. Indices ascend within a line; text after ``#`` is a comment.
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
from vfl_party.data.sources.text_layout import MAX_LINE, make_names, too_long
from vfl_party.data.sources.unchanged import require_unchanged, state_of
from vfl_party.data.stream import RowStream

LABEL = "label"
# A query that is not in a comment.
_QUERY = re.compile(rb"(?m)^[^#\n]*qid:")
# Bytes that are parsed at once, and maximum cells of a block.
_READ, _MAX_CELLS = 1 << 22, 1 << 22


def open_svmlight(settings: DataSettings) -> RowStream:
    """Opens a file: its columns are ``label``, then ``f1``, ``f2`` and so on, by their indices.

    ``f0`` comes first if a line has the index 0. Without ``data.names`` the file is read once more,
    for the largest index. Raises InputError.
    """
    source, before = settings.source, state_of(settings.source)
    if settings.names is None:
        first, last = _extent(source)
        names = tuple(f"f{at}" for at in range(first, last + 1))
    else:
        first, names = 1, make_names(settings.names)

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        place = {name: at for at, name in enumerate(names)}
        columns = np.array([place[name] for name in wanted if name != LABEL], np.int64)
        with require_unchanged(source, before):
            for number, labels, cells in _parse(source):
                if (
                    cells.nnz
                    and not first <= cells.indices.min() <= cells.indices.max() < first + len(names)
                ):
                    raise _outside(source, number, cells, first, len(names))
                yield from _dense(labels, cells, first, columns, wanted)

    return RowStream(source, (LABEL, *names), False, blocks)


def _extent(source: str) -> tuple[int, int]:
    """Returns the first and the last index of the columns. Raises InputError."""
    first, last = 1, 0
    for _, _, cells in _parse(source):
        if cells.nnz:
            first, last = min(first, int(cells.indices.min())), max(last, int(cells.indices.max()))
        if last > MAX_COLUMNS:
            raise checks.unusable(
                source,
                f"must have at most {MAX_COLUMNS:,} columns (got the index {last:,}). Write fewer.",
            )
    return first, last


def _parse(source: str) -> Iterator[tuple[int, npt.NDArray[np.float64], Any]]:
    """Yields rows: the number of their first line, labels, float64 [B], and cells, sparse rows [B,
    F].
    """
    from sklearn.datasets import load_svmlight_file

    number = 1
    for lines in _whole_lines(source):
        try:
            cells, labels = load_svmlight_file(io.BytesIO(lines), zero_based=True)
        except (ValueError, OverflowError):
            raise _wrong_line(source, lines, number) from None
        if _QUERY.search(lines):
            raise checks.unusable(
                source,
                "holds qid, the queries of a ranking, which are not read from libsvm files. Remove "
                "them, or write a CSV file with a column for data.group.",
            )
        if not np.isfinite(labels).all():
            raise _wrong_line(source, lines, number)
        yield number, labels, cells
        number += lines.count(b"\n")


def _whole_lines(source: str) -> Iterator[bytes]:
    """Yields a file's bytes, whole lines at a time. Raises InputError."""
    rest, number = b"", 1
    try:
        with open_bytes(source) as file:
            while data := file.read(_READ):
                data = rest + data
                end = data.rfind(b"\n") + 1
                rest = data[end:]
                if len(rest) > MAX_LINE:
                    raise too_long(source, number + data.count(b"\n"))
                if end:
                    yield data[:end]
                    number += data.count(b"\n")
        if rest:
            yield rest
    except BROKEN:
        raise checks.unreadable(
            source, "is not a readable libsvm file. Write the file again."
        ) from None


def _wrong_line(source: str, lines: bytes, number: int) -> Exception:
    """Returns the InputError of the first invalid line."""
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


def _outside(source: str, number: int, cells: Any, first: int, count: int) -> Exception:
    """Returns the InputError of an index without a column."""
    wrong = (cells.indices < first) | (cells.indices >= first + count)
    index = int(cells.indices[wrong.argmax()])
    return checks.unusable(
        source,
        f"a line after {number - 1:,} has the index {index:,}, but there are {count:,} columns, "
        "counted from 1. Correct data.names, or remove it.",
    )


def _dense(
    labels: npt.NDArray[np.float64],
    cells: Any,
    first: int,
    columns: npt.NDArray[np.int64],
    wanted: Sequence[str],
) -> Iterator[pa.RecordBatch]:
    """Yields the wanted columns of parsed rows, of at most ``_MAX_CELLS`` cells a block."""
    step = max(1, _MAX_CELLS // max(1, cells.shape[1]))
    for start in range(0, len(labels), step):
        dense = cells[start : start + step].toarray()
        values = np.zeros((len(dense), len(columns)))
        there = columns + first < dense.shape[1]
        values[:, there] = dense[:, columns[there] + first]
        remaining = iter(np.ascontiguousarray(values.T))
        arrays = [
            pa.array(labels[start : start + step] if name == LABEL else next(remaining))
            for name in wanted
        ]
        yield pa.RecordBatch.from_arrays(arrays, list(wanted))

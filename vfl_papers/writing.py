"""Writes parties' tables block by block: images as memory-mappable NPZ, columns as Parquet."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vfl_common.errors import InternalError
from vfl_common.files import write_error
from vfl_papers.dataset import Array, Block, Content, ContentPart, Rows

ID, LABEL, SPLIT, IMAGE = "id", "label", "split", "image"


@dataclass(frozen=True)
class PartyTable:
    """A description of a party's file.

    ``features``: The features of a row as text, such as ``14 × 14`` or ``17 columns``.
    """

    name: str
    path: Path
    rows: int
    features: str
    bytes: int


@dataclass(frozen=True)
class SharedColumns:
    """The columns of a data set that are not features: ids, labels and splits, each [N]."""

    ids: Array
    labels: Array
    splits: Array | None

    def select(self, part: ContentPart, rows: Rows) -> dict[str, Array]:
        """Returns {column: values} for a party's rows. Only the active party gets the labels."""
        columns = {ID: self.ids[rows]}
        if part.label:
            columns[LABEL] = self.labels[rows]
        return columns if self.splits is None else columns | {SPLIT: self.splits[rows]}


def write_parts(
    content: Content, parts: Sequence[ContentPart], used: Rows, beside: SharedColumns, folder: Path
) -> Iterator[int | PartyTable]:
    """Writes the parties' files. Yields the number of rows of each block, and a description of each
    file when it is complete. Raises InputError if the disk is full.
    """
    for rows, parts_of_pass in _group_by_rows(parts, used):
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(_PartyFile(part, beside.select(part, rows), folder))
                for part in parts_of_pass
            ]
            if any(part.pick is not None for part in parts_of_pass):
                for block in content.blocks(rows):
                    for file in files:
                        file.add(block)
                    yield len(block)
        yield from (file.describe() for file in files)


def _group_by_rows(
    parts: Sequence[ContentPart], used: Rows
) -> list[tuple[Rows, list[ContentPart]]]:
    """Groups the parts by rows, so that rows that several parties share are read once."""
    shared = [part for part in parts if part.rows is None and part.pick is not None]
    single = [part for part in parts if part.rows is not None or part.pick is None]
    groups = [(used if part.rows is None else part.rows, [part]) for part in single]
    return ([(used, shared)] if shared else []) + groups


class _PartyFile:
    """Writes the file of one party."""

    def __init__(self, part: ContentPart, beside: dict[str, Array], folder: Path) -> None:
        self._part, self._beside, self._folder = part, beside, folder
        self._rows = len(beside[ID])
        self._done = 0
        self._path = folder / part.name
        self._file: zipfile.ZipFile | pq.ParquetWriter | None = None
        self._member: IO[bytes] | None = None
        self._features = "none"

    def __enter__(self) -> _PartyFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._convert_errors():
            if kind is None and self._part.pick is None:
                self._append_columns(pa.table({}))
            for file in (self._member, self._file):
                if file is not None:
                    file.close()
        if kind is None and self._done != self._rows:
            raise InternalError(f"{self._path.name}: {self._done} of {self._rows} rows were read")

    def add(self, block: Block) -> None:
        """Appends the party's features of a block to the file."""
        if self._part.pick is None:
            return
        features = self._part.pick(block)
        with self._convert_errors():
            if isinstance(features, pa.Table):
                self._append_columns(features)
            else:
                self._append_images(features)

    def describe(self) -> PartyTable:
        """Returns a description of the file, which must be closed."""
        size = self._path.stat().st_size
        return PartyTable(self._part.name, self._path, self._rows, self._features, size)

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._path, error) from None

    def _append_columns(self, features: pa.Table) -> None:
        if self._file is None:
            self._open_table(features)
        assert isinstance(self._file, pq.ParquetWriter)  # noqa: S101 - opened above
        stop = self._done + len(features) if features.num_columns else self._rows
        beside = {name: _decode(values[self._done : stop]) for name, values in self._beside.items()}
        columns = {name: features.column(name) for name in features.column_names}
        self._file.write_table(pa.table(beside | columns))
        self._done = stop

    def _open_table(self, features: pa.Table) -> None:
        self._path = self._folder / f"{self._part.name}.parquet"
        beside = {name: _decode(values[:0]) for name, values in self._beside.items()}
        empty = features.slice(0, 0)
        columns = {name: empty.column(name) for name in empty.column_names}
        self._features = f"{features.num_columns} columns" if features.num_columns else "none"
        self._file = pq.ParquetWriter(self._path, pa.table(beside | columns).schema)

    def _append_images(self, images: Array) -> None:
        if self._file is None:
            self._open_images(images)
        assert self._member is not None  # noqa: S101 - opened above
        self._member.write(np.ascontiguousarray(images).data.cast("B"))
        self._done += len(images)

    def _open_images(self, images: Array) -> None:
        """Begins an uncompressed NPZ file, whose images can be memory-mapped."""
        self._path = self._folder / f"{self._part.name}.npz"
        self._file = zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED, allowZip64=True)
        for name, values in self._beside.items():
            with self._file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(values), allow_pickle=False)
        self._features = " × ".join(map(str, images.shape[1:]))
        self._member = self._file.open(f"{IMAGE}.npy", "w", force_zip64=True)
        header = {
            "descr": np.lib.format.dtype_to_descr(images.dtype),
            "fortran_order": False,
            "shape": (self._rows, *images.shape[1:]),
        }
        np.lib.format.write_array_header_1_0(self._member, header)


def _decode(values: Array) -> Array:
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values

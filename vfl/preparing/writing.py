"""Writes a party's table block by block: images as NPZ that can be mapped, columns as Parquet."""

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

from vfl.preparing.content import Array, Block, Content, ContentPart, Rows
from vfl_common.errors import InternalError
from vfl_common.files import write_error

ID, LABEL, SPLIT, IMAGE = "id", "label", "split", "image"


@dataclass(frozen=True)
class Written:
    """A party's file: ``rows`` of ``features`` in words, such as ``14 × 14`` or ``17 columns``."""

    name: str
    path: Path
    rows: int
    features: str
    bytes: int


@dataclass(frozen=True)
class Beside:
    """The other columns of all rows of a data set: [N] ids, labels and splits."""

    ids: Array
    labels: Array
    splits: Array | None

    def of(self, part: ContentPart, rows: Rows) -> dict[str, Array]:
        """Returns {column: values} of a party's rows."""
        columns = {ID: self.ids[rows]}
        if part.label:
            columns[LABEL] = self.labels[rows]
        return columns if self.splits is None else columns | {SPLIT: self.splits[rows]}


def write_parts(
    content: Content, parts: Sequence[ContentPart], used: Rows, beside: Beside, folder: Path
) -> Iterator[int | Written]:
    """Writes the parties' files. Yields the number of rows of each block, and each file when it is
    whole. Raises InputError if the disk is full.
    """
    for rows, together in _passes(parts, used):
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context(_PartyFile(part, beside.of(part, rows), folder))
                for part in together
            ]
            if any(part.pick is not None for part in together):
                for block in content.blocks(rows):
                    for file in files:
                        file.add(block)
                    yield len(block)
        yield from (file.describe() for file in files)


def _passes(parts: Sequence[ContentPart], used: Rows) -> list[tuple[Rows, list[ContentPart]]]:
    """Groups parties with the same rows, so that these are read once."""
    shared = [part for part in parts if part.rows is None and part.pick is not None]
    alone = [part for part in parts if part.rows is not None or part.pick is None]
    own = [(used if part.rows is None else part.rows, [part]) for part in alone]
    return ([(used, shared)] if shared else []) + own


class _PartyFile:
    """One party's file, while it is written."""

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
        with self._writable():
            if kind is None and self._part.pick is None:
                self._append_columns(pa.table({}))
            for file in (self._member, self._file):
                if file is not None:
                    file.close()
        if kind is None and self._done != self._rows:
            raise InternalError(f"{self._path.name}: {self._done} of {self._rows} rows were read")

    def add(self, block: Block) -> None:
        """Writes the party's features of a block."""
        if self._part.pick is None:
            return
        own = self._part.pick(block)
        with self._writable():
            if isinstance(own, pa.Table):
                self._append_columns(own)
            else:
                self._append_images(own)

    def describe(self) -> Written:
        """Returns a description of the file, after the end of the block."""
        size = self._path.stat().st_size
        return Written(self._part.name, self._path, self._rows, self._features, size)

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._path, error) from None

    def _append_columns(self, own: pa.Table) -> None:
        if self._file is None:
            self._open_table(own)
        assert isinstance(self._file, pq.ParquetWriter)  # noqa: S101 - opened above
        here = slice(self._done, self._done + len(own) if own.num_columns else self._rows)
        beside = {name: _texts(values[here]) for name, values in self._beside.items()}
        named = {name: own.column(name) for name in own.column_names}
        self._file.write_table(pa.table(beside | named))
        self._done = here.stop

    def _open_table(self, own: pa.Table) -> None:
        self._path = self._folder / f"{self._part.name}.parquet"
        beside = {name: _texts(values[:0]) for name, values in self._beside.items()}
        empty = own.slice(0, 0)
        columns = {name: empty.column(name) for name in empty.column_names}
        self._features = f"{own.num_columns} columns" if own.num_columns else "none"
        self._file = pq.ParquetWriter(self._path, pa.table(beside | columns).schema)

    def _append_images(self, own: Array) -> None:
        if self._file is None:
            self._open_images(own)
        assert self._member is not None  # noqa: S101 - opened above
        self._member.write(np.ascontiguousarray(own).data.cast("B"))
        self._done += len(own)

    def _open_images(self, own: Array) -> None:
        """Begins an uncompressed NPZ file, so that its images can be mapped."""
        self._path = self._folder / f"{self._part.name}.npz"
        self._file = zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED, allowZip64=True)
        for name, values in self._beside.items():
            with self._file.open(f"{name}.npy", "w") as member:
                np.lib.format.write_array(member, np.ascontiguousarray(values), allow_pickle=False)
        self._features = " × ".join(map(str, own.shape[1:]))
        self._member = self._file.open(f"{IMAGE}.npy", "w", force_zip64=True)
        header = {
            "descr": np.lib.format.dtype_to_descr(own.dtype),
            "fortran_order": False,
            "shape": (self._rows, *own.shape[1:]),
        }
        np.lib.format.write_array_header_1_0(self._member, header)


def _texts(values: Array) -> Array:
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values

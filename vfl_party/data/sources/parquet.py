"""Reads Parquet files, and folders of them, in blocks of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as arrow_parquet

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.unchanged import require_unchanged, state_of
from vfl_party.data.stream import RowStream

PARQUET = ".parquet"
# The first bytes of a file.
_MAGIC = b"PAR1"
BLOCK_BYTES = 1 << 24
# Maximum rows of a block.
MAX_ROWS = 1 << 16
# Bytes of a column that are read at once.
_BUFFER = 1 << 16


def open_parquet(settings: DataSettings) -> RowStream:
    """Opens a Parquet file, or a folder of them with the same columns, in the order of their paths.

    Raises InputError.
    """
    source, path = settings.source, Path(settings.source)
    files = sorted(_files(path)) if path.is_dir() else [path]
    parted = next(
        (
            file
            for file in files
            if any("=" in name for name in file.relative_to(path).parent.parts)
        ),
        None,
    )
    if parted is not None:
        folder = parted.relative_to(path).parent
        raise checks.unreadable(
            source,
            f"its folders are named as partitions ({folder}), whose names are not read. Write the "
            "table without partitions, or read it through duckdb: with the pattern "
            "'FOLDER/**/*.parquet'.",
        )
    before = {file: state_of(str(file)) for file in files}
    names = [str(file.relative_to(path)) if path.is_dir() else "" for file in files]
    schemas = [_schema(source, file, name) for file, name in zip(files, names, strict=True)]
    schema, types = schemas[0], [_types(file_schema) for file_schema in schemas]
    for other, name in zip(types[1:], names[1:], strict=True):
        # The columns must have the same order too.
        if other != types[0]:
            problem = difference(dict(types[0]), dict(other), names[0], name)
            raise checks.unreadable(source, f"{problem}. Write the files with the same columns.")

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for file, name in zip(files, names, strict=True):
            with require_unchanged(str(file), before[file]), _reading(source, name):
                yield from _parquet_blocks(file, list(wanted))

    return RowStream(source, tuple(schema.names), False, blocks)


def holds_parquet(folder: Path) -> bool:
    """Returns whether a folder has Parquet files in it, or below it."""
    return next(_files(folder), None) is not None


def is_hidden(parts: Sequence[str]) -> bool:
    """Returns whether a path is hidden or temporary: one of its names begins with . or _."""
    return any(part.startswith((".", "_")) for part in parts)


def _files(folder: Path) -> Iterator[Path]:
    """Yields the Parquet files of a folder that are neither hidden nor temporary. Trino's have no
    ending.
    """
    for file in folder.rglob("*"):
        ending = file.suffix.lower()
        if ending not in ("", PARQUET) or is_hidden(file.relative_to(folder).parts):
            continue
        if file.is_file() and (ending or _begins_as_parquet(file)):
            yield file


def _begins_as_parquet(file: Path) -> bool:
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC
    return False


def _parquet_blocks(file: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    rows = min(MAX_ROWS, max(1, BLOCK_BYTES // (8 * max(1, len(wanted)))))
    with _open(file, pre_buffer=False, buffer_size=_BUFFER) as opened:
        for batch in opened.iter_batches(batch_size=rows, columns=wanted, use_threads=False):
            batch.validate(full=True)
            yield batch.select(wanted)


def _open(file: Path, **options: Any) -> arrow_parquet.ParquetFile:
    # The default, nanoseconds, corrupts times before 1677.
    return arrow_parquet.ParquetFile(file, coerce_int96_timestamp_unit="us", **options)


def _schema(source: str, file: Path, name: str) -> pa.Schema:
    with _reading(source, name), _open(file) as opened:
        return opened.schema_arrow


def _types(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(column.name, str(column.type)) for column in schema]


def difference(one: Mapping[str, str], other: Mapping[str, str], first: str, file: str) -> str:
    """Returns how the columns of two files differ, as a problem without a fix.

    ``one``, ``other``: {column: type} of the files ``first`` and ``file``.
    """
    for name in dict.fromkeys([*one, *other]):
        if name not in other or name not in one:
            without, with_ = (file, first) if name in one else (first, file)
            return f"has files with other columns: {with_} has {name!r}, {without} does not"
        if one[name] != other[name]:
            return (
                f"has files with other columns: {name!r} is {one[name]} in {first} and "
                f"{other[name]} in {file}"
            )
    return f"has files whose columns are in another order: {first} and {file}"


@contextmanager
def _reading(source: str, name: str) -> Iterator[None]:
    """Turns errors of reading into InputError. ``name``: the file's in the folder ``source``; '' if
    ``source`` is the file.
    """
    try:
        yield
    except (pa.ArrowException, OSError, ValueError):
        raise checks.unreadable(
            source,
            f"{name} is not a readable Parquet file. Write it again."
            if name
            else "is not a readable Parquet file. Write it again.",
        ) from None

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
from vfl_party.data.sources.files import require_unchanged, state_of
from vfl_party.data.stream import RowStream

PARQUET = ".parquet"
# The first bytes of a Parquet file.
_MAGIC = b"PAR1"
BLOCK_BYTES = 1 << 24
# The maximum number of rows in a block.
MAX_ROWS = 1 << 16
# The number of bytes of a column that are read at once.
_BUFFER = 1 << 16


def open_parquet(settings: DataSettings) -> RowStream:
    """Opens a Parquet file, or a folder of Parquet files with the same columns, which are read in
    the order of their paths. Raises InputError.
    """
    source, path = settings.source, Path(settings.source)
    files = sorted(_find_files(path)) if path.is_dir() else [path]
    partition_file = next(
        (
            file
            for file in files
            if any("=" in name for name in file.relative_to(path).parent.parts)
        ),
        None,
    )
    if partition_file is not None:
        folder = partition_file.relative_to(path).parent
        raise checks.unreadable(
            source,
            f"it has partition folders ({folder}), whose names are not read as columns. Write the "
            "table without partitions, or read it through duckdb: with the pattern "
            "'FOLDER/**/*.parquet'.",
        )
    states = {file: state_of(str(file)) for file in files}
    names = [str(file.relative_to(path)) if path.is_dir() else "" for file in files]
    schemas = [_read_schema(source, file, name) for file, name in zip(files, names, strict=True)]
    schema, types = schemas[0], [_list_types(file_schema) for file_schema in schemas]
    for other, name in zip(types[1:], names[1:], strict=True):
        # This also compares the order of the columns.
        if other != types[0]:
            problem = describe_difference(dict(types[0]), dict(other), names[0], name)
            raise checks.unreadable(source, f"{problem}. Write the files with the same columns.")

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for file, name in zip(files, names, strict=True):
            with require_unchanged(str(file), states[file]), _convert_errors(source, name):
                yield from _parquet_blocks(file, list(wanted))

    return RowStream(source, tuple(schema.names), False, blocks)


def holds_parquet(folder: Path) -> bool:
    """Returns whether a folder or one of its subfolders has Parquet files."""
    return next(_find_files(folder), None) is not None


def is_hidden(parts: Sequence[str]) -> bool:
    """Returns whether a path is hidden or temporary, that is, one of its parts begins with . or
    _.
    """
    return any(part.startswith((".", "_")) for part in parts)


def _find_files(folder: Path) -> Iterator[Path]:
    """Yields the Parquet files of a folder that are neither hidden nor temporary. Their names end
    in ``.parquet`` or, like Trino's files, have no suffix.
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
    with _open(file, pre_buffer=False, buffer_size=_BUFFER) as parquet_file:
        for batch in parquet_file.iter_batches(batch_size=rows, columns=wanted, use_threads=False):
            batch.validate(full=True)
            yield batch.select(wanted)


def _open(file: Path, **options: Any) -> arrow_parquet.ParquetFile:
    # With nanoseconds, the default, times before 1677 overflow.
    return arrow_parquet.ParquetFile(file, coerce_int96_timestamp_unit="us", **options)


def _read_schema(source: str, file: Path, name: str) -> pa.Schema:
    with _convert_errors(source, name), _open(file) as opened:
        return opened.schema_arrow


def _list_types(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(column.name, str(column.type)) for column in schema]


def describe_difference(
    one: Mapping[str, str], other: Mapping[str, str], first: str, file: str
) -> str:
    """Returns a text on how the columns of two files differ, as the problem of an error.

    ``one``, ``other``: The types of the columns of the files ``first`` and ``file``.
    """
    for name in dict.fromkeys([*one, *other]):
        if name not in other or name not in one:
            without, with_ = (file, first) if name in one else (first, file)
            return f"has files with different columns: {with_} has {name!r}, {without} does not"
        if one[name] != other[name]:
            return (
                f"has files with different columns: {name!r} is {one[name]} in {first} and "
                f"{other[name]} in {file}"
            )
    return f"has files with different orders of columns: {first} and {file}"


@contextmanager
def _convert_errors(source: str, name: str) -> Iterator[None]:
    """Converts errors of reading to InputError. ``name``: The file's name in the folder ``source``;
    '' if ``source`` is the file.
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

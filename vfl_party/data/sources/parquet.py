"""Reads Parquet files, and folders of them, in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as arrow_parquet

from vfl_common.config.data import DataSettings
from vfl_party.data import checks
from vfl_party.data.sources.unchanged import state_of, unchanged
from vfl_party.data.stream import Stream

PARQUET = ".parquet"
BLOCK_BYTES = 1 << 24
# Of a block.
MOST_ROWS = 1 << 16
# Bytes of a column that are read at once.
_BUFFER = 1 << 16


def open_parquet(settings: DataSettings) -> Stream:
    """Opens a Parquet file, or a folder of them with the same columns, in the order of their paths.

    Raises InputError.
    """
    source, path = settings.source, Path(settings.source)
    files = sorted(_files(path)) if path.is_dir() else [path]
    parted = next(
        (
            file
            for file in files
            if any("=" in each for each in file.relative_to(path).parent.parts)
        ),
        None,
    )
    if parted is not None:
        folder = parted.relative_to(path).parent
        text = f"its folders are named as partitions ({folder}), and what their names say would"
        advice = "write it without them, or read it with duckdb:SELECT * FROM 'FOLDER/**/*.parquet'"
        raise checks.unreadable(source, f"{text} be lost; {advice}")
    before = {file: state_of(str(file)) for file in files}
    schema = _schema(source, files[0])
    for file in files[1:]:
        other = _schema(source, file)
        if [(each.name, each.type) for each in other] != [
            (each.name, each.type) for each in schema
        ]:
            raise checks.unreadable(
                source, _difference(schema, other, files[0].name, str(file.relative_to(path)))
            )

    def blocks(wanted: Sequence[str]) -> Iterator[pa.RecordBatch]:
        for file in files:
            with unchanged(str(file), before[file]), _reading(source):
                yield from _parquet_blocks(file, list(wanted))

    return Stream(source, tuple(schema.names), False, blocks)


def holds_parquet(folder: Path) -> bool:
    """Returns whether a folder has Parquet files in it, or below it."""
    return next(_files(folder), None) is not None


def _files(folder: Path) -> Iterator[Path]:
    """Yields the Parquet files of a folder, without those that are hidden or temporary: names with
    . or _ in front.
    """
    for file in folder.rglob(f"*{PARQUET}"):
        if file.is_file() and not any(
            each.startswith((".", "_")) for each in file.relative_to(folder).parts
        ):
            yield file


def _parquet_blocks(file: Path, wanted: list[str]) -> Iterator[pa.RecordBatch]:
    rows = min(MOST_ROWS, max(1, BLOCK_BYTES // (8 * max(1, len(wanted)))))
    with arrow_parquet.ParquetFile(file, pre_buffer=False, buffer_size=_BUFFER) as opened:
        for batch in opened.iter_batches(batch_size=rows, columns=wanted, use_threads=False):
            batch.validate(full=True)
            yield batch.select(wanted)


def _schema(source: str, file: Path) -> pa.Schema:
    with _reading(source), arrow_parquet.ParquetFile(file) as opened:
        return opened.schema_arrow


def _difference(one: pa.Schema, other: pa.Schema, first: str, file: str) -> str:
    for name in dict.fromkeys([*one.names, *other.names]):
        if name not in other.names or name not in one.names:
            without, with_ = (file, first) if name in one.names else (first, file)
            return (
                f"has files with other columns: {with_} has {name!r}, {without} does not; "
                "write them alike"
            )
        if one.field(name).type != other.field(name).type:
            kinds = f"{one.field(name).type} in {first} and {other.field(name).type} in {file}"
            return f"has files with other columns: {name!r} is {kinds}; write them alike"
    return f"has files whose columns are in another order: {first} and {file}; write them alike"


@contextmanager
def _reading(source: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, ValueError):
        raise checks.unreadable(
            source, "is not a Parquet file that can be read; write it again"
        ) from None

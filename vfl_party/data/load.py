"""Reads a table by its settings: checks the rows, selects the rows and columns of the party's view,
and sorts the rows by id.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings, KeyColumns
from vfl_common.config.sources import (
    FRAME,
    TEXT_FILES,
    URL,
    get_reader,
    is_archive,
    is_duckdb,
    is_excel,
    split_member,
)
from vfl_common.errors import VflError
from vfl_common.text import hide_passwords, hide_passwords_of
from vfl_party.base.plugins import PlugIns, describe_failure
from vfl_party.data import checks
from vfl_party.data.choice import CUTS, column_run, cut_images, row_run
from vfl_party.data.id_rules import spell_ids, split_keys
from vfl_party.data.ids import IdCounts, Ids, Positions, in_order, release_texts, texts_of
from vfl_party.data.notes import refuse_rounded
from vfl_party.data.pixels import fit_images, in_numbers, to_unit
from vfl_party.data.reading import collect
from vfl_party.data.row_arrays import Space, is_ascending, parts, release
from vfl_party.data.sources.arrays import read_idx, read_mat, read_npz
from vfl_party.data.sources.databases import open_alchemy
from vfl_party.data.sources.duck import open_duckdb
from vfl_party.data.sources.excel import open_excel
from vfl_party.data.sources.frames import frame_rows, read_sklearn, read_torchvision
from vfl_party.data.sources.images import read_image_folder
from vfl_party.data.sources.parquet import PARQUET, holds_parquet, open_parquet
from vfl_party.data.sources.postgres import open_postgres
from vfl_party.data.sources.text import open_svmlight, open_text
from vfl_party.data.stream import RowStream, clear_words
from vfl_party.data.table import LEFT_OUT, Columns, InputRows, Rows, Table

log = logging.getLogger(__name__)

# The file name endings of tables.
TABLES = (*TEXT_FILES, ".libsvm", PARQUET, ".xlsx", ".xlsm")
# The readers of files with named arrays, by file name ending or ``data.format``.
_ARRAYS = {".npz": read_npz, "idx": read_idx, "mat": read_mat}
PLUGINS = PlugIns("vfl.sources", "data source", ours=("sklearn", "torchvision", "duckdb"))


def load_table(settings: DataSettings, *, with_label: bool) -> Table:
    """Reads a party's rows, with columns or images, in canonical order.

    ``with_label``: Whether to read the label too, as the active party does. The label column is
    never a feature. Raises InputError, which names the column and the row, if the source or its
    content cannot be used.
    """
    table = tabulate(read_rows(settings, with_label), settings, with_label)
    # Arrow keeps freed memory until it is told to return it to the system.
    pa.default_memory_pool().release_unused()
    return table


def make_loader(frames: Mapping[str, Any]) -> Callable[[DataSettings, bool], Table]:
    """Returns a function that loads a party's table, either from ``frames`` (a frame for each
    party) or from the source in its settings.
    """

    def load(settings: DataSettings, with_label: bool) -> Table:
        if not settings.source.startswith(FRAME):
            return load_table(settings, with_label=with_label)
        frame = frames[settings.source.removeprefix(FRAME)]
        return tabulate(frame_rows(frame, settings, with_label), settings, with_label)

    return load


def tabulate(
    rows: Rows, settings: DataSettings, with_label: bool, repeated: str = checks.ONE_ROW
) -> Table:
    """Creates a table from rows in the order of their source: the last step of ``load_table``.

    Normalizes the ids by the rules, checks all rows, selects the party's view, leaves out rows
    without an id and rows that ``data.duplicates`` drops, and sorts the other rows by id.
    ``repeated``: The fix for repeated ids, as a sentence. Raises InputError.
    """
    with checks.numbering_rows(settings):
        return _tabulate(rows, settings, with_label, repeated)


def _tabulate(rows: Rows, settings: DataSettings, with_label: bool, repeated: str) -> Table:
    source = hide_passwords(settings.source)
    n = len(rows)
    checks.require_rows(source, n)
    space = Space.of(settings)
    ids = spell_ids(rows.ids, settings, space)
    refuse_rounded(source, rows.ids)
    own_ids = rows.own_ids() if settings.keeps_rows else ()
    # The ids of a large table take much memory, so they are released here.
    rows = replace(rows, ids=())
    release_unused = pa.default_memory_pool().release_unused
    release_unused()
    has_id = ids.is_valid()
    if settings.unlabelled == "drop" and rows.labels is not None:
        # A row without a label must not make another row's id a duplicate.
        ids = _mask_ids(ids, checks.mask_unlabelled(rows.labels), space)
    # Rows that are equal in all keys cannot be told apart.
    is_keyed = settings.key_columns is not None and settings.duplicates == "error"
    duplicates = "drop" if is_keyed else settings.duplicates
    sorted_rows = in_order(ids, duplicates, space)
    order = sorted_rows.rows
    release_unused()
    counts = IdCounts.of(ids, len(order), pc.sum(has_id).as_py() - len(ids) + ids.null_count)
    if duplicates == "error":
        checks.require_unique(source, counts.repeated, sorted_rows.repeated, repeated)
    if len(order) == 0:
        label = "data.label, " if counts.unlabelled else ""
        raise checks.unusable(
            source, f"{counts.left_out}. Correct {label}data.id, data.id_rules or data.duplicates."
        )
    # Errors count the rows of the source, so this table has all rows, including dropped ones.
    takes_first = n == settings.first or (settings.duplicates == "first" and counts.repeated > 0)
    notes = (*rows.notes, rows.unsorted) if rows.unsorted and takes_first else rows.notes
    for note in notes:
        log.info("%s: %s", source, note, extra={"event": "guessed"})
    all_rows = Table(
        source,
        Ids(ids, space),
        labels=rows.labels,
        splits=rows.splits,
        beside=rows.beside,
        group=settings.group,
        key_columns=settings.key_columns,
        counts=counts,
        notes=notes,
        space=space,
    )
    features = rows.features
    if isinstance(features, Columns):
        table = _add_columns(all_rows, features, settings)
    else:
        table = _add_images(all_rows, features, settings)
    empty = table.numeric_NF is None and table.categorical is None and table.images_NCHW is None
    # With data.columns = [], the party has no features and reads only ids.
    reads_only_ids = settings.columns == ()
    if empty and not with_label and not reads_only_ids:
        raise checks.unusable(
            source,
            "has no feature columns besides the id. Check data.columns, data.drop and data.label.",
        )
    if settings.limit is not None and settings.limit_by == "random":
        order = _sample_rows(ids, order, settings.limit, settings.key_columns)
    if counts.left_out:
        log.warning("%s: %s", source, counts.left_out, extra={"event": "left_out"})
    kept_rows, order = order, row_run(order, settings.view)
    if len(order) == 0:
        raise checks.unusable(
            source,
            f"has too few rows for the parts of data.view (got {len(table)}). Use fewer parts.",
        )
    if own_ids:
        left_out = _code_left_out(has_id, ids.is_valid(), kept_rows)
        table = _add_source_rows(table, own_ids, rows.separator, left_out, kept_rows, order)
    if len(order) == n and is_ascending(order):
        return table
    return table.select(
        order, Ids(sorted_rows.ids, space) if len(order) == len(sorted_rows.rows) else None
    )


def _mask_ids(
    ids: pa.LargeStringArray, unlabelled_N: npt.NDArray[np.bool_], space: Space
) -> pa.LargeStringArray:
    """Replaces the ids of rows without a label with null."""
    none = pa.scalar(None, ids.type)
    return texts_of(
        ids, space, lambda part, texts: pc.if_else(pa.array(unlabelled_N[part]), none, texts)
    )


def _sample_rows(ids: pa.Array, order: Positions, limit: int, keys: KeyColumns | None) -> Positions:
    """Returns the ``limit`` rows whose ids have the smallest digests, in their order.

    The same ids and limit give the same rows at every party. A larger limit gives a superset. With
    keys, the digest is of the first key that a row has, because other keys may be wrong or missing.
    """
    if len(order) <= limit:
        return order
    digests_N = np.empty(len(order), "S8")
    for part in parts(len(order)):
        own_ids = ids.take(pa.array(order[part]))
        if keys is not None:
            own_ids = pc.coalesce(*split_keys(own_ids, keys), own_ids)
        texts = own_ids.to_pylist()
        release_texts(ids)
        digests_N[part] = [blake2b(text.encode(), digest_size=8).digest() for text in texts]
    chosen = np.argsort(digests_N.view(">u8"), kind="stable")[:limit]
    return order[np.sort(chosen)]


def _code_left_out(has_id: pa.Array, may_stay: pa.Array, rows: Positions) -> npt.NDArray[np.uint8]:
    """Returns for each row of the source the reason why it is left out, as a position in
    ``LEFT_OUT``, uint8 [S].

    ``may_stay``: Whether each row has an id and, if required, a label.
    """
    missing, repeated, unlabelled = map(
        LEFT_OUT.index, ("without an id", "with a repeated id", "without a label")
    )
    codes = np.where(has_id.to_numpy(False), unlabelled, missing).astype(np.uint8)
    codes[may_stay.to_numpy(False)] = repeated
    codes[rows] = 0
    return codes


def _add_source_rows(
    table: Table,
    own_ids: tuple[Any, ...],
    separator: str | None,
    left_out: npt.NDArray[np.uint8],
    chosen: Positions,
    order: Positions,
) -> Table:
    """Adds the rows of the source to their table. ``chosen``: The kept rows. ``order``: The kept
    rows in the party's view.
    """
    source_rows = InputRows(
        own_ids, left_out, separator, table.style[0] if table.style is not None else None
    )
    places_N = table.space.share().empty((len(left_out),), np.int64)
    for part in parts(len(places_N)):
        places_N[part] = np.arange(part.start, part.start + len(places_N[part]))
        release(places_N)
    # The view does not have all rows of the file. The other rows belong to other parties.
    if len(order) < len(chosen):
        view_rows = np.sort(order)
        source_rows, places_N[view_rows] = (
            source_rows.only(view_rows),
            np.arange(len(view_rows), dtype=np.int64),
        )
    return replace(table, own=source_rows, places_N=places_N)


def read_rows(settings: DataSettings, with_label: bool) -> Rows:
    """Reads the rows of a source: the first step of ``load_table``. Raises InputError."""
    source, reader = settings.source, get_reader(settings.source)
    if settings.is_database or is_duckdb(source):
        reader = None
    if reader == "sklearn":
        return read_sklearn(settings, with_label)
    if reader == "torchvision":
        return read_torchvision(settings, with_label)
    if reader is not None:
        return frame_rows(_read_plugin(source, reader), settings, with_label)
    stream = open_table(settings)
    if stream is not None:
        with checks.numbering_rows(settings):
            return collect(stream, settings, with_label)
    if Path(source).is_dir():
        return read_image_folder(settings, with_label)
    read_arrays = _ARRAYS.get(settings.kind or Path(source).suffix.lower())
    if read_arrays is not None:
        return read_arrays(settings, with_label)
    if is_archive(source):
        raise checks.unreadable(
            source,
            "is an archive. Name the member that holds the rows, such as "
            f"{Path(source).name}/rows.csv.",
        )
    raise checks.unreadable(
        source,
        "has no known kind. Set data.format, or give data.source as one of a .csv, .tsv, .txt or "
        ".libsvm (each also .gz or .bz2), .parquet, .xlsx, .npz or .mat file, a folder of images "
        "or Parquet files, the URL of a database, sklearn:NAME, torchvision:NAME or a plug-in's "
        "NAME:….",
    )


def open_table(settings: DataSettings) -> RowStream | None:
    """Opens a table that is read in blocks of rows. Returns None for other sources, such as images.
    Raises InputError.
    """
    source = settings.source
    if settings.is_database or is_duckdb(source):
        return open_database(settings)
    packed, member = split_member(source)
    path = Path(packed)
    try:
        exists = path.exists()
    except OSError as error:
        # For example, the name is too long, or the folder is not accessible.
        raise checks.unreadable(
            source, f"cannot be read ({error.strerror}). Correct data.source."
        ) from None
    if not exists:
        if URL.match(source):
            raise checks.unreadable(
                source,
                "is a URL, but only URLs of databases can be read. Copy the file to this machine, "
                "and give its path.",
            )
        raise checks.unreadable(
            source,
            "no such file or folder. Correct data.source, or mount the volume that holds it.",
        )
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise checks.unreadable(source, "is not readable by this user. Change its permissions.")
    if path.is_dir():
        return open_parquet(settings) if holds_parquet(path) else None
    if not path.is_file():
        raise checks.unreadable(
            source, "is not a regular file but a pipe or a device. Write the rows to a file."
        )
    openers = {"text": open_text, "libsvm": open_svmlight}
    if settings.kind in openers:
        return openers[settings.kind](settings)
    if member is not None and settings.kind != "idx":
        raise checks.unreadable(
            source,
            "only text, libsvm and IDX files are read within an archive. Unpack the archive.",
        )
    if source.lower().endswith(PARQUET):
        return open_parquet(settings)
    return open_excel(settings) if is_excel(source) else None


def column_names(settings: DataSettings) -> tuple[str, ...]:
    """Returns the names of a table's columns. Raises InputError if the source is not a readable
    table.
    """
    stream = open_table(settings)
    if stream is None:
        raise checks.unreadable(
            hide_passwords(settings.source),
            f"is not a readable table. Give a {', '.join(TABLES)} file.",
        )
    return stream.names


def first_rows(
    settings: DataSettings, names: Sequence[str], count: int
) -> dict[str, pa.ChunkedArray]:
    """Returns the first ``count`` rows of a table's columns, without checking them. Raises
    InputError if the table cannot be read.
    """
    stream, batches = open_table(settings), []
    if stream is not None:
        for batch in clear_words(stream, settings.na).blocks(list(dict.fromkeys(names))):
            batches.append(batch.slice(0, count))
            count -= batch.num_rows
            if count <= 0:
                break
    if not batches:
        return {}
    table = pa.Table.from_batches(batches)
    return dict(zip(table.column_names, table.columns, strict=True))


def _read_plugin(source: str, name: str) -> Any:
    """Reads a source such as ``NAME:REST`` with the plug-in ``NAME``. Raises InputError."""
    where = f"data.source = {hide_passwords(source)!r}"
    read = PLUGINS.load(name, where)
    try:
        return read(source.removeprefix(f"{name}:"))
    except VflError:
        raise
    except Exception as error:
        failure = hide_passwords_of(describe_failure(error), source)
        raise checks.unreadable(
            source, f"the plug-in failed {failure}. Correct data.source, or the plug-in."
        ) from error


def _add_columns(table: Table, columns: Columns, settings: DataSettings) -> Table:
    source, view = table.source, settings.view
    for key in ("resize", "channels") if settings.image_shape is None else ():
        if getattr(settings, key) is not None:
            raise checks.unusable(
                source,
                f"holds columns, but data.{key} is for images. Remove data.{key}, or set "
                "data.image_shape.",
            )
    if columns.numeric_names:
        checks.require_finite(source, columns.numeric_NF, columns.numeric_names)
        if settings.missing == "error":
            names = columns.numeric_names
            checks.require_complete(
                source, columns.numeric_NF, names, as_trained=settings.as_trained
            )
    if settings.image_shape is None:
        if view is not None and view.scheme in CUTS:
            raise checks.unusable(
                source, f"holds columns. Set data.image_shape to use the view {view.scheme!r}."
            )
        if columns.numeric_names:
            table = replace(
                table, numeric_NF=columns.numeric_NF, numeric_names=columns.numeric_names
            )
        table = replace(table, kinds=columns.kinds, style=columns.style)
        if columns.categorical_names:
            table = replace(
                table, categorical=columns.categorical, categorical_names=columns.categorical_names
            )
        return table
    if columns.categorical_names:
        raise checks.unusable(
            source,
            f"column {columns.categorical_names[0]!r} is categorical and cannot be a pixel. Drop "
            "it, or remove data.image_shape.",
        )
    images_NCHW = _reshape(source, columns.numeric_NF, settings.image_shape)
    images_NCHW = fit_images(source, images_NCHW, settings, table.space)
    return replace(table, images_NCHW=np.ascontiguousarray(cut_images(source, images_NCHW, view)))


def _add_images(table: Table, pixels: npt.NDArray[Any], settings: DataSettings) -> Table:
    """Adds images to a table. In a view of halves or quarters they stay images. In a view of
    columns the pixels become columns, unless ``image_shape`` is set.
    """
    source, view = table.source, settings.view
    if view is not None and view.scheme == "columns":
        if settings.image_shape is None:
            pixels = fit_images(source, pixels, settings, table.space)
        pixels_NF = pixels.reshape(len(pixels), -1)
        column_slice = column_run(source, pixels_NF.shape[1], view)
        part_NF = to_unit(pixels_NF[:, column_slice])
        if settings.image_shape is None:
            names = tuple(
                f"pixel{number}" for number in range(column_slice.start, column_slice.stop)
            )
            checks.require_finite(source, part_NF, names)
            if settings.missing == "error":
                checks.require_complete(source, part_NF, names)
            return replace(table, numeric_NF=part_NF, numeric_names=names)
        images_NCHW = _reshape(source, part_NF, settings.image_shape)
        images_NCHW = fit_images(source, images_NCHW, settings, table.space)
    else:
        if settings.image_shape is not None:
            pixels = _reshape(source, pixels, settings.image_shape)
        whole = fit_images(source, pixels, settings, table.space)
        images_NCHW = in_numbers(cut_images(source, whole, view), table.space)
    if pixels.dtype.kind == "f":
        checks.require_clean_images(source, images_NCHW, settings.missing)
    return replace(table, images_NCHW=images_NCHW)


def _reshape(
    source: str, values: npt.NDArray[Any], shape: tuple[int, int, int]
) -> npt.NDArray[Any]:
    size = int(np.prod(values.shape[1:]))
    if size != int(np.prod(shape)) or (values.ndim == 4 and values.shape[1:] != shape):
        shape_of_rows = " x ".join(map(str, values.shape[1:]))
        kind = "pixels" if values.ndim == 4 else "numeric columns"
        raise checks.unusable(
            source,
            f"rows must have the data.image_shape of {' x '.join(map(str, shape))} (got "
            f"{shape_of_rows} {kind}). Correct data.image_shape.",
        )
    return values.reshape(len(values), *shape)


def open_database(settings: DataSettings) -> RowStream:
    """Opens the rows of a database query. ``postgresql://`` is read through ADBC, ``duckdb:SELECT
    …`` through DuckDB, and other URLs through SQLAlchemy.

    Passwords appear neither in the stream's source nor in errors. Raises InputError.
    """
    if is_duckdb(settings.source):
        return open_duckdb(settings)
    if settings.source.startswith(("postgresql://", "postgres://")):
        return open_postgres(settings)
    return open_alchemy(settings)

"""Checks a party's rows; the errors contain neither ids nor values.

Rows are counted from 1 in the order of the source. In a CSV file the header and empty lines are not
counted, and the errors say so, because an editor counts the header too.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_common.config.sources import IMAGES, TEXT_FILES
from vfl_common.errors import Code, InputError
from vfl_common.text import hide_passwords, shorten
from vfl_party.data.row_arrays import parts, parts_of, release

# The fix in the error for an id that several rows have.
ONE_ROW = 'Keep one row for each id, or set data.duplicates to "first" or "drop".'
# The text that ``rows`` adds for a file with a header.
_BELOW = " below the header"


def unreadable(source: str, problem: str) -> InputError:
    """Returns the error for a file that is missing or cannot be read."""
    return InputError(Code.FILE_INVALID, ": ".join((hide_passwords(source), problem)))


def unusable(source: str, problem: str) -> InputError:
    """Returns the error for a file that can be read but has unusable content."""
    return InputError(Code.DATA_INVALID, ": ".join((hide_passwords(source), problem)))


def rows(source: str, *numbers: int) -> str:
    """Returns a text for one or two rows: ``row 4 below the header`` for a CSV file or a folder's
    index, else ``row 4``.
    """
    header = (
        source.lower().endswith((*TEXT_FILES, ".xlsx", ".xlsm"))
        or (Path(source) / IMAGES).is_file()
    )
    word = "row" if len(numbers) == 1 else "rows"
    return f"{word} {' and '.join(map(str, numbers))}{_BELOW if header else ''}"


@contextlib.contextmanager
def numbering_rows(settings: DataSettings) -> Iterator[None]:
    """Removes "below the header" from errors about a file without a header (``data.names``)."""
    try:
        yield
    except InputError as error:
        if settings.names is None:
            raise
        raise InputError(error.code, str(error).replace(_BELOW, "")) from None


def require_names(
    source: str, key: str, wanted: Sequence[str], names: Sequence[str], *, noun: str = "column"
) -> None:
    """Raises InputError, which suggests similar names, if a name in ``data.<key>`` is not in
    ``names``.
    """
    for name in wanted:
        if name not in names and names:
            raise unusable(
                source,
                f"has no {noun} {name!r}, which data.{key} names (the nearest: "
                f"{nearest(name, names)}). Correct data.{key}.",
            )
        if name not in names:
            raise unusable(
                source,
                f"has no {noun}s (data.{key} names {name!r}). Correct data.source or data.{key}.",
            )


def require_roles(
    source: str, settings: DataSettings, names: Sequence[str], *, noun: str = "column"
) -> None:
    """Raises InputError if the source lacks a label or another role column that the settings
    name.
    """
    label = ("labels", settings.labels) if settings.labels else ("label", (settings.label,))
    others = [(key, (getattr(settings, key),)) for key in ("event", "group", "weight", "split")]
    for key, wanted in (label, *others):
        present = [name for name in wanted if name is not None]
        require_names(source, key, present, names, noun=noun)


def refuse_column_settings(source: str, settings: DataSettings, keys: Sequence[str]) -> None:
    """Raises InputError if settings about columns are given for a source of images."""
    for key in keys:
        if getattr(settings, key):
            raise unusable(source, f"holds images and no feature columns. Remove data.{key}.")


def require_rows(source: str, n: int) -> None:
    """Raises InputError if a source has no rows."""
    if n == 0:
        raise unusable(source, "has no rows. Give a file with at least one.")


def require_unique(
    source: str, repeated: int, first: tuple[int, int] | None, advice: str = ONE_ROW
) -> None:
    """Raises InputError if rows repeat an id. The error has the number of such rows and the first
    two rows.

    ``first``: An earlier row, and the first row that repeats its id. ``advice``: The fix, as a
    sentence.
    """
    if repeated and first is not None:
        where = rows(source, *(row + 1 for row in first))
        raise unusable(
            source,
            f"{repeated} {'row repeats' if repeated == 1 else 'rows repeat'} the id of an earlier "
            f"row, first in {where}. {advice}",
        )


def require_present(source: str, what: str, missing_N: npt.NDArray[np.bool_], advice: str) -> None:
    """Raises InputError if a cell is missing by the mask. ``what``: The column, as text.
    ``advice``: The fix, as a sentence.
    """
    count = int(missing_N.sum())
    if count:
        raise _make_missing_error(source, what, count, int(missing_N.argmax()), advice)


def _make_missing_error(source: str, what: str, count: int, first: int, advice: str) -> InputError:
    cells = "1 missing value" if count == 1 else f"{count} missing values"
    return unusable(source, f"{what} has {cells}, first in {rows(source, first + 1)}. {advice}")


@dataclass(frozen=True)
class CellCounts:
    """The number of cells that pass a test, and the first row with such a cell, for each column of
    a matrix; the row is -1 if there is none.
    """

    counts: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]

    @property
    def columns(self) -> list[int]:
        """The columns with at least one such cell."""
        columns: list[int] = np.flatnonzero(self.counts).tolist()
        return columns


def count_cells(
    values_NF: npt.NDArray[Any], test: Callable[[Any], npt.NDArray[np.bool_]]
) -> CellCounts:
    """Counts the cells of each column for which ``test`` is true. ``values_NF``: The matrix, [N,
    F].
    """
    counts, first = (np.full(values_NF.shape[1], start, np.int64) for start in (0, -1))
    for part in parts(len(values_NF)):
        mask_BF = test(values_NF[part])
        is_new_F = mask_BF.any(axis=0) & (counts == 0)
        first[is_new_F] = part.start + mask_BF.argmax(axis=0)[is_new_F]
        counts += mask_BF.sum(axis=0)
        release(values_NF)
    return CellCounts(counts, first)


def require_finite(source: str, values_NF: npt.NDArray[Any], names: Sequence[str]) -> None:
    """Raises InputError if a value is infinite or outside the range of float32. NaN is allowed for
    missing values.

    Args:
        source: The name of the table, for errors.
        values_NF: The values, [N, F].
        names: The names of the columns.
    """
    infinite = count_cells(values_NF, np.isinf)
    for column in infinite.columns:
        where = rows(source, int(infinite.first[column]) + 1)
        raise unusable(
            source,
            f"column {names[column]!r} is infinite or beyond 3.4e38 in {where}. Correct the value, "
            "or leave it out.",
        )


def require_complete(
    source: str,
    values_NF: npt.NDArray[np.float32],
    names: Sequence[str],
    *,
    as_trained: bool = False,
) -> None:
    """Raises InputError if values are missing, for ``missing = "error"``.

    Args:
        source: The name of the table, for errors.
        values_NF: The values, float32 [N, F].
        names: The names of the columns.
        as_trained: Whether the rows are for a trained model, which has no values to fill in.
    """
    missing = count_cells(values_NF, np.isnan)
    for column in missing.columns:
        count, first = int(missing.counts[column]), int(missing.first[column])
        others = len(missing.columns) - 1
        raise _make_missing_error(
            source,
            f"column {names[column]!r}" + (f" (and {others} more)" if others else ""),
            count,
            first,
            "Fill the values: training had none missing."
            if as_trained
            else 'Fill them, drop the column, or set data.missing to "mean", "median" or "zero".',
        )


def require_clean_images(source: str, images_NCHW: npt.NDArray[np.float32], missing: str) -> None:
    """Raises InputError if pixels are infinite, or NaN under ``missing = "error"``."""
    is_invalid_N = np.zeros(len(images_NCHW), bool)
    for part in parts_of(images_NCHW):
        block = images_NCHW[part]
        is_invalid = np.isinf(block) if missing != "error" else ~np.isfinite(block)
        is_invalid_N[part] = is_invalid.reshape(len(is_invalid), -1).any(axis=1)
        release(images_NCHW)
    if is_invalid_N.any():
        kind = "infinite" if missing != "error" else "missing or infinite"
        count, row = int(is_invalid_N.sum()), int(is_invalid_N.argmax()) + 1
        raise unusable(
            source,
            f"{count} {'image has' if count == 1 else 'images have'} {kind} pixels, first in row "
            f"{row}. Correct or remove them.",
        )


def mask_unlabelled(labels_N: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the missing labels, bool [N]."""
    return mask_missing_text(labels_N) if labels_N.dtype == object else np.isnan(labels_N)


def mask_missing_text(values: npt.NDArray[np.object_]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the text cells that are missing (None), bool [N]."""
    missing: npt.NDArray[np.bool_] = np.equal(values, np.array(None, object))
    return missing


def suggest_names(name: str, names: Sequence[str]) -> str:
    """Returns " (the nearest: …)" with the entries of ``names`` that are similar to ``name``,
    ignoring case; '' if there are none.
    """
    by_case = {known.casefold(): known for known in names}
    matches = difflib.get_close_matches(name.casefold(), by_case, n=3, cutoff=0.7)
    return f" (the nearest: {list_names([by_case[match] for match in matches])})" if matches else ""


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns the entries of ``names`` that are similar to ``name``, or else the first entries, as
    text.
    """
    return list_names(difflib.get_close_matches(name, names, n=3, cutoff=0.5) or list(names[:5]))


def list_names(names: Sequence[str], max_names: int = 8) -> str:
    """Returns at most ``max_names`` names as text. Long names are cut."""
    text = ", ".join(repr(shorten(name)) for name in names[:max_names])
    return f"{text}, … ({len(names)} in all)" if len(names) > max_names else text

"""Checks a party's rows; the sentences about mistakes hold neither ids nor values.

Rows are counted from 1 in the order of the source, so that a person finds them there. In a CSV file that is below the
header, without empty lines, and the sentences say so: an editor counts the header too.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError


def unreadable(source: str, what: str) -> InputError:
    """Returns the error for a file that is missing or is not what its name says."""
    return InputError(Code.FILE_INVALID, f"{source}: {what}")


def unusable(source: str, what: str) -> InputError:
    """Returns the error for a file that can be read but has unusable content."""
    return InputError(Code.DATA_INVALID, f"{source}: {what}")


def rows(source: str, *numbers: int) -> str:
    """Names one row or two: ``row 4 below the header`` of a CSV file, or of a folder's index; ``row 4`` of others."""
    header = source.lower().endswith((".csv", ".csv.gz")) or Path(source).is_dir()
    word = "row" if len(numbers) == 1 else "rows"
    return f"{word} {' and '.join(map(str, numbers))}{' below the header' if header else ''}"


def require_names(source: str, key: str, wanted: Sequence[str], names: Sequence[str], *, noun: str = "column") -> None:
    """Raises InputError, with the nearest names, if a name in ``data.<key>`` is not among ``names``."""
    for name in wanted:
        if name not in names:
            hint = f"the nearest: {nearest(name, names)}" if names else f"it has no {noun}s"
            raise unusable(source, f"has no {noun} {name!r}, which data.{key} names; {hint}")


def require_roles(source: str, settings: DataSettings, names: Sequence[str], *, noun: str = "column") -> None:
    """Raises InputError if the source lacks the label or the split that the settings name."""
    for key, name in (("label", settings.label), ("split", settings.split)):
        require_names(source, key, [name] if name is not None else [], names, noun=noun)


def refuse_column_settings(source: str, settings: DataSettings, keys: Sequence[str]) -> None:
    """Raises InputError if settings about columns are given for a source of images."""
    for key in keys:
        if getattr(settings, key):
            raise unusable(source, f"holds images and no feature columns; remove data.{key}")


def require_rows(source: str, n: int) -> None:
    """Raises InputError if a source has no rows."""
    if n == 0:
        raise unusable(source, "has no rows; give a file with at least one")


def require_unique(source: str, ids: Sequence[str | None], repeated: int) -> None:
    """Raises InputError if rows repeat an id, with their number and the first two rows; None is no id."""
    if repeated == 0:
        return
    first_row: dict[str, int] = {}
    for row, name in enumerate(ids, 1):
        if name is not None and first_row.setdefault(name, row) != row:
            what = "row repeats the id of an earlier row" if repeated == 1 else "rows repeat the id of an earlier row"
            where = rows(source, first_row[name], row)
            advice = 'keep one row for each id, or set data.duplicates to "first" or "drop"'
            raise unusable(source, f"{repeated} {what}, first in {where}; {advice}")


def require_present(source: str, what: str, missing_N: npt.NDArray[np.bool_], advice: str) -> None:
    """Raises InputError if any cell is missing by the mask; ``what`` names the column."""
    count = int(missing_N.sum())
    if count:
        cells = "1 missing value" if count == 1 else f"{count} missing values"
        where = rows(source, int(missing_N.argmax()) + 1)
        raise unusable(source, f"{what} has {cells}, first in {where}; {advice}")


def require_finite(source: str, values_NF: npt.NDArray[Any], names: Sequence[str]) -> None:
    """Raises InputError if a value is infinite or beyond the range of float32. NaN passes: it means missing."""
    infinite_NF = np.isinf(values_NF)
    if infinite_NF.any():
        column = int(infinite_NF.any(axis=0).argmax())
        where = rows(source, int(infinite_NF[:, column].argmax()) + 1)
        what = f"column {names[column]!r} is infinite or beyond 3.4e38 in {where}"
        raise unusable(source, f"{what}; correct the value or leave it out")


def require_complete(source: str, values_NF: npt.NDArray[np.float32], names: Sequence[str]) -> None:
    """Raises InputError if numeric columns miss values, for ``missing = "error"``."""
    missing_NF = np.isnan(values_NF)
    if missing_NF.any():
        incomplete = np.flatnonzero(missing_NF.any(axis=0))
        column = int(incomplete[0])
        others = f" (so have {len(incomplete) - 1} more columns)" if len(incomplete) > 1 else ""
        advice = 'fill them, drop the column, or set data.missing to "mean", "median" or "zero"'
        require_present(source, f"column {names[column]!r}{others}", missing_NF[:, column], advice)


def require_clean_images(source: str, images_NCHW: npt.NDArray[np.float32], missing: str) -> None:
    """Raises InputError if pixels are infinite, or NaN under ``missing = "error"``."""
    sick = np.isinf(images_NCHW) if missing != "error" else ~np.isfinite(images_NCHW)
    sick_N = sick.reshape(len(sick), -1).any(axis=1)
    if sick_N.any():
        kind = "infinite" if missing != "error" else "missing or infinite"
        row = int(sick_N.argmax()) + 1
        raise unusable(
            source, f"{int(sick_N.sum())} images have {kind} pixels, first in row {row}; correct or remove them"
        )


def no_text(values: npt.NDArray[np.object_]) -> npt.NDArray[np.bool_]:
    """Returns a mask of the text cells that are None (missing)."""
    missing: npt.NDArray[np.bool_] = np.equal(values, np.array(None, object))
    return missing


def nearest(name: str, names: Sequence[str]) -> str:
    """Lists the entries of ``names`` that are nearest to ``name``, or else the first ones, for a sentence."""
    return listed(difflib.get_close_matches(name, names, n=3, cutoff=0.5) or list(names[:5]))


def listed(names: Sequence[str], most: int = 8) -> str:
    """Lists names for a sentence, at most ``most`` of them."""
    shown = ", ".join(repr(name) for name in names[:most])
    return f"{shown}, … ({len(names)} in all)" if len(names) > most else shown

"""Counts the training rows of each column in bins, to compare new rows with them.

The bins of a numeric column are separated by the deciles of the training rows; there are fewer bins
if many values are equal. A column of categories has a bin for each frequent category and a bin for
all other categories. Both have a bin for missing values. A party saves the counts of its columns in
its folder of the run. No row is saved, and nothing is sent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_common.files import private_file
from vfl_party.data.row_arrays import release
from vfl_party.data.table import Table, count_words

FILE = "profile.json"
Counts = npt.NDArray[np.int64]

# The maximum number of training rows that are counted for numeric columns. With so many rows,
# chance changes the stability index by less than 0.001.
_SAMPLE_ROWS = 20_000
# The maximum number of values that are counted at once.
_CHUNK = 1 << 25
# The number of bins of a numeric column, and the maximum number of categories with their own bin.
_BINS, _MAX_WORDS = 10, 50
# A limit above the rows of any table.
_MAX_ROWS = 1 << 53


@dataclass(frozen=True)
class ColumnProfile:
    """The profile of one column.

    Args:
        name: The name of the column.
        is_number: Whether the column is numeric.
        counts: The number of training rows in each bin. For categories, the next number is for all
            other categories. The last number is for missing values.
        edges: The edges between the bins of a numeric column.
        words: The categories with their own bin.
    """

    name: str
    is_number: bool
    counts: tuple[int, ...]
    edges: tuple[float, ...] = ()
    words: tuple[str, ...] = ()

    def count_numbers(self, values_N: npt.NDArray[np.float32]) -> Counts:
        """Counts the values in each bin, int64. ``values_N``: The values, float32 [N], NaN if
        missing.
        """
        return _count_bins(values_N, self.edges)

    def count_words(self, words: Sequence[str], counts: Sequence[int]) -> Counts:
        """Counts the cells in each bin, int64.

        Args:
            words: The categories that occur.
            counts: The number of cells of each category, then the number of missing cells.
        """
        bin_by_word = {word: at for at, word in enumerate(self.words)}
        binned = np.zeros(len(self.words) + 2, np.int64)
        for word, count in zip(words, counts, strict=False):
            binned[bin_by_word.get(word, len(self.words))] += count
        binned[-1] = counts[-1]
        return binned


def profile_of(table: Table, rows: npt.NDArray[np.int64]) -> list[ColumnProfile]:
    """Computes the profile of each column of a table in the given rows, int64 [R]; [] for
    images.
    """
    profile: list[ColumnProfile] = []
    values_NF = table.numeric_NF
    if values_NF is not None:
        sample = rows[:: max(1, -(-len(rows) // _SAMPLE_ROWS))]
        step = max(1, _CHUNK // max(1, len(sample)))
        for start in range(0, values_NF.shape[1], step):
            columns = values_NF[sample, start : start + step]
            release(values_NF)
            for name, values_N in zip(table.numeric_names[start:], columns.T, strict=False):
                edges = _compute_edges(values_N)
                counts = tuple(_count_bins(values_N, edges).tolist())
                profile.append(ColumnProfile(name, True, counts, edges))
    if table.categorical is not None:
        for k, name in enumerate(table.categorical_names):
            words, times = table.categorical.words[k], count_words(table.categorical, k, rows)
            order = np.argsort(-times[:-1], kind="stable")[:_MAX_WORDS]
            frequent = tuple(words[at] for at in order.tolist() if times[at])
            column = ColumnProfile(name, False, (), words=frequent)
            counts = tuple(column.count_words(words, times.tolist()).tolist())
            profile.append(ColumnProfile(name, False, counts, words=frequent))
    return profile


def save(folder: Path, profile: Sequence[ColumnProfile]) -> None:
    """Writes the profile into a party's folder of a run, in a file that only the party's user may
    read. Raises InputError.
    """
    with private_file(folder / FILE) as file:
        file.write(json.dumps([asdict(column) for column in profile]).encode())


def load(folder: Path) -> list[ColumnProfile]:
    """Reads the profile. Raises InputError if it is missing or damaged."""
    path = folder / FILE
    try:
        return [
            _read_column(entry)
            for entry in _require_list(json.loads(path.read_text(encoding="utf-8")))
        ]
    except FileNotFoundError:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is missing, because an earlier release trained this run or it has images. "
            "Compare with a newer run.",
        ) from None
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({error.strerror}). Change its permissions, or restore it.",
        ) from None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        raise InputError(Code.FILE_INVALID, f"{path}: is damaged. Restore it.") from None


def _require_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"not a list (got {type(value).__name__})")
    return value


def _read_column(entry: Any) -> ColumnProfile:
    """Reads a column's profile. Raises ValueError, TypeError, KeyError or OverflowError if the
    entry is invalid.
    """
    name, is_number = entry["name"], entry["is_number"]
    counts, edges, words = (_require_list(entry[key]) for key in ("counts", "edges", "words"))
    values = np.array([float(edge) for edge in edges])
    is_valid = (
        isinstance(name, str)
        and isinstance(is_number, bool)
        and not (words if is_number else edges)
        and len(counts) == len(edges) + len(words) + 2
        # isinstance would accept JSON's true as an integer.
        and all(type(count) is int and 0 <= count < _MAX_ROWS for count in counts)
        and bool(np.isfinite(values).all())
        and bool((np.diff(values) > 0).all())
        and all(isinstance(word, str) for word in words)
        and len({*words}) == len(words)
    )
    if not is_valid:
        raise ValueError("the profile of a column has invalid values")
    return ColumnProfile(name, is_number, tuple(counts), tuple(values.tolist()), tuple(words))


def bins_of(values_N: npt.NDArray[np.float32]) -> ColumnProfile:
    """Computes the profile of values without a column name, such as scores, float32 [N]."""
    edges = _compute_edges(values_N)
    return ColumnProfile("", True, tuple(_count_bins(values_N, edges).tolist()), edges)


def stability_index(before: Sequence[int], now: Sequence[int]) -> float:
    """Returns the population stability index (Siddiqi 2006, Credit Risk Scorecards): the sum of (q
    - p) ln(q / p) over bins with shares p before and q now.

    Half a row is added to each bin, so that an empty bin gives a finite value. Bins that are empty
    both before and now are left out.
    """
    p, q = _compute_shares(before, now)
    return float(((q - p) * np.log(q / p)).sum())


def by_chance(before: Sequence[int], now: Sequence[int], *, level: float) -> float:
    """Returns the stability index that is exceeded with probability ``level`` if the distribution
    has not changed.

    The index is then approximately (1/n + 1/m) times a chi-squared variable. Its degrees of freedom
    are the number of bins less one (Yurdakul and Naranjo 2020, Statistical properties of the
    population stability index).
    """
    from scipy.stats import chi2

    bin_count = sum(1 for a, b in zip(before, now, strict=True) if a or b)
    if bin_count < 2:
        return 0.0
    sizes = 1 / max(1, sum(before)) + 1 / max(1, sum(now))
    return float(sizes * chi2.ppf(1 - level, bin_count - 1))


def _compute_shares(
    before: Sequence[int], now: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    counts_2B = np.array([before, now], np.float64)
    counts_2B = counts_2B[:, counts_2B.any(axis=0)] + 0.5
    shares = counts_2B / counts_2B.sum(axis=1, keepdims=True)
    return shares[0], shares[1]


def _compute_edges(values_N: npt.NDArray[np.float32]) -> tuple[float, ...]:
    present_N = values_N[~np.isnan(values_N)]
    if not len(present_N):
        return ()
    inner = np.linspace(0, 1, _BINS + 1)[1:-1]
    edges: list[float] = np.unique(np.quantile(present_N, inner)).tolist()
    return tuple(edges)


def _count_bins(values_N: npt.NDArray[np.float32], edges: Sequence[float]) -> Counts:
    missing_N = np.isnan(values_N)
    places = np.searchsorted(np.array(edges, np.float64), values_N[~missing_N], side="right")
    counts = np.bincount(places, minlength=len(edges) + 1)
    return np.append(counts, int(missing_N.sum())).astype(np.int64)

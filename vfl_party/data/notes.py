"""Finds likely problems of a readable table, and describes them to its owner. The notes may show
single cells.

Problems are ids that were probably changed (rounded by a spreadsheet, with invisible characters, or
words for missing values), and columns that determine the class of every row: they may have been
recorded after the class was known.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_common.text import hide_passwords
from vfl_party.data import checks, number_formats
from vfl_party.data.checks import count_cells
from vfl_party.data.id_rules import LOOKED_AT, normalize_ids, short_look
from vfl_party.data.ids import IdCounts, in_order, release_texts
from vfl_party.data.number_formats import Dates, look_like_dates
from vfl_party.data.row_arrays import parts, release
from vfl_party.data.stream import MISSING
from vfl_party.data.table import Columns, Rows, count_words

MAX_CLASSES = 100
# The minimum number of rows outside the largest class. Fewer rows may be separated by chance.
MIN_OTHERS = 10
# The minimum mean number of rows for each value of a column.
ROWS_A_VALUE = 10
# The number of rows of each class that are examined first.
_SAMPLED = 1_000

Codes = npt.NDArray[np.int32]


def find_target_leakage(rows: Rows, label: str) -> Iterator[Smell]:
    """Yields a note for each column that determines the class of every row.

    Such a column has far fewer values than rows, and each value occurs in only one class. Or there
    are two classes, and the column's cells are missing in exactly one class, or all numbers in one
    class are greater than all numbers in the other class. ``label``: The name of the label column.
    """
    if rows.labels is None or not isinstance(rows.features, Columns):
        return
    labelled_N = ~checks.mask_unlabelled(rows.labels)
    encoded = pc.dictionary_encode(pa.array(rows.labels[labelled_N]))
    classes_N: Codes = encoded.indices.to_numpy(zero_copy_only=False)
    counts = np.bincount(classes_N)
    if not 2 <= len(counts) <= MAX_CLASSES or counts.sum() - counts.max() < MIN_OTHERS:
        return
    numbers, words = rows.features.numeric_NF, rows.features.categorical.codes_NK
    for values_NF, names in (
        (numbers, rows.features.numeric_names),
        (words, rows.features.categorical_names),
    ):
        # Indexing copies the values, so it is skipped if all rows have labels.
        values_NF = values_NF if labelled_N.all() else values_NF[labelled_N]
        for name in _find_columns(values_NF, names, classes_N, len(counts)):
            yield Smell(
                f"column {name!r} alone determines {label!r} in every row. If it is not known "
                "when you predict, list it in data.drop.",
                name,
            )


def _find_columns(
    values_NF: npt.NDArray[np.generic], names: tuple[str, ...], classes_N: Codes, count: int
) -> Iterator[str]:
    """Yields the names of the columns that determine the class, tested on a sample of each class
    and then on all rows.
    """
    sample = np.sort(
        np.concatenate([np.flatnonzero(classes_N == code)[:_SAMPLED] for code in range(count)])
    )
    sample_BF, sample_classes_B = values_NF[sample], classes_N[sample]
    release(values_NF)
    for k, name in enumerate(names):
        if not (
            _separates(sample_BF[:, k], sample_classes_B, count)
            or _determines(sample_BF[:, k], sample_classes_B, count)
        ):
            continue
        column_N = np.concatenate([values_NF[part, k] for part in parts(len(values_NF))])
        release(values_NF)
        has_few_values = _count_distinct(column_N) * ROWS_A_VALUE <= len(column_N)
        if _separates(column_N, classes_N, count) or (
            has_few_values and _determines(column_N, classes_N, count)
        ):
            yield name


def _count_distinct(values_N: npt.NDArray[np.generic]) -> int:
    return len(np.unique(values_N))


def _determines(values_N: npt.NDArray[np.generic], classes_N: Codes, count: int) -> bool:
    """Returns whether each value, including the missing value, occurs in only one class."""
    values, places_N = np.unique(values_N, return_inverse=True)
    return len(values) > 1 and _count_distinct(
        places_N.reshape(-1).astype(np.int64) * count + classes_N
    ) == len(values)


def _separates(values_N: npt.NDArray[np.generic], classes_N: Codes, count: int) -> bool:
    """Returns whether there are two classes, and either cells are missing in exactly one class, or
    all numbers in one class are greater than all numbers in the other.
    """
    if count != 2:
        return False
    is_number = values_N.dtype.kind == "f"
    missing_N = np.isnan(values_N) if is_number else values_N == -1
    if missing_N.any() or not is_number:
        return bool((missing_N == classes_N).all() or (missing_N != classes_N).all())
    first_class, second_class = (values_N[classes_N == code] for code in (0, 1))
    return bool(first_class.max() < second_class.min() or second_class.max() < first_class.min())


# The minimum number of rows for a note about many categories.
MIN_ROWS = 20


# The maximum number of characters of a cell in a note.
MAX_SHOWN = 24


# A number with a unit, such as 70 kg.
_UNIT = re.compile(r"\s*[+-]?[0-9][0-9.,]*\s*([A-Za-z\u00b0\u00b5\u00b2\u00b3/]{1,8})\s*")


_YES = frozenset(
    ("1", "y", "yes", "t", "true", "j", "ja", "wahr", "oui", "vrai", "si", "s\u00ed", "s\u00ec")
)


_NO = frozenset(("0", "n", "no", "f", "false", "nein", "falsch", "non", "faux"))


@dataclass(frozen=True)
class Smell:
    """A note for the table's owner.

    text: The note.
    column: The feature column that the note is about; '' if there is none.
    mostly: The kind of most cells, if they look like numbers or dates but the column is read as
    categories.
    """

    text: str
    column: str = ""
    mostly: Literal["", "numbers", "dates"] = ""


def find_smells(rows: Rows, settings: DataSettings) -> Iterator[Smell]:
    """Yields a note for each problem, in the order of the columns."""
    if settings.id and not rows.numbered:
        yield from map(Smell, _check_ids(rows, settings))
    if rows.labels is not None and rows.labels.dtype == object:
        labels = sorted({*rows.labels.tolist()} - {None})
        yield from map(Smell, _find_spellings(f"labels in {settings.label!r}", labels))
        yield from map(Smell, _find_yes_and_no(f"labels in {settings.label!r}", labels))
    if isinstance(rows.features, Columns):
        for name, text in find_odd_numbers(rows.features):
            yield Smell(text, name)
        for k, name in enumerate(rows.features.categorical_names):
            if name not in settings.categorical:
                yield from _check_words(rows.features, k, name, settings)


def _check_words(columns: Columns, k: int, name: str, settings: DataSettings) -> Iterator[Smell]:
    cells, words = columns.categorical, columns.categorical.words[k]
    counts = count_words(cells, k)[:-1]
    total, texts = int(counts.sum()), pa.array(words, pa.string())
    units = {unit[1] if (unit := _UNIT.fullmatch(word)) else "" for word in words}
    if len(units) == 1 and "" not in units and len(words) > 1:
        yield Smell(
            f"column {name!r} is read as categories: its cells are numbers with a unit, such as "
            f"{words[0][:MAX_SHOWN]!r}. Write the numbers without the unit.",
            name,
            "numbers",
        )
        return
    spelling_notes = list(_find_yes_and_no(f"categories of {name!r}", words))
    if spelling_notes:
        yield Smell(spelling_notes[0], name)
        return
    kinds: tuple[tuple[Literal["numbers", "dates"], Callable[[pa.Array], pa.Array]], ...]
    kinds = (("numbers", number_formats.look_like_numbers), ("dates", look_like_dates))
    for kind, test in kinds:
        is_like = test(texts).to_numpy(zero_copy_only=False)
        matching = int(counts[is_like].sum())
        if total and matching == total:
            yield Smell(_describe_column(name, words, kind), name, kind)
        elif matching > total / 2:
            # Words are in the order of the table, so this is the first word that does not fit.
            odd_word = int(np.flatnonzero(~is_like)[0])
            row = _find_first_row(cells.codes_NK[:, k], odd_word)
            where = checks.rows(hide_passwords(settings.source), row + 1)
            word = words[odd_word][:MAX_SHOWN]
            yield Smell(
                f"{matching:,} of {total:,} cells of {name!r} are {kind}, but {where} has "
                f"{word!r}, so the column is read as {len(words):,} categories. Correct the cell, "
                "or list its word in data.na if the cell is empty.",
                name,
                kind,
            )
        if matching > total / 2:
            return
    for text in _find_spellings(f"categories of {name!r}", words):
        yield Smell(text, name)
    if total >= MIN_ROWS and len(words) > total / 2:
        yield Smell(
            f"column {name!r} has {len(words):,} categories in {total:,} rows. List it in "
            "data.drop if it is a name.",
            name,
        )


def _describe_column(name: str, words: Sequence[str], kind: str) -> str:
    """Returns the note for a column of categories whose cells all look like numbers or dates."""
    if kind == "numbers":
        return (
            f"column {name!r} is read as categories, though its cells look like numbers, such as "
            f"{_find_unread(words, kind)!r}. Set data.decimal and data.thousands to how they are "
            "written."
        )
    return (
        f"column {name!r} is read as categories, though its cells look like dates, such as "
        f"{_find_unread(words, kind)!r}. Set data.dates to how they are written, such as "
        '"%d.%m.%y" '
        "for a year of two digits."
    )


def _find_unread(words: Sequence[str], kind: str) -> str:
    """Returns the first word that is not a number or date in the usual format; the first word if
    there is none.
    """
    usual_format = number_formats.Numbers() if kind == "numbers" else Dates("%d.%m.%Y")
    return next((word for word in words if usual_format.read(pa.array([word])) is None), words[0])[
        :MAX_SHOWN
    ]


def _find_yes_and_no(what: str, words: Sequence[str]) -> Iterator[str]:
    """Yields a note if all words mean yes or no, and yes or no has several spellings."""
    folded = {word: word.strip().casefold() for word in words}
    if not all(text in _YES | _NO for text in folded.values()):
        return
    for kind in (_YES, _NO):
        spellings = list({text: word for word, text in folded.items() if text in kind}.values())
        if len(spellings) > 1:
            yield (
                f"{what} say yes or no in several spellings, such as {spellings[0]!r} and "
                f"{spellings[1]!r}. Write them the same way."
            )
            return


def _find_spellings(what: str, words: Sequence[str]) -> Iterator[str]:
    times = Counter(word.strip().casefold() for word in words)
    same_words = [word[:MAX_SHOWN] for word in words if times[word.strip().casefold()] > 1]
    if same_words:
        yield (
            f"{what} differ by spaces or capitals alone, such as {same_words[0]!r} and "
            f"{same_words[1]!r}. Write them the same way."
        )


def _find_first_row(codes_N: npt.NDArray[np.int32], code: int) -> int:
    """Returns the first row with ``code``. There must be such a row."""
    for part in parts(len(codes_N)):
        matches = np.flatnonzero(codes_N[part] == code)
        if len(matches):
            return int(part.start + matches[0])
    raise ValueError(f"no row has the category code (got {code})")


def _check_ids(rows: Rows, settings: DataSettings) -> Iterator[str]:
    if settings.key_columns is not None:
        return
    rules = settings.id_rules or ()
    normalized = [
        normalize_ids(rows.ids, used_rules) for used_rules in (rules, (*rules, "trim", "casefold"))
    ]
    counts = [IdCounts.of(ids, len(in_order(ids, "first").rows)).remaining for ids in normalized]
    if counts[1] < counts[0]:
        count = counts[0] - counts[1]
        yield (
            '1 id differs from another by spaces or capitals alone. Add "trim" or "casefold" to '
            "rows.id_rules."
            if count == 1
            else f'{count:,} ids differ from others by spaces or capitals alone. Add "trim" or '
            '"casefold" to rows.id_rules.'
        )
    yield from find_odd_ids(rows.ids, normalized[0])


_STAND_INS = (-9, -99, -999, -9999, -99999, 999, 9999, 99999, 999999)


# The number of first rows that are examined.
_FIRST_ROWS = 100_000


# The minimum number of cells with the same number.
_MIN_CELLS = 2


def find_odd_numbers(columns: Columns) -> Iterator[tuple[str, str]]:
    """Yields the column's name and a note for each problem."""
    names, values_NF = columns.numeric_names, columns.numeric_NF
    empty = count_cells(values_NF, np.isnan).counts == len(values_NF)
    for column, name in enumerate(names):
        if empty[column]:
            yield name, f"column {name!r} is empty in all rows. List it in data.drop."
            continue
        value, count = _find_stand_in(values_NF[:_FIRST_ROWS, column])
        if count and columns.style is None:
            yield (
                name,
                f"{count:,} cells of {name!r} are {value}, far from all others. Clear these cells "
                "if the number stands for an empty cell.",
            )
        elif count:
            yield (
                name,
                f"{count:,} cells of {name!r} are {value}, far from all others. List the number in "
                "data.na if it stands for an empty cell.",
            )


def _find_stand_in(values_N: npt.NDArray[np.float32]) -> tuple[int, int]:
    """Returns a number that may stand for an empty cell, and its count; (0, 0) if there is none.

    Such a number is further from all other numbers than these are from each other, or it is the
    only number below 0.
    """
    values_N = values_N[~np.isnan(values_N)]
    low, high = float(values_N.min(initial=np.inf)), float(values_N.max(initial=-np.inf))
    for value in (low, high):
        if value not in _STAND_INS:
            continue
        others_N = values_N[values_N != value]
        count = len(values_N) - len(others_N)
        if count < _MIN_CELLS or not len(others_N):
            continue
        lowest, highest = float(others_N.min()), float(others_N.max())
        gap = lowest - value if value == low else value - highest
        if gap > max(highest - lowest, 1.0) or value < 0 <= lowest:
            return int(value), count
    return 0, 0


# A long number as a spreadsheet shows it: 1.2E+05, or 120.0E+03 in engineering format.
_ROUNDED = r"^\s*[0-9]{1,3}(?:[.,][0-9]+)?[eE]\+[0-9]+\s*$"


# A whole number that was stored as a decimal number, for example because other cells were missing.
_DECIMAL = r"^\s*[0-9]+[.,]0+\s*$"


# A spreadsheet's mark for text, which keeps leading zeros.
_QUOTED = r"""^\s*(?:="|')"""


# Invisible characters: zero bytes, zero-width spaces, byte order marks.
_UNSEEN = r"[\p{Cc}\p{Cf}]"


_ALMOST_ALL = 0.99


# The number of rows that are examined at once.
_AT_ONCE = 1 << 16


# The minimum number of rows for comparing the shapes of ids.
_MIN_ROWS = 20


def refuse_rounded(source: str, columns: Sequence[Any]) -> None:
    """Raises InputError if several rows have the same id because a spreadsheet has rounded their
    ids.

    ``columns``: The id columns as read, each [N] text.
    """
    for column in columns:
        rounded = _find_rounded(column)
        if len(pc.unique(rounded)) < len(rounded):
            raise checks.unusable(
                source,
                f"{len(rounded):,} ids look like 1.2E+05, and rows share them: a spreadsheet has "
                "rounded the ids. Export the table again from its origin, with ids as text.",
            )


def find_odd_ids(columns: Sequence[Any], ids: pa.LargeStringArray) -> Iterator[str]:
    """Yields a note for each problem of the ids.

    Args:
        columns: The id columns as read, each [N] text.
        ids: The ids, normalized by the rules, null if missing.
    """
    for column in columns:
        rounded, decimal = len(_find_rounded(column)), len(_filter_matches(column, _DECIMAL))
        if rounded:
            yield (
                f"{_count_ids(rounded, 'looks', 'look')} like 1.2E+05: a spreadsheet has rounded "
                "them. Write ids as text."
            )
        if decimal:
            yield (
                f"{_count_ids(decimal, 'ends', 'end')} in .0, as whole numbers do that a program "
                "stores as decimals. Write ids without .0; they match no other party's ids "
                "otherwise."
            )
        quoted = len(_filter_matches(column, _QUOTED))
        if quoted:
            yield (
                f"{_count_ids(quoted, 'begins', 'begin')} with a spreadsheet's mark for text (=\" "
                "or '). Write ids without it; they match no other party's ids otherwise."
            )
    invisible = len(_filter_matches(ids, _UNSEEN))
    if invisible:
        yield (
            f"{_count_ids(invisible, 'has', 'have')} invisible characters that no rule drops. "
            "Remove them."
        )
    trimmed = pc.utf8_trim_whitespace(pc.drop_null(ids))
    missing_words = (
        pc.sum(pc.is_in(trimmed, value_set=pc.cast(MISSING, pa.large_string()))).as_py() or 0
    )
    if missing_words:
        yield (
            f"{_count_ids(missing_words, 'is a word', 'are words')} for a missing value, such as "
            "NULL or nan. Clear these cells."
        )
    if _last_is_odd(ids):
        yield (
            "the id in the last row does not look like the others. Delete the row if it is a "
            "total or a remark."
        )


def _count_ids(count: int, singular: str, plural: str) -> str:
    return f"1 id {singular}" if count == 1 else f"{count:,} ids {plural}"


def _filter_matches(texts: Any, pattern: str) -> Any:
    return texts.filter(pc.fill_null(pc.match_substring_regex(texts, pattern), False))


def _find_rounded(texts: Any) -> Any:
    """Returns the ids that a spreadsheet has rounded. A quick test comes first, because all rows
    are examined.
    """
    texts = (
        texts
        if isinstance(texts, pa.Array | pa.ChunkedArray)
        else pa.array(texts, pa.large_string())
    )
    candidates = []
    for part in parts(len(texts), _AT_ONCE):
        has_exponent = pc.match_substring(texts[part], "e+", ignore_case=True)
        candidates.append(texts[part].filter(pc.fill_null(has_exponent, False)))
        release_texts(texts)
    return _filter_matches(pa.chunked_array(candidates, texts.type), _ROUNDED)


def _last_is_odd(ids: pa.LargeStringArray) -> bool:
    """Returns whether almost all ids have the same shape, and the last id has a different shape."""
    present = pc.drop_null(ids)
    if len(present) < _MIN_ROWS:
        return False
    shape_counts = Counter(map(short_look, present[:-1][:LOOKED_AT].to_pylist()))
    return (
        short_look(present[-1].as_py()) not in shape_counts
        and shape_counts.most_common(1)[0][1] >= _ALMOST_ALL * shape_counts.total()
    )

"""Finds ids that were probably changed: rounded by a spreadsheet, with invisible characters, or
words for missing values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data import checks
from vfl_party.data.cells.texts import MISSING
from vfl_party.data.ids import LOOKED_AT, release_texts, short_look
from vfl_party.data.row_arrays import parts

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

"""Cells of text: which are missing, and which were numbers before a reader wrote them as text."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data.stream import NUMBER

# Texts that are missing values in a column of numbers or dates.
MISSING = pa.array(
    (
        "",
        "NA",
        "N/A",
        "n/a",
        "na",
        "#N/A",
        "NaN",
        "nan",
        "NAN",
        "null",
        "NULL",
        "None",
        "none",
        "?",
        "-",
    ),
    pa.string(),
)


def trim(text: pa.Array) -> pa.Array:
    """Returns the cells without white space at their ends, null if missing."""
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.is_in(trimmed, value_set=MISSING), pa.scalar(None, trimmed.type), trimmed)


def every(mask: pa.Array) -> bool:
    """Returns whether a mask is true wherever it is not null."""
    # The result is None if all cells are missing.
    return pc.all(mask).as_py() is not False


def mask_numbers(text: pa.Array) -> pa.Array:
    """Returns the cells that were text in the source, null for numbers."""
    return pc.if_else(
        pc.fill_null(pc.starts_with(text, NUMBER), False), pa.scalar(None, text.type), text
    )


def plain(text: pa.Array) -> pa.Array:
    """Returns the cells without the mark of numbers."""
    return pc.replace_substring_regex(text, f"^{NUMBER}", "")

"""Finds missing cells of text, and cells that were numbers before a reader converted them to
text.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data.stream import NUMBER

# Texts that stand for missing values in a column of numbers or dates.
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
    """Removes white space from the ends of cells; missing cells become null."""
    trimmed = pc.utf8_trim_whitespace(text)
    return pc.if_else(pc.is_in(trimmed, value_set=MISSING), pa.scalar(None, trimmed.type), trimmed)


def all_true(mask: pa.Array) -> bool:
    """Returns whether all non-null entries of a mask are true."""
    # The result is None if all cells are missing.
    return pc.all(mask).as_py() is not False


def mask_numbers(text: pa.Array) -> pa.Array:
    """Replaces cells that were numbers in the source with null."""
    return pc.if_else(
        pc.fill_null(pc.starts_with(text, NUMBER), False), pa.scalar(None, text.type), text
    )


def strip_mark(text: pa.Array) -> pa.Array:
    """Removes the mark ``NUMBER`` from cells that were numbers in the source."""
    return pc.replace_substring_regex(text, f"^{NUMBER}", "")

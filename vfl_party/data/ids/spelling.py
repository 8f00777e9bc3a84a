"""Normalizes ids by rules, and joins several columns to one id.

An id is text, or None if it is missing. The rules are ``vfl_common.config.data.IdRule``:

- ``trim`` removes white space at both ends.
- ``casefold`` removes case (``str.casefold``: ß is ss).
- ``nfkc`` applies Unicode's normal form NFKC, which unifies full-width digits and composed letters.
- ``digits`` keeps only 0 to 9.
- ``zeros`` removes leading zeros of each run of digits: AT-004051 becomes AT-4051, and 000 becomes
  0.
- ``email`` applies ``trim`` and ``casefold``.
- ``phone:CC`` writes a telephone number as E.164, such as +4930123456. CC is the country of numbers
  without a country code. Text that is not a telephone number is a missing id.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.errors import Code, InputError
from vfl_party.data.ids.packed import CHUNK, GrowingTexts, release_texts
from vfl_party.data.row_arrays import IN_MEMORY, Space, parts

# The separator between the columns of an id, ASCII's unit separator.
SEPARATOR = "\x1f"
Id = str | None
# An ASCII character other than white space.
_VISIBLE = "[!-~]"
_NO_DIGITS = re.compile("[^0-9]+")
FIRST_ZEROS = re.compile("(?<![0-9])0+(?=[0-9])")
_RULES: dict[str, Callable[[str], str]] = {
    "trim": str.strip,
    "casefold": str.casefold,
    "nfkc": partial(unicodedata.normalize, "NFKC"),
    "digits": partial(_NO_DIGITS.sub, ""),
    "zeros": partial(FIRST_ZEROS.sub, ""),
    "email": lambda text: text.strip().casefold(),
}


def normalize_ids(
    columns: Sequence[Any], rules: Sequence[str], space: Space = IN_MEMORY
) -> pa.LargeStringArray:
    """Returns the id of each row, null if missing.

    The rules are applied to each column. Then the columns are joined by ``SEPARATOR``. An id is
    missing if one of its columns is missing, or blank after the rules.

    Args:
        columns: The id columns, each [N]: Arrow text, or a sequence of text and None.
        rules: The id rules, see the module.
        space: The space for many ids.

    Raises InputError if a rule cannot be used on this machine, or if the disk is full.
    """
    steps = [_get_rule(rule) for rule in rules]
    texts = [_to_arrow(column) for column in columns]
    first_column = texts[0]
    if (
        len(texts) == 1
        and not steps
        and isinstance(first_column, pa.Array)
        and _is_plain(first_column)
    ):
        return first_column
    ids = GrowingTexts(space)
    for part in parts(len(first_column), CHUNK):
        ids.append(_join([_apply_rules(_combine(column[part]), steps) for column in texts]))
        release_texts(*texts)
    return ids.finish()


def _is_plain(texts: pa.LargeStringArray) -> bool:
    """Returns whether every text has a visible ASCII character."""
    for part in parts(len(texts), CHUNK):
        is_visible = pc.match_substring_regex(texts[part], _VISIBLE)
        release_texts(texts)
        if is_visible.null_count or not pc.all(is_visible).as_py():
            return False
    return True


def _combine(texts: Any) -> pa.LargeStringArray:
    """Returns a column as one array."""
    return pa.concat_arrays(texts.chunks) if isinstance(texts, pa.ChunkedArray) else texts


def _to_arrow(part: Any) -> Any:
    """Converts a column of ids to Arrow's large strings, with the same chunks."""
    if isinstance(part, pa.Array | pa.ChunkedArray):
        return pc.cast(part, pa.large_string())
    return pa.array(part, pa.large_string())


def _join(columns: Sequence[pa.Array]) -> pa.LargeStringArray:
    separator = pa.scalar(SEPARATOR, pa.large_string())
    return columns[0] if len(columns) == 1 else pc.binary_join_element_wise(*columns, separator)


def _apply_rules(
    part: pa.LargeStringArray, steps: Sequence[Callable[[str], str]]
) -> pa.LargeStringArray:
    if steps:
        texts: list[Id] = part.to_pylist()
        for step in steps:
            texts = [None if text is None else step(text) for text in texts]
        return pa.array(
            [text if text and not text.isspace() else None for text in texts], pa.large_string()
        )
    if _is_plain(part):
        return part
    is_present = [bool(text) and not text.isspace() for text in pc.fill_null(part, "").to_pylist()]
    return pc.if_else(pa.array(is_present), part, pa.scalar(None, pa.large_string()))


def _get_rule(rule: str) -> Callable[[str], str]:
    kind, _, country = rule.partition(":")
    return _make_phone_rule(country) if kind == "phone" else _RULES[rule]


def _make_phone_rule(country: str) -> Callable[[str], str]:
    """Returns the function that normalizes telephone numbers, and returns '' for other text. Raises
    InputError.
    """
    try:
        import phonenumbers
    except ImportError:
        raise InputError(
            Code.CONFIG_INVALID,
            f"the id rule 'phone:{country}' needs phonenumbers, which is not installed. Run pip "
            "install phonenumbers.",
        ) from None
    if country not in phonenumbers.SUPPORTED_REGIONS:
        raise InputError(
            Code.CONFIG_INVALID,
            f"the id rule 'phone:{country}' must name a country. Give two letters of ISO 3166, "
            "such as DE.",
        )

    def normalize(text: str) -> str:
        try:
            number = phonenumbers.parse(text, country)
        except phonenumbers.NumberParseException:
            return ""
        # Only the length is checked, because all parties must get the same result, and the numbers
        # in use change between versions of the library.
        length = phonenumbers.is_possible_number_with_reason(number)
        # Numbers without an area code have other results.
        if length != phonenumbers.ValidationResult.IS_POSSIBLE:
            return ""
        formatted: str = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
        return formatted

    return normalize

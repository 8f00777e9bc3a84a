"""Spells ids by rules, and joins several columns to one id.

An id is text, or None if it is missing. The rules are ``vfl_common.config.data.IdRule``:

- ``trim`` drops white space at both ends, none within.
- ``casefold`` removes case (``str.casefold``: ß is ss).
- ``nfkc`` is Unicode's normal form NFKC: full-width digits and composed letters are unified.
- ``digits`` keeps only 0 to 9.
- ``zeros`` drops leading zeros of each run of digits: AT-004051 is AT-4051, and 000 is 0.
- ``email`` is trim and casefold.
- ``phone:CC`` writes a telephone number as E.164, such as +4930123456. CC is the country of numbers
without one. Text that is not a telephone number is a missing id.
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

# Separator between the columns of an id: the unit separator.
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

    The rules normalize each column's part, then the parts are joined by ``SEPARATOR``. An id is
    missing if a part is missing, or empty or blank after the rules.

    Args:
        columns: of the id, each [N]: Arrow's text, or a sequence of text and None.
        rules: see the module.
        space: of many ids.

    Raises InputError if a rule cannot be used here, or if the disk is full.
    """
    steps = [_step(rule) for rule in rules]
    texts = [_arrow(column) for column in columns]
    one = texts[0]
    if len(texts) == 1 and not steps and isinstance(one, pa.Array) and _is_plain(one):
        return one
    ids = GrowingTexts(space)
    for part in parts(len(one), CHUNK):
        ids.append(_join([_spell(_in_one(column[part]), steps) for column in texts]))
        release_texts(*texts)
    return ids.finish()


def _is_plain(texts: pa.LargeStringArray) -> bool:
    """Returns whether every text has a visible ASCII character."""
    for part in parts(len(texts), CHUNK):
        seen = pc.match_substring_regex(texts[part], _VISIBLE)
        release_texts(texts)
        if seen.null_count or not pc.all(seen).as_py():
            return False
    return True


def _in_one(texts: Any) -> pa.LargeStringArray:
    """Returns a column in one piece."""
    return pa.concat_arrays(texts.chunks) if isinstance(texts, pa.ChunkedArray) else texts


def _arrow(part: Any) -> Any:
    """Returns a column of ids as Arrow's large strings, in as many pieces as it has."""
    if isinstance(part, pa.Array | pa.ChunkedArray):
        return pc.cast(part, pa.large_string())
    return pa.array(part, pa.large_string())


def _join(columns: Sequence[pa.Array]) -> pa.LargeStringArray:
    between = pa.scalar(SEPARATOR, pa.large_string())
    return columns[0] if len(columns) == 1 else pc.binary_join_element_wise(*columns, between)


def _spell(part: pa.LargeStringArray, steps: Sequence[Callable[[str], str]]) -> pa.LargeStringArray:
    if steps:
        texts: list[Id] = part.to_pylist()
        for step in steps:
            texts = [None if text is None else step(text) for text in texts]
        return pa.array(
            [text if text and not text.isspace() else None for text in texts], pa.large_string()
        )
    if _is_plain(part):
        return part
    blank = [bool(text) and not text.isspace() for text in pc.fill_null(part, "").to_pylist()]
    return pc.if_else(pa.array(blank), part, pa.scalar(None, pa.large_string()))


def _step(rule: str) -> Callable[[str], str]:
    kind, _, country = rule.partition(":")
    return _phone(country) if kind == "phone" else _RULES[rule]


def _phone(country: str) -> Callable[[str], str]:
    """Returns the rule for telephone numbers, which gives '' for other text. Raises InputError."""
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
        # By its length alone: what numbers are in use changes between versions of the library, and
        # parties must agree.
        length = phonenumbers.is_possible_number_with_reason(number)
        # Other results include numbers without an area code.
        if length != phonenumbers.ValidationResult.IS_POSSIBLE:
            return ""
        formatted: str = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
        return formatted

    return normalize

"""Normalizes ids by rules, joins several columns to one id, and describes the shapes of ids without
revealing an id, for a person who chooses the rules.

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
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings, Duplicates, KeyColumns
from vfl_common.errors import Code, InputError
from vfl_common.text import format_percent, to_json
from vfl_party.data.ids import CHUNK, GrowingTexts, IdCounts, Ids, in_order, release_texts
from vfl_party.data.row_arrays import IN_MEMORY, Space, parts

ASK = "Ask the other parties: shapes and shares should be about the same at every party."
# The maximum number of ids whose shapes are counted.
LOOKED_AT = 10_000
# The maximum number of shapes in a description.
_MAX_SHAPES = 4
# The minimum share of ids that the most common shapes must cover to be described.
_MIN_SHARE = 0.9
# The maximum number of characters in a shape.
_LONGEST_LOOK = 24
_LETTER, _DIGIT, _SEVERAL = re.compile(r"[^\W\d_]"), re.compile(r"\d"), re.compile(r"(A|0)\1+")
_NUMBER = re.compile("[0-9]{2}")


def choices(parts: Sequence[Any], rules: Sequence[str], duplicates: Duplicates) -> list[str]:
    """Returns lines of text for a person who chooses id rules and a policy for duplicates: how many
    rows each choice keeps.
    """
    lines, shapes = [f"{len(parts[0]):,} rows in the source"], []
    for used in range(len(rules) + 1):
        ids = normalize_ids(parts, rules[:used])
        first, drop = (
            IdCounts.of(ids, len(in_order(ids, policy).rows)) for policy in ("first", "drop")
        )
        counts = drop if duplicates == "drop" else first
        after = f"after {', '.join(rules[:used])}" if used else "as they come"
        lines.append(
            f"{after}: {first.missing:,} missing, {first.repeated:,} repeat an earlier row's; "
            f"kept: {first.remaining:,}"
            + (
                f' with duplicates = "first", {drop.remaining:,} with "drop"'
                if first.repeated
                else ""
            )
        )
        shapes.append(shapes_of(Ids(ids.drop_null())))
    if shapes[0] == shapes[-1]:
        lines.append(f"shapes: {shapes[0]}. {ASK}")
    else:
        lines += [
            f"shapes as they come: {shapes[0]}",
            f"shapes after the rules: {shapes[-1]}. {ASK}",
        ]
    refused = duplicates == "error" and counts.repeated
    return [
        *lines,
        f'duplicates = "{duplicates}": {"refused" if refused else f"{counts.remaining:,} rows are kept"}',  # noqa: E501
    ]


def shapes_of(ids: Sequence[str]) -> str:
    """Describes the shapes of ids with their shares, without revealing an id.

    ``A`` stands for a letter and ``0`` for a digit: ``AA-0000000 75 %, AA-000000 22 %, others 3
    %``. If ids contain leading zeros, or numbers of several lengths, the text also has the share of
    ids in which a number begins with 0.
    """
    ids = _sample(ids)
    shape_counts = Counter(_get_shape(text) for text in ids)
    short_counts: Counter[str] = Counter()
    for look, count in shape_counts.items():
        short_counts[_SEVERAL.sub(r"\1", look)] += count
    zeros = sum(FIRST_ZEROS.search(text) is not None for text in ids)
    has_lengths = len(shape_counts) > len(short_counts) and any(map(_NUMBER.search, shape_counts))
    zeros_text = (
        f"; a number begins with 0 in {format_percent(zeros, len(ids))}"
        if zeros
        else "; no number begins with 0"
    )
    for counts, lengths, min_share in (
        (shape_counts, "", _MIN_SHARE),
        (short_counts, " of several lengths", 0.5),
    ):
        common_shapes = counts.most_common(_MAX_SHAPES)
        if sum(count for _, count in common_shapes) > min_share * len(ids):
            shares = _format_shares(common_shapes, len(ids))
            return f"{shares}{lengths}{zeros_text if zeros or has_lengths else ''}"
    return "too many to show" if shape_counts else "none"


def about_zeros(ids: Sequence[str], rules: Sequence[str]) -> str:
    """Returns a note if numbers in ids begin with 0, because another party's table may have lost
    these zeros; else ''.

    Ids with many different shapes, such as hexadecimal ids, are ignored, because their digits are
    not numbers.

    Args:
        ids: The ids, normalized by the rules.
        rules: The id rules, see this module.
    """
    ids = _sample(ids)
    commonest = Counter(map(short_look, ids)).most_common(1)
    if {"zeros", "email"} & {*rules} or not commonest or commonest[0][1] <= len(ids) / 2:
        return ""
    if not any(map(FIRST_ZEROS.search, ids)):
        return ""
    note = (
        "numbers in the ids begin with 0. If the table of another party has lost these zeros, add "
        '"zeros" to rows.id_rules.'
    )
    shape = commonest[0][0]
    if shape.count("0") == 1 and shape != "0" and "digits" not in rules:
        note += (
            " If it has only the numbers, without the text around them, add both: "
            f"rows.id_rules = {to_json([*rules, 'digits', 'zeros'])}."
        )
    return note


def _sample(ids: Sequence[str]) -> Sequence[str]:
    """Returns at most ``LOOKED_AT`` ids, spread over the whole table, because the first ids may be
    the shortest.
    """
    return ids[:: max(1, -(-len(ids) // LOOKED_AT))]


def _format_shares(shapes: Sequence[tuple[str, int]], total: int) -> str:
    """Returns shapes with their shares of ``total`` ids; a single shape without its share."""
    shapes = [shape for shape in shapes if shape[1] >= total / 100] or shapes[:1]
    safe_shapes = [(re.sub(r"[^A0 ./@_+-]", "?", shape), count) for shape, count in shapes]
    cells = [
        (repr(shape) if shape != shape.strip() else shape, count) for shape, count in safe_shapes
    ]
    others = total - sum(count for _, count in cells)
    if len(cells) == 1 and not others:
        return cells[0][0]
    other_cells = [("others", others)] if others else []
    return ", ".join(
        f"{shape} {format_percent(count, total)}" for shape, count in [*cells, *other_cells]
    )


def short_look(text: str) -> str:
    """Returns the shape of an id without the lengths of its words and numbers: ``A-0`` for
    ``AT-4051``.
    """
    return _SEVERAL.sub(r"\1", _get_shape(text))


def _get_shape(text: str) -> str:
    text = text[:_LONGEST_LOOK].replace(SEPARATOR, " ")
    return _LETTER.sub("A", _DIGIT.sub("0", text))


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


def spell_ids(
    columns: Sequence[Any], settings: DataSettings, space: Space = IN_MEMORY
) -> pa.LargeStringArray:
    """Returns the id of each row by the rules of the settings; see ``normalize_ids``.

    With the keys of a recipe, a missing cell is empty text in the id, and an id is missing if the
    row has no key. ``split_keys`` takes the keys from the id. Raises InputError.
    """
    if (keys := settings.key_columns) is None:
        return normalize_ids(columns, settings.id_rules or (), space)
    texts, ids = _normalize_columns(columns, keys), GrowingTexts(space)
    for part in parts(len(texts[0]), CHUNK):
        cells = [pc.fill_null(column[part], "") for column in texts]
        if any(pc.any(pc.match_substring(cell, SEPARATOR)).as_py() for cell in cells):
            raise InputError(
                Code.DATA_INVALID,
                f"{settings.source}: a cell of the columns {', '.join(settings.id)} has the "
                "character U+001F, which separates the keys. Remove it.",
            )
        joined = _join(cells)
        has_key = [key.is_valid() for key in split_keys(joined, keys)]
        ids.append(pc.if_else(reduce(pc.or_, has_key), joined, pa.scalar(None, pa.large_string())))
        release_texts(*texts)
    return ids.finish()


def _normalize_columns(columns: Sequence[Any], keys: KeyColumns) -> list[pa.LargeStringArray]:
    pairs = zip(columns, keys.rules, strict=True)
    return [normalize_ids([column], rules) for column, rules in pairs]


def split_keys(ids: pa.LargeStringArray, keys: KeyColumns) -> list[pa.LargeStringArray]:
    """Returns each key of the rows, [N] text, null where a column of the key is missing."""
    cells = pc.split_pattern(ids, SEPARATOR)
    empty, none = pa.scalar("", pa.large_string()), pa.scalar(None, pa.large_string())

    def get_cell(position: int) -> pa.LargeStringArray:
        cell = pc.list_element(cells, position)
        return pc.if_else(pc.equal(cell, empty), none, cell)

    return [_join([get_cell(position) for position in key]) for key in keys.keys]


def describe_keys(columns: Sequence[Any], keys: KeyColumns, names: Sequence[str]) -> list[str]:
    """Returns lines of text about each key: how many rows have it, how many of these share it with
    another row, and its shapes.
    """
    texts = _normalize_columns(columns, keys)
    key_ids = [_join([texts[position] for position in key]) for key in keys.keys]
    has_key = reduce(pc.or_, [ids.is_valid() for ids in key_ids])
    without = len(texts[0]) - pc.sum(has_key).as_py()
    lines = [f"{len(texts[0]):,} rows in the source, {without:,} without any key"]
    for number, (name, ids) in enumerate(zip(names, key_ids, strict=True), 1):
        held, unique = len(ids) - ids.null_count, len(in_order(ids, "drop").rows)
        lines.append(
            f"key {number}, {name}: {held:,} rows have it, {unique:,} of them alone; shapes: "
            f"{shapes_of(Ids(ids.drop_null()))}"
        )
    return [*lines, ASK]


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

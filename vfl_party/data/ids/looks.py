"""Describes the shapes of ids without revealing an id, for a person who chooses the id rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vfl_common.config.data import Duplicates
from vfl_common.text import format_percent
from vfl_party.data.ids.order import IdCounts, in_order
from vfl_party.data.ids.spelling import FIRST_ZEROS, SEPARATOR, normalize_ids
from vfl_party.data.ids.texts import Ids

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
        rules: The id rules, see ``vfl_party.data.ids.spelling``.
    """
    ids = _sample(ids)
    commonest = Counter(map(short_look, ids)).most_common(1)
    if {"zeros", "email"} & {*rules} or not commonest or commonest[0][1] <= len(ids) / 2:
        return ""
    return (
        "numbers in the ids begin with 0. If the table of another party has lost these zeros, add "
        '"zeros" to rows.id_rules.'
        if any(map(FIRST_ZEROS.search, ids))
        else ""
    )


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

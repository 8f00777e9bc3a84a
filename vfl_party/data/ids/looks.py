"""Describes the shapes of ids, for a person who chooses rules; nothing here shows an id."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from vfl_common.config.data import Duplicates
from vfl_common.text import percent
from vfl_party.data.ids.order import IdCounts, in_order
from vfl_party.data.ids.spelling import FIRST_ZEROS, SEPARATOR, normalize_ids
from vfl_party.data.ids.texts import Ids

ASK = "Ask the other parties: shapes and shares should be about the same at every party."
# Maximum number of ids whose shape is counted.
LOOKED_AT = 10_000
# Maximum number of shapes shown, with their shares.
_MAX_SHAPES = 4
# The share of the ids that the shapes with all lengths must have to be shown.
_MIN_SHARE = 0.9
# Maximum characters of an id that its shape shows.
_LONGEST_LOOK = 24
_LETTER, _DIGIT, _SEVERAL = re.compile(r"[^\W\d_]"), re.compile(r"\d"), re.compile(r"(A|0)\1+")
_NUMBER = re.compile("[0-9]{2}")


def choices(parts: Sequence[Any], rules: Sequence[str], duplicates: Duplicates) -> list[str]:
    """Returns lines for a person who chooses rules and policy: the rows that each choice keeps,
    without any id.
    """
    lines, looks = [f"{len(parts[0]):,} rows in the source"], []
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
        looks.append(shapes_of(Ids(ids.drop_null())))
    if looks[0] == looks[-1]:
        lines.append(f"shapes: {looks[0]}. {ASK}")
    else:
        lines += [f"shapes as they come: {looks[0]}", f"shapes after the rules: {looks[-1]}. {ASK}"]
    refused = duplicates == "error" and counts.repeated
    return [
        *lines,
        f'duplicates = "{duplicates}": {"refused" if refused else f"{counts.remaining:,} rows are kept"}',  # noqa: E501
    ]


def shapes_of(ids: Sequence[str]) -> str:
    """Returns the shapes of ids with their shares, without any id, for people to compare.

    ``A`` is a letter and ``0`` a digit: ``AA-0000000 75 %, AA-000000 22 %, others 3 %``. If ids
    contain leading zeros, or numbers of several lengths, it also gives the share of ids in which a
    number begins with 0.
    """
    ids = _sample(ids)
    looks = Counter(_look(text) for text in ids)
    shorter: Counter[str] = Counter()
    for look, count in looks.items():
        shorter[_SEVERAL.sub(r"\1", look)] += count
    zeros = sum(FIRST_ZEROS.search(text) is not None for text in ids)
    several = len(looks) > len(shorter) and any(map(_NUMBER.search, looks))
    begin = (
        f"; a number begins with 0 in {percent(zeros, len(ids))}"
        if zeros
        else "; no number begins with 0"
    )
    for counts, lengths, min_share in (
        (looks, "", _MIN_SHARE),
        (shorter, " of several lengths", 0.5),
    ):
        common = counts.most_common(_MAX_SHAPES)
        if sum(count for _, count in common) > min_share * len(ids):
            return f"{_format_shares(common, len(ids))}{lengths}{begin if zeros or several else ''}"
    return "too many to show" if looks else "none"


def about_zeros(ids: Sequence[str], rules: Sequence[str]) -> str:
    """Returns a note if numbers in ids begin with 0, which another party's table may have lost;
    else ''.

    Ids that mix letters and digits in any order, such as hexadecimal ones, contain no numbers. If
    no number begins with 0, the ids are not suspect: row numbers have several lengths too.

    Args:
        ids: normalized by the rules.
        rules: see ``vfl_party.data.ids.spelling``.
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
    """Returns at most ``LOOKED_AT`` ids from the whole table: the first ones may be the
    shortest.
    """
    return ids[:: max(1, -(-len(ids) // LOOKED_AT))]


def _format_shares(shapes: Sequence[tuple[str, int]], total: int) -> str:
    """Returns shapes with their shares of ``total`` ids; a single shape without its share."""
    shapes = [shape for shape in shapes if shape[1] >= total / 100] or shapes[:1]
    cleaned = [(re.sub(r"[^A0 ./@_+-]", "?", shape), count) for shape, count in shapes]
    cells = [(repr(shape) if shape != shape.strip() else shape, count) for shape, count in cleaned]
    others = total - sum(count for _, count in cells)
    if len(cells) == 1 and not others:
        return cells[0][0]
    more = [("others", others)] if others else []
    return ", ".join(f"{shape} {percent(count, total)}" for shape, count in [*cells, *more])


def short_look(text: str) -> str:
    """Returns the shape of an id without the lengths of its words and numbers: ``A-0`` for
    ``AT-4051``.
    """
    return _SEVERAL.sub(r"\1", _look(text))


def _look(text: str) -> str:
    text = text[:_LONGEST_LOOK].replace(SEPARATOR, " ")
    return _LETTER.sub("A", _DIGIT.sub("0", text))

"""Makes ids comparable: spells them by rules, joins several columns to one id, counts missing and
repeated ones.

An id is text, or None if it is missing. The rules are ``vfl_common.config.data.IdRule``:

- ``trim`` drops white space at both ends, none within.
- ``casefold`` makes upper and lower case alike (``str.casefold``: ß is ss).
- ``nfkc`` is Unicode's normal form NFKC: full-width digits and composed letters are written in one
  way.
- ``digits`` keeps 0 to 9 and nothing else.
- ``zeros`` drops the zeros with which a run of digits begins: AT-004051 is AT-4051, and 000 is 0.
- ``email`` is trim and casefold.
- ``phone:CC`` writes a telephone number as E.164, such as +4930123456. CC is the country of numbers
  that are written without one. What is no number is a missing id.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import Duplicates
from vfl_common.errors import Code, InputError
from vfl_common.text import percent
from vfl_party.data.row_arrays import parts

ASK = "shapes and shares should be about the same at every party: ask the others"
# Between the columns of an id: Unicode's own unit separator.
SEPARATOR = "\x1f"
Id = str | None
Positions = npt.NDArray[np.int64]
# Ids that become Python's text at once.
_CHUNK = 1 << 16
# A character of ASCII that is no white space.
_VISIBLE = "[!-~]"
# Ids whose look is counted.
LOOKED_AT = 10_000
# That are shown, with their shares.
_MOST_SHAPES = 4
# The share of the ids that the shapes with all lengths must have to be shown.
_ENOUGH = 0.9
# Characters.
_LONGEST_LOOK = 24
# Bytes of an id that is sorted eight bytes at a time.
_LONGEST = 64
_FIRST_BYTES = np.array(
    [0xFFFFFFFFFFFFFFFF ^ ((1 << 8 * (8 - count)) - 1) for count in range(9)], np.uint64
)
_NO_DIGITS = re.compile("[^0-9]+")
_LETTER, _DIGIT, _SEVERAL = re.compile(r"[^\W\d_]"), re.compile(r"\d"), re.compile(r"(A|0)\1+")
_FIRST_ZEROS = re.compile("(?<![0-9])0+(?=[0-9])")
_NUMBER = re.compile("[0-9]{2}")
_RULES: dict[str, Callable[[str], str]] = {
    "trim": str.strip,
    "casefold": str.casefold,
    "nfkc": partial(unicodedata.normalize, "NFKC"),
    "digits": partial(_NO_DIGITS.sub, ""),
    "zeros": partial(_FIRST_ZEROS.sub, ""),
    "email": lambda text: text.strip().casefold(),
}


class Ids(Sequence[str]):
    """Ids in order, in little more memory than their text: a sequence of str.

    ``values``: Arrow's large strings, without nulls.
    """

    def __init__(self, values: pa.LargeStringArray) -> None:
        self.values = values

    @classmethod
    def of(cls, texts: Iterable[str]) -> Ids:
        """Returns the same ids; those of an ``Ids`` are not copied."""
        return texts if isinstance(texts, Ids) else cls(pa.array(texts, pa.large_string()))

    def taken(self, rows: npt.NDArray[np.integer[Any]]) -> Ids:
        """Returns the ids of the given rows, in their order."""
        return Ids(self.values.take(pa.array(rows)))

    def among(self, others: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns for each id whether it is among ``others``."""
        found: npt.NDArray[np.bool_] = pc.is_in(
            self.values, value_set=Ids.of(others).values
        ).to_numpy(False)
        return found

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Ids: ...
    def __getitem__(self, at: int | slice) -> str | Ids:
        if isinstance(at, slice):
            return Ids(self.values[at])
        text: str = self.values[at].as_py()
        return text

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _CHUNK):
            yield from self.values.slice(start, _CHUNK).to_pylist()

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ids):
            return bool(self.values.equals(other.values))
        return (
            isinstance(other, Sequence)
            and len(self) == len(other)
            and all(map(str.__eq__, self, other))
        )

    def __repr__(self) -> str:
        return f"Ids({len(self)})"


@dataclass(frozen=True)
class IdCounts:
    """``rows`` of a source, those that miss an id, and those that are left out because another row
    has theirs, or because they have no label.
    """

    rows: int
    missing: int
    repeated: int
    unlabelled: int = 0

    @classmethod
    def of(cls, ids: pa.Array, kept: int, unlabelled: int = 0) -> IdCounts:
        """Counts all rows: ``kept`` stay, ``unlabelled`` ids are null for want of a label."""
        missing = ids.null_count - unlabelled
        return cls(len(ids), missing, len(ids) - ids.null_count - kept, unlabelled)

    @property
    def kept(self) -> int:
        return self.rows - self.missing - self.repeated - self.unlabelled

    @property
    def left_out(self) -> str:
        """Words how many rows are left out, and why; '' if all are kept."""
        why = [f"{self.missing:,} without an id"] if self.missing else []
        why += [f"{self.repeated:,} with a repeated id"] if self.repeated else []
        why += [f"{self.unlabelled:,} without a label"] if self.unlabelled else []
        return (
            f"{self.rows - self.kept:,} of {self.rows:,} rows are left out: {', '.join(why)}"
            if why
            else ""
        )


def normalised(parts: Sequence[Any], rules: Sequence[str]) -> pa.LargeStringArray:
    """Returns the id of each row, null if it is missing.

    Each column's part is spelt by the rules, then the parts are joined by ``SEPARATOR``. An id is
    missing if a part is missing, or empty or blank after the rules.

    Args:
        parts: a column of the id each, [N]: Arrow's text, or a sequence of text and None.
        rules: see the module.

    Raises InputError if a rule cannot be used here.
    """
    steps = [_step(rule) for rule in rules]
    columns = [_arrow(part) for part in parts]
    chunks = [
        _joined([_spelt(column.slice(start, _CHUNK), steps) for column in columns])
        for start in range(0, len(columns[0]), _CHUNK)
    ]
    return pa.concat_arrays(chunks) if chunks else pa.array([], pa.large_string())


def in_order(ids: pa.LargeStringArray, duplicates: Duplicates) -> Positions:
    """Returns the rows to keep, sorted by the UTF-8 bytes of their ids: those with an id, and of
    equal ones by policy.

    The first of equal ids is kept, or none of them for ``drop``.
    """
    rows, same = _sorted(ids)
    if duplicates == "drop":
        same = same | np.append(same[1:], False)
    return rows[~same]


def kept_rows(ids: Sequence[Id], duplicates: Duplicates) -> list[int]:
    """Returns the rows to keep, ascending: see ``in_order``."""
    return sorted(in_order(pa.array(ids, pa.large_string()), duplicates).tolist())


def first_repeated(ids: pa.LargeStringArray) -> tuple[int, int]:
    """Returns the first row that has the id of an earlier one: (the earlier row, the row). There
    must be one.
    """
    rows, same = _sorted(ids)
    place = np.flatnonzero(same)[rows[same].argmin()]
    # Equal ids are in the order of their rows.
    first = place - 1 - int(same[:place][::-1].argmin())
    return int(rows[first]), int(rows[place])


def choices(parts: Sequence[Any], rules: Sequence[str], duplicates: Duplicates) -> list[str]:
    """Returns lines for a person who chooses rules and policy: the rows that each choice keeps.
    They show no id.
    """
    lines, looks = [f"{len(parts[0]):,} rows in the source"], []
    for used in range(len(rules) + 1):
        ids = normalised(parts, rules[:used])
        first, drop = (IdCounts.of(ids, len(in_order(ids, each))) for each in ("first", "drop"))
        counts = drop if duplicates == "drop" else first
        after = f"after {', '.join(rules[:used])}" if used else "as they come"
        found = f"{after}: {first.missing:,} missing, {first.repeated:,} repeat an earlier row's"
        others = f' with duplicates = "first", {drop.kept:,} with "drop"' if first.repeated else ""
        lines.append(f"{found}; kept: {first.kept:,}{others}")
        looks.append(shapes_of(Ids(ids.drop_null())))
    if looks[0] == looks[-1]:
        lines.append(f"shapes: {looks[0]}; {ASK}")
    else:
        lines += [f"shapes as they come: {looks[0]}", f"shapes after the rules: {looks[-1]}; {ASK}"]
    refused = duplicates == "error" and counts.repeated
    return [
        *lines,
        f'duplicates = "{duplicates}": {"refused" if refused else f"{counts.kept:,} rows are kept"}',  # noqa: E501
    ]


def shapes_of(ids: Sequence[str]) -> str:
    """Returns how ids look, with shares: people compare it, and it shows no id.

    ``A`` is a letter and ``0`` a digit: ``AA-0000000 75 %, AA-000000 22 %, others 3 %``. If numbers
    are written with zeros at their beginning, or have several lengths, it says in how many ids a
    number begins with 0.
    """
    ids = _sampled(ids)
    looks = Counter(_look(text) for text in ids)
    shorter: Counter[str] = Counter()
    for look, count in looks.items():
        shorter[_SEVERAL.sub(r"\1", look)] += count
    zeros = sum(_FIRST_ZEROS.search(text) is not None for text in ids)
    several = len(looks) > len(shorter) and any(map(_NUMBER.search, looks))
    begin = (
        f"; a number begins with 0 in {percent(zeros, len(ids))}"
        if zeros
        else "; no number begins with 0"
    )
    for found, lengths, least in ((looks, "", _ENOUGH), (shorter, " of several lengths", 0.5)):
        shown = found.most_common(_MOST_SHAPES)
        if sum(count for _, count in shown) > least * len(ids):
            return f"{_with_shares(shown, len(ids))}{lengths}{begin if zeros or several else ''}"
    return "too many to show" if looks else "none"


def about_zeros(ids: Sequence[str], rules: Sequence[str]) -> str:
    """Returns a sentence if numbers in ids begin with 0, which another party's table may have lost;
    else ''.

    Ids that mix letters and digits in any order, as hexadecimal ones do, have no numbers. Ids none
    of which begins with 0 are not suspect: numbers that count the rows have several lengths, too.

    Args:
        ids: as the rules spell them.
        rules: see the module.
    """
    ids = _sampled(ids)
    alike = Counter(map(short_look, ids)).most_common(1)
    if {"zeros", "email"} & {*rules} or not alike or alike[0][1] <= len(ids) / 2:
        return ""
    what = "numbers in the ids begin with 0: if the table of another party has lost these zeros"
    return f'{what}, add "zeros" to rows.id_rules' if any(map(_FIRST_ZEROS.search, ids)) else ""


def _sampled(ids: Sequence[str]) -> Sequence[str]:
    """Returns at most ``LOOKED_AT`` ids from the whole of a table: the first ones may be the
    shortest.
    """
    return ids[:: max(1, -(-len(ids) // LOOKED_AT))]


def _with_shares(shapes: Sequence[tuple[str, int]], total: int) -> str:
    """Lists shapes with their shares of ``total`` ids; a single one stands for all."""
    shapes = [each for each in shapes if each[1] >= total / 100] or shapes[:1]
    cleaned = [(re.sub(r"[^A0 ./@_-]", "?", shape), count) for shape, count in shapes]
    shown = [(repr(shape) if shape != shape.strip() else shape, count) for shape, count in cleaned]
    others = total - sum(count for _, count in shown)
    if len(shown) == 1 and not others:
        return shown[0][0]
    more = [("others", others)] if others else []
    return ", ".join(f"{shape} {percent(count, total)}" for shape, count in [*shown, *more])


def short_look(text: str) -> str:
    """Returns how an id looks, whatever the lengths of its words and numbers: ``A-0`` of
    ``AT-4051``.
    """
    return _SEVERAL.sub(r"\1", _look(text))


def _look(text: str) -> str:
    text = text[:_LONGEST_LOOK].replace(SEPARATOR, " ")
    return _LETTER.sub("A", _DIGIT.sub("0", text))


def _sorted(ids: pa.LargeStringArray) -> tuple[Positions, npt.NDArray[np.bool_]]:
    """Returns the rows with an id, sorted by it and then by row, and for each whether the one
    before has its id.
    """
    present = np.flatnonzero(ids.is_valid().to_numpy(False)) if ids.null_count else None
    ids = ids if present is None else ids.take(pa.array(present))
    order = _order(ids)
    values = ids.take(pa.array(order))
    same = np.zeros(len(order), bool)
    if len(order) > 1:
        same[1:] = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(False)
    return order if present is None else present[order], same


def _order(ids: pa.LargeStringArray) -> Positions:
    """Returns the rows sorted by their ids' bytes, those of equal ids in their order.

    The bytes are compared eight at a time, the last ones first: four times as fast as one id with
    another. Where an id ends, its bytes are 0; of ids that differ in nothing else the shorter one
    comes first.
    """
    starts, lengths, data = _bytes(ids)
    longest = int(lengths.max(initial=0))
    if longest > _LONGEST or not longest:
        # A stable sort.
        rows: Positions = pc.array_sort_indices(ids).to_numpy().astype(np.int64)
        return rows
    order = (
        None if lengths.min() == longest else np.argsort(lengths.astype(np.uint8), kind="stable")
    )
    for start in reversed(range(0, longest, 8)):
        words_N = _words(starts, lengths, data, start)
        if order is None:
            order = np.argsort(words_N, kind="stable")
        elif words_N.min() != words_N.max():
            words_N = words_N[order]
            order = order[np.argsort(words_N, kind="stable")]
    assert order is not None  # noqa: S101 - an id has a byte
    return order


def _bytes(
    ids: pa.LargeStringArray,
) -> tuple[Positions, npt.NDArray[np.int32], npt.NDArray[np.uint8]]:
    """Returns where each id begins in the bytes of all, how many it has, and the bytes."""
    offsets = np.frombuffer(ids.buffers()[1], np.int64)[ids.offset : ids.offset + len(ids) + 1]
    data = ids.buffers()[2]
    return (
        offsets[:-1],
        np.diff(offsets).astype(np.int32),
        np.frombuffer(data if data is not None else b"", np.uint8),
    )


def _words(
    starts: Positions, lengths: npt.NDArray[np.int32], data: npt.NDArray[np.uint8], start: int
) -> npt.NDArray[np.uint64]:
    """Returns eight bytes of each id, from its byte ``start``, as a number; 0 for bytes that it has
    not.
    """
    words_N = np.zeros(len(starts), np.uint64)
    eight = np.lib.stride_tricks.sliding_window_view(data, 8) if len(data) >= 8 else None
    for part in parts(len(starts), _CHUNK):
        at_B, counts_B = starts[part] + start, np.clip(lengths[part] - start, 0, 8)
        found_B = np.zeros(len(at_B), np.uint64)
        inside_B = at_B + 8 <= len(data)
        if eight is not None:
            found_B[inside_B] = eight[at_B[inside_B]].view(">u8").reshape(-1)
        # The last ids.
        for row in np.flatnonzero(~inside_B).tolist():
            found_B[row] = int.from_bytes(data[at_B[row] :][:8].tobytes().ljust(8, b"\0"), "big")
        words_N[part] = found_B & _FIRST_BYTES[counts_B]
    return words_N


def _arrow(part: Any) -> Any:
    """Returns a column of ids as Arrow's large strings, in as many pieces as it has."""
    if isinstance(part, pa.Array | pa.ChunkedArray):
        return pc.cast(part, pa.large_string())
    return pa.array(part, pa.large_string())


def _joined(columns: Sequence[pa.Array]) -> pa.LargeStringArray:
    between = pa.scalar(SEPARATOR, pa.large_string())
    return columns[0] if len(columns) == 1 else pc.binary_join_element_wise(*columns, between)


def _spelt(part: Any, steps: Sequence[Callable[[str], str]]) -> pa.LargeStringArray:
    if steps:
        texts: list[Id] = part.to_pylist()
        for step in steps:
            texts = [None if text is None else step(text) for text in texts]
        return pa.array(
            [text if text and not text.isspace() else None for text in texts], pa.large_string()
        )
    part = part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part
    part = pa.concat_arrays(part.chunks) if isinstance(part, pa.ChunkedArray) else part
    plain = pc.match_substring_regex(part, _VISIBLE)
    if pc.all(plain).as_py() is not False and not plain.null_count:
        return part
    blank = [bool(text) and not text.isspace() for text in pc.fill_null(part, "").to_pylist()]
    return pc.if_else(pa.array(blank), part, pa.scalar(None, pa.large_string()))


def _step(rule: str) -> Callable[[str], str]:
    kind, _, country = rule.partition(":")
    return _phone(country) if kind == "phone" else _RULES[rule]


def _phone(country: str) -> Callable[[str], str]:
    """Returns the rule for telephone numbers; it gives '' for what is none. Raises InputError."""
    try:
        import phonenumbers
    except ImportError:
        text = f"the id rule 'phone:{country}' needs phonenumbers, which is not installed"
        raise InputError(Code.CONFIG_INVALID, f"{text}: pip install phonenumbers") from None
    if country not in phonenumbers.SUPPORTED_REGIONS:
        text = (
            f"the id rule 'phone:{country}' names no country; give two letters of ISO 3166, "
            "such as DE"
        )
        raise InputError(Code.CONFIG_INVALID, text)

    def spelt(text: str) -> str:
        try:
            number = phonenumbers.parse(text, country)
        except phonenumbers.NumberParseException:
            return ""
        # By its length alone: what numbers are in use changes between versions of the library, and
        # parties must agree.
        length = phonenumbers.is_possible_number_with_reason(number)
        # Also if it has no area code.
        if length != phonenumbers.ValidationResult.IS_POSSIBLE:
            return ""
        found: str = phonenumbers.format_number(number, phonenumbers.PhoneNumberFormat.E164)
        return found

    return spelt

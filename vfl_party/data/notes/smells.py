"""Notes likely problems of a readable table, for its owner: notes may show single cells."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.passwords import hide_passwords
from vfl_party.data import checks
from vfl_party.data.cells import number_formats
from vfl_party.data.cells.dates import Dates, look_like_dates
from vfl_party.data.columns import Columns, Rows
from vfl_party.data.ids import IdCounts, in_order, normalize_ids
from vfl_party.data.notes.odd_ids import find_odd_ids
from vfl_party.data.notes.odd_numbers import find_odd_numbers
from vfl_party.data.row_arrays import parts
from vfl_party.data.table import count_words

# Number of rows below which nothing is noted.
MIN_ROWS = 20
# Maximum characters shown of a cell.
MAX_SHOWN = 24
# A number with a unit, such as 70 kg.
_UNIT = re.compile(r"\s*[+-]?[0-9][0-9.,]*\s*([A-Za-z\u00b0\u00b5\u00b2\u00b3/]{1,8})\s*")
_YES = frozenset(
    ("1", "y", "yes", "t", "true", "j", "ja", "wahr", "oui", "vrai", "si", "s\u00ed", "s\u00ec")
)
_NO = frozenset(("0", "n", "no", "f", "false", "nein", "falsch", "non", "faux"))


@dataclass(frozen=True)
class Smell:
    """A note for a person. ``column``: the feature column that it is about; ``mostly``: the kind of
    most of its cells.

    Those cells look like numbers or dates, but the column is read as categories.
    """

    text: str
    column: str = ""
    mostly: Literal["", "numbers", "dates"] = ""


def find_smells(rows: Rows, settings: DataSettings) -> Iterator[Smell]:
    """Yields a note for each problem, in the order of the columns."""
    if settings.id and not rows.numbered:
        yield from map(Smell, _ids(rows, settings))
    if rows.labels is not None and rows.labels.dtype == object:
        labels = sorted({*rows.labels.tolist()} - {None})
        yield from map(Smell, _find_spellings(f"labels in {settings.label!r}", labels))
        yield from map(Smell, _yes_and_no(f"labels in {settings.label!r}", labels))
    if isinstance(rows.features, Columns):
        for name, text in find_odd_numbers(rows.features):
            yield Smell(text, name)
        for k, name in enumerate(rows.features.categorical_names):
            if name not in settings.categorical:
                yield from _words(rows.features, k, name, settings)


def _words(columns: Columns, k: int, name: str, settings: DataSettings) -> Iterator[Smell]:
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
    several = list(_yes_and_no(f"categories of {name!r}", words))
    if several:
        yield Smell(several[0], name)
        return
    kinds: tuple[tuple[Literal["numbers", "dates"], Callable[[pa.Array], pa.Array]], ...]
    kinds = (("numbers", number_formats.look_like_numbers), ("dates", look_like_dates))
    for kind, test in kinds:
        like = test(texts).to_numpy(zero_copy_only=False)
        matching = int(counts[like].sum())
        if total and matching == total:
            yield Smell(_describe_column(name, words, kind), name, kind)
        elif matching > total / 2:
            # Words are in the order in which they come.
            strange = int(np.flatnonzero(~like)[0])
            row = _first_row(cells.codes_NK[:, k], strange)
            where = checks.rows(hide_passwords(settings.source), row + 1)
            word = words[strange][:MAX_SHOWN]
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
            f"{_unread(words, kind)!r}. Set data.decimal and data.thousands to how they are "
            "written."
        )
    return (
        f"column {name!r} is read as categories, though its cells look like dates, such as "
        f'{_unread(words, kind)!r}. Set data.dates to how they are written, such as "%d.%m.%y" '
        "for a year of two digits."
    )


def _unread(words: Sequence[str], kind: str) -> str:
    """Returns a word that is not a number or date in the usual form; the first one if all are."""
    usual = number_formats.Numbers() if kind == "numbers" else Dates("%d.%m.%Y")
    return next((word for word in words if usual.read(pa.array([word])) is None), words[0])[
        :MAX_SHOWN
    ]


def _yes_and_no(what: str, words: Sequence[str]) -> Iterator[str]:
    """Yields a note if all words mean yes or no, and one of the two in several spellings."""
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
    twice = [word[:MAX_SHOWN] for word in words if times[word.strip().casefold()] > 1]
    if twice:
        yield (
            f"{what} differ by spaces or capitals alone, such as {twice[0]!r} and "
            f"{twice[1]!r}. Write them the same way."
        )


def _first_row(codes_N: npt.NDArray[np.int32], code: int) -> int:
    """Returns the first row with a code, which must exist."""
    for part in parts(len(codes_N)):
        matches = np.flatnonzero(codes_N[part] == code)
        if len(matches):
            return int(part.start + matches[0])
    raise ValueError("no row holds the code")


def _ids(rows: Rows, settings: DataSettings) -> Iterator[str]:
    rules = settings.id_rules or ()
    spelt = [normalize_ids(rows.ids, used) for used in (rules, (*rules, "trim", "casefold"))]
    counts = [IdCounts.of(ids, len(in_order(ids, "first").rows)).remaining for ids in spelt]
    if counts[1] < counts[0]:
        count = counts[0] - counts[1]
        yield (
            '1 id differs from another by spaces or capitals alone. Add "trim" or "casefold" to '
            "rows.id_rules."
            if count == 1
            else f'{count:,} ids differ from others by spaces or capitals alone. Add "trim" or '
            '"casefold" to rows.id_rules.'
        )
    yield from find_odd_ids(rows.ids, spelt[0])

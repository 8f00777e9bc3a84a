"""Notes what looks wrong in a table that can be read, for the person who has it: sentences may show single cells."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings, shown
from vfl_party.data import checks, written
from vfl_party.data.collect import Columns, Rows
from vfl_party.data.ids import IdCounts, in_order, normalised
from vfl_party.data.space import parts
from vfl_party.data.table import counted

FEW_ROWS = 20  # in so few, nothing smells
MOST_SHOWN = 24  # characters of a cell
_ROUNDED = r"^[0-9](?:[.,][0-9]+)?[eE]\+[0-9]+$"  # what Excel makes of long numbers


def smells(rows: Rows, settings: DataSettings) -> Iterator[str]:
    """Yields a sentence for each thing that looks wrong, in the order of the columns."""
    if settings.id:
        yield from _ids(rows, settings)
    if isinstance(rows.features, Columns):
        for k, name in enumerate(rows.features.categorical_names):
            if name not in settings.categorical:
                yield from _words(rows.features, k, name, settings)


def _words(columns: Columns, k: int, name: str, settings: DataSettings) -> Iterator[str]:
    cells, words = columns.categorical, columns.categorical.words[k]
    counts = counted(cells, k)[:-1]
    total, found = int(counts.sum()), pa.array(words, pa.string())
    numbers, dates = (
        each(found).to_numpy(zero_copy_only=False) for each in (written.look_like_numbers, written.look_like_dates)
    )
    for kind, like in (("numbers", numbers), ("dates", dates)):
        alike = int(counts[like].sum())
        if total and alike == total:
            yield f"column {name!r} holds categories, and all of its cells look like {kind}, written in several ways"
        elif alike > total / 2:
            strange = int(np.flatnonzero(~like)[0])  # words are in the order in which they come
            row = _first_row(cells.codes_NK[:, k], strange)
            where, word = checks.rows(shown(settings.source), row + 1), words[strange][:MOST_SHOWN]
            text = f"{alike:,} of {total:,} cells of {name!r} are {kind}; {word!r} in {where} is none"
            yield f"{text}, so that the column holds {len(words):,} categories"
        if alike > total / 2:
            return
    if total >= FEW_ROWS and len(words) > total / 2:
        yield f"column {name!r} has {len(words):,} categories in {total:,} rows; list it in data.drop if it is a name"


def _first_row(codes_N: npt.NDArray[np.int32], code: int) -> int:
    """Returns the first row that holds a code; one does."""
    for part in parts(len(codes_N)):
        found = np.flatnonzero(codes_N[part] == code)
        if len(found):
            return int(part.start + found[0])
    raise ValueError("no row holds the code")


def _ids(rows: Rows, settings: DataSettings) -> Iterator[str]:
    rules = settings.id_rules or ()
    alike = [normalised(rows.ids, each) for each in (rules, (*rules, "trim", "casefold"))]
    kept = [IdCounts.of(ids, len(in_order(ids, "first"))).kept for ids in alike]
    if kept[1] < kept[0]:
        yield f"{kept[0] - kept[1]:,} ids differ from others by spaces or case alone; rows.id_rules, data.id_rules"
    rounded = pc.sum(pc.match_substring_regex(alike[0], _ROUNDED)).as_py() or 0
    if rounded:
        yield f"{rounded:,} ids look like 1.2E+05: a spreadsheet has rounded them; write them again as text"

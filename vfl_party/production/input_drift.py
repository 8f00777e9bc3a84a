"""Measures input drift and score drift: how far new rows are from those of training and test.

It compares the party's own columns with the profile in its folder of the run, and scores with those
of the test rows. It needs no other party.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Preprocessor, load_table
from vfl_party.data.inputs.profile import (
    FILE,
    ColumnProfile,
    Counts,
    bins_of,
    by_chance,
    load,
    stability_index,
)
from vfl_party.data.table import count_words
from vfl_party.predict.prediction import TrainedRun, prediction_data
from vfl_party.predict.results import KEPT, STATE, remove_guards

# Limits by the convention of credit scoring (Siddiqi 2006).
MOVED, DRIFTED = 0.1, 0.25
# Probability that chance alone moves any column of a table.
_LEVEL = 0.01
_SCORE, _NUMBERS = "score_", ("value", "risk")
Verdict = Literal["stable", "moved", "drifted"]


@dataclass(frozen=True)
class Shift:
    """The shift of one column or score.

    ``index``: the population stability index; ``chance``: the index that chance alone exceeds in
    one of a hundred tables; ``before``, ``now``: the number of rows in each bin; ``bins``: their
    names.
    """

    name: str
    index: float
    chance: float
    before: tuple[int, ...]
    now: tuple[int, ...]
    bins: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """``drifted`` from an index of 0.25, ``moved`` from 0.1, unless chance explains it."""
        if self.index < max(MOVED, self.chance):
            return "stable"
        return "drifted" if self.index >= DRIFTED else "moved"


def input_drift(
    trained: TrainedRun, settings: DataSettings, source: str | None, query: str | None = None
) -> list[Shift]:
    """Returns the shift of each column of the party's new rows, the greatest first.

    Args:
        trained: the party's part of the run.
        settings: how to read the party's table.
        source: the new rows; None: those of ``settings``.
        query: the query of a database.

    Raises InputError.
    """
    profile, state = load(trained.path), trained.state["preprocessor"]
    preprocessor = Preprocessor.from_state(state)
    table = load_table(prediction_data(settings, source, trained.state, query), with_label=False)
    # Raises InputError unless the columns are those of training.
    preprocessor.unseen(table)
    places = {name: at for at, name in enumerate(table.numeric_names)}
    words = {name: at for at, name in enumerate(table.categorical_names)}
    for column in profile:
        if column.name not in (places if column.is_number else words):
            raise InputError(
                Code.FILE_INVALID,
                f"{trained.path / FILE}: has column {column.name!r}, which the run does not have. "
                "Restore the file.",
            )
    shifts = []
    for column in profile:
        if column.is_number:
            assert table.numeric_NF is not None  # noqa: S101 - it has the columns of training
            now = column.count_numbers(table.numeric_NF[:, places[column.name]])
        else:
            assert table.categorical is not None  # noqa: S101 - it has the columns of training
            k = words[column.name]
            counts = count_words(table.categorical, k).tolist()
            now = column.count_words(table.categorical.words[k], counts)
        shifts.append(_shift(column.name, column, now, len(profile)))
    return sorted(shifts, key=lambda shift: -shift.index)


def score_drift(trained: TrainedRun, scores: Path) -> list[Shift]:
    """Returns the shift of each score in a file of scores from the scores of the test rows.

    Only the active party has scores. Raises InputError.
    """
    path = trained.path / KEPT
    before, now = _scores(path, tested=True), _scores(scores, tested=False)
    if not before:
        raise InputError(
            Code.FILE_INVALID, f"{path}: has no column of scores. Use a run that has scores."
        )
    lacking = sorted(set(before) - set(now))
    if lacking:
        raise InputError(
            Code.FILE_INVALID,
            f"{scores}: has no column {lacking[0]!r}, which the run's own predictions have. Give a "
            "file that vfl-party predict wrote.",
        )
    shifts = []
    for name, values_N in before.items():
        column = bins_of(values_N)
        shifts.append(_shift(name, column, column.count_numbers(now[name]), len(before)))
    return sorted(shifts, key=lambda shift: -shift.index)


def read_scores(path: Path) -> pa.Table:
    """Reads a file of scores: Parquet, or CSV with any separator and decimal sign that
    ``--like-input`` writes. Ids and classes are text, without the prefix that ``--spreadsheet``
    adds. Raises InputError.
    """
    try:
        table = pyarrow.parquet.read_table(path) if path.suffix == ".parquet" else _read_csv(path)
    except FileNotFoundError:
        raise InputError(
            Code.FILE_INVALID, f"{path}: no such file. Give a file that vfl-party predict wrote."
        ) from None
    except (OSError, ValueError, csv.Error, pa.ArrowException) as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read ({str(error).splitlines()[0]}). Give a file that vfl-party "
            "predict wrote.",
        ) from None
    wrong = next(
        (name for name in table.column_names if _is_score(name) and _text(table, name)), ""
    )
    if wrong:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: column {wrong!r} has a score that is not a number. Give a file that "
            "vfl-party predict wrote.",
        )
    return table


def _read_csv(path: Path) -> pa.Table:
    with path.open("rb") as file:
        header = file.readline().decode("utf-8-sig").rstrip("\r\n")
    separator, names = _detect_separator(header)
    texts = {name: pa.string() for name in names if not _is_score(name)}
    # Only empty cells are missing: a class or an id may be called NA.
    options = pyarrow.csv.ConvertOptions(
        column_types=texts, strings_can_be_null=True, null_values=[""]
    )
    parse = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    table = pyarrow.csv.read_csv(path, parse_options=parse, convert_options=options)
    if any(_text(table, name) for name in names if name not in texts):
        options.decimal_point = ","
        table = pyarrow.csv.read_csv(path, parse_options=parse, convert_options=options)
    return remove_guards(table)


def _detect_separator(header: str) -> tuple[str, list[str]]:
    """Returns the separator and the column names of a file of scores.

    The name of a class may contain any of the separators.
    """
    columns = {
        separator: next(csv.reader([header], delimiter=separator), []) for separator in ",;\t|"
    }
    separator = max(
        columns, key=lambda candidate: (STATE in columns[candidate], len(columns[candidate]))
    )
    return separator, columns[separator]


def _is_score(name: str) -> bool:
    return name in _NUMBERS or name.startswith(_SCORE)


def _text(table: pa.Table, name: str) -> bool:
    kind = table.schema.field(name).type
    return not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind))


def _scores(path: Path, *, tested: bool) -> dict[str, npt.NDArray[np.float32]]:
    """Returns {name: scores} of a file, without empty cells; ``tested``: those of the test rows of
    the last phase, from a run's own predictions.
    """
    table = read_scores(path)
    if tested:
        test = table.filter(pa.compute.field("split") == "test")
        if not test.num_rows:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: has no scores of test rows. Compare with a run that has a test split.",
            )
        last = test.column("phase")[-1].as_py()
        table = test.filter(pa.compute.field("phase") == last)
    return {
        name: table.column(name).drop_null().to_numpy().astype(np.float32)
        for name in table.column_names
        if _is_score(name)
    }


def _shift(name: str, column: ColumnProfile, counts: Counts, columns: int) -> Shift:
    before, now = column.counts, tuple(counts.tolist())
    index = stability_index(before, now)
    return Shift(
        name, index, by_chance(before, now, level=_LEVEL / columns), before, now, _bins(column)
    )


def _bins(column: ColumnProfile) -> tuple[str, ...]:
    if not column.is_number:
        return (*column.words, "others", "missing")
    texts = [f"{edge:.6g}" for edge in column.edges]
    if not texts:
        return ("all", "missing")
    between = [f"{low} to {high}" for low, high in pairwise(texts)]
    return (f"below {texts[0]}", *between, f"from {texts[-1]}", "missing")

"""Measures input drift and score drift: how much new rows differ from those of training and test.

It compares the party's columns with the profile in its folder of the run, and new scores with the
scores of the test rows. It needs no other party.
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
from vfl_party.predict.results import KEPT, STATE, remove_guards
from vfl_party.predict.run import TrainedRun, prediction_data

# The usual limits of the population stability index in credit scoring (Siddiqi 2006).
MOVED, DRIFTED = 0.1, 0.25
# The probability that any column of a table exceeds the limit by chance alone.
_LEVEL = 0.01
_SCORE, _NUMBERS = "score_", ("value", "risk")
Verdict = Literal["stable", "moved", "drifted"]


@dataclass(frozen=True)
class Shift:
    """The shift of one column or score.

    Args:
        name: The name of the column.
        index: The population stability index.
        chance: The index that is exceeded by chance in one of a hundred tables.
        before: The number of rows of training or test in each bin.
        now: The number of new rows in each bin.
        bins: The names of the bins.
    """

    name: str
    index: float
    chance: float
    before: tuple[int, ...]
    now: tuple[int, ...]
    bins: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """``drifted`` from an index of 0.25, ``moved`` from 0.1, ``stable`` below or by chance."""
        if self.index < max(MOVED, self.chance):
            return "stable"
        return "drifted" if self.index >= DRIFTED else "moved"


def input_drift(
    trained: TrainedRun, settings: DataSettings, source: str | None, query: str | None = None
) -> list[Shift]:
    """Returns the shift of each column in the party's new rows, the greatest shift first.

    Args:
        trained: The party's part of the run.
        settings: The settings for reading the party's table.
        source: The source of the new rows. Default: the source in ``settings``.
        query: The query for a database.

    Raises InputError if the rows or the profile cannot be read, or if their columns differ.
    """
    profile, state = load(trained.path), trained.state["preprocessor"]
    preprocessor = Preprocessor.from_state(state)
    rows = trained.recipe.rows
    new = prediction_data(settings, source, trained.state, query)
    table = load_table(new.with_id_rules(rows), with_label=False)
    # This raises InputError if the columns differ from those of training.
    preprocessor.unseen(table)
    numeric_index = {name: index for index, name in enumerate(table.numeric_names)}
    categorical_index = {name: index for index, name in enumerate(table.categorical_names)}
    for column in profile:
        if column.name not in (numeric_index if column.is_number else categorical_index):
            raise InputError(
                Code.FILE_INVALID,
                f"{trained.path / FILE}: has a column {column.name!r}, which was not in the run. "
                "Restore the file.",
            )
    shifts = []
    for column in profile:
        if column.is_number:
            assert table.numeric_NF is not None  # noqa: S101 - it has the columns of training
            now = column.count_numbers(table.numeric_NF[:, numeric_index[column.name]])
        else:
            assert table.categorical is not None  # noqa: S101 - it has the columns of training
            k = categorical_index[column.name]
            counts = count_words(table.categorical, k).tolist()
            now = column.count_words(table.categorical.words[k], counts)
        shifts.append(_compute_shift(column.name, column, now, len(profile)))
    return sorted(shifts, key=lambda shift: -shift.index)


def score_drift(trained: TrainedRun, scores: Path) -> list[Shift]:
    """Returns the shift of each score column between the run's test rows and a file of scores.

    Only the active party has scores. Raises InputError if a file cannot be read or lacks a column.
    """
    path = trained.path / KEPT
    before, now = _read_score_columns(path, tested=True), _read_score_columns(scores, tested=False)
    if not before:
        raise InputError(
            Code.FILE_INVALID, f"{path}: has no column of scores. Use a run that has scores."
        )
    missing_columns = sorted(set(before) - set(now))
    if missing_columns:
        raise InputError(
            Code.FILE_INVALID,
            f"{scores}: has no column {missing_columns[0]!r}, which the run's own predictions "
            "have. Give a file that vfl-party predict wrote.",
        )
    shifts = []
    for name, values_N in before.items():
        column = bins_of(values_N)
        shifts.append(_compute_shift(name, column, column.count_numbers(now[name]), len(before)))
    return sorted(shifts, key=lambda shift: -shift.index)


def read_scores(path: Path) -> pa.Table:
    """Reads a file of scores in Parquet or CSV.

    The CSV may have any separator and decimal sign that ``--like-input`` writes. Ids and classes
    are texts without the prefix that ``--spreadsheet`` adds. Raises InputError if the file cannot
    be read.
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
    invalid_column = next(
        (name for name in table.column_names if _is_score(name) and _is_text(table, name)), ""
    )
    if invalid_column:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: column {invalid_column!r} has a score that is not a number. Give a file that "
            "vfl-party predict wrote.",
        )
    return table


def _read_csv(path: Path) -> pa.Table:
    with path.open("rb") as file:
        header = file.readline().decode("utf-8-sig").rstrip("\r\n")
    separator, names = _detect_separator(header)
    texts = {name: pa.string() for name in names if not _is_score(name)}
    # Only empty cells are missing values, because a class or an id may be called NA.
    options = pyarrow.csv.ConvertOptions(
        column_types=texts, strings_can_be_null=True, null_values=[""]
    )
    parse_options = pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True)
    table = pyarrow.csv.read_csv(path, parse_options=parse_options, convert_options=options)
    if any(_is_text(table, name) for name in names if name not in texts):
        options.decimal_point = ","
        table = pyarrow.csv.read_csv(path, parse_options=parse_options, convert_options=options)
    return remove_guards(table)


def _detect_separator(header: str) -> tuple[str, list[str]]:
    """Returns the separator and the column names of a file of scores.

    The name of a class may contain a separator, so this looks for the column ``state``.
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


def _is_text(table: pa.Table, name: str) -> bool:
    kind = table.schema.field(name).type
    return not (pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind))


def _read_score_columns(path: Path, *, tested: bool) -> dict[str, npt.NDArray[np.float32]]:
    """Returns {name: scores} of a file, without empty cells.

    ``tested``: Whether to return only the test rows of the last phase in a run's predictions.
    """
    table = read_scores(path)
    if tested:
        test_rows = table.filter(pa.compute.field("split") == "test")
        if not test_rows.num_rows:
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: has no scores of test rows. Compare with a run that has a test split.",
            )
        last_phase = test_rows.column("phase")[-1].as_py()
        table = test_rows.filter(pa.compute.field("phase") == last_phase)
    return {
        name: table.column(name).drop_null().to_numpy().astype(np.float32)
        for name in table.column_names
        if _is_score(name)
    }


def _compute_shift(name: str, column: ColumnProfile, counts: Counts, columns: int) -> Shift:
    before, now = column.counts, tuple(counts.tolist())
    index = stability_index(before, now)
    return Shift(
        name, index, by_chance(before, now, level=_LEVEL / columns), before, now, _name_bins(column)
    )


def _name_bins(column: ColumnProfile) -> tuple[str, ...]:
    if not column.is_number:
        return (*column.words, "others", "missing")
    texts = [f"{edge:.6g}" for edge in column.edges]
    if not texts:
        return ("all", "missing")
    between = [f"{low} to {high}" for low, high in pairwise(texts)]
    return (f"below {texts[0]}", *between, f"from {texts[-1]}", "missing")

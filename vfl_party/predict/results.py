"""Writes the scores of predictions and evaluations as tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.sources import is_path
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file
from vfl_common.text import hide_passwords
from vfl_party.base.phase import Predictions
from vfl_party.base.seeds import Rows
from vfl_party.data import Labels, Table
from vfl_party.data.id_rules import SEPARATOR
from vfl_party.data.ids import Ids
from vfl_party.data.rows import Prepared
from vfl_party.data.sources.images import FILE
from vfl_party.data.table import LEFT_OUT, InputRows
from vfl_party.models.losses import scores
from vfl_party.models.metrics import decide
from vfl_party.models.row_blocks import in_blocks

KEPT = "predictions.parquet"
FORMATS = (".csv", ".parquet")
# The number of rows that are written at once.
_AT_ONCE = 1 << 14
# The prefix of a column with the score of a class.
_SCORE = "score_"
# The prefix of a column with the normalised id that the parties used in the entity alignment.
MATCHED = "matched_"
# The column with the name of the key that matched a row.
KEY = f"{MATCHED}by"
# The column with the similarity of the link of a row.
SIMILARITY = f"{MATCHED}similarity"
# The column that names the parties that took part in a score.
PARTIES = "parties"
# The prefix of a column with the metric's measured value for the participating parties.
EXPECTED = "expected_"
STATE, SCORED, ELSEWHERE = "state", "scored", "not at every party"
# The state of rows that no party has, if the parties have different rows.
NOBODY = "at no party"
# The states of rows without a joint score because a party was unreachable. ALONE rows have the
# score of the active party's own model, and WAITING rows have no score.
ALONE, WAITING = "alone", "waiting"
# The state of a passive party's rows whose latents it sent to the active party.
SENT = "sent"
# The columns of results. Results of older versions have ``score``.
_RESERVED_COLUMNS = (
    "phase",
    "split",
    "truth",
    "score",
    "class",
    "value",
    "risk",
    "event",
    "by",
    "similarity",
    STATE,
    PARTIES,
)
# Matches text that a spreadsheet treats as a formula.
_FORMULA = r"^[=+\-@\t\r]"
# Matches numbers, which are not formulas even if they begin with a sign.
_NUMBER = r"^[+-]?[0-9]+([.,][0-9]+)?$"


@dataclass(frozen=True)
class Predicted:
    """The number of predicted rows in a party's table, and the reasons for leaving out rows.

    Args:
        written: The number of predicted rows.
        rows: The number of rows in the table.
        missing: The number of rows without an id.
        repeated: The number of rows that are left out because another row has the same id.
        state: ``ALONE`` or ``WAITING`` if a party was unreachable. ``SENT`` at a passive party if
            the parties have different rows. Otherwise ''.
        why: The error that says which party was unreachable.
        others: The reason why other rows with an id have no score. '' means that they are not at
            every party.
        by: A description of the parties that have the rows, or ''.
    """

    written: int
    rows: int
    missing: int = 0
    repeated: int = 0
    state: str = ""
    why: str = ""
    others: str = ""
    by: str = ""

    @classmethod
    def of(cls, table: Table, written: int, *, state: str = "", why: str = "") -> Predicted:
        """Counts the rows of a table in which ``written`` rows are predicted."""
        counts = table.counts
        return (
            cls(written, len(table), state=state, why=why)
            if counts is None
            else cls(written, counts.rows, counts.missing, counts.repeated, state, why)
        )

    @property
    def elsewhere(self) -> int:
        """The number of rows with an id that are not predicted."""
        return self.rows - self.missing - self.repeated - self.written

    def __str__(self) -> str:
        reasons = {
            "without an id": self.missing,
            "with a repeated id": self.repeated,
            self.others or ELSEWHERE: 0 if self.state else self.elsewhere,
        }
        why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        left_out = f"; left out: {why}" if why else ""
        by = f"; {self.by}" if self.by else ""
        if self.state == SENT:
            return f"the latents of {self.written:,} of {self.rows:,} rows were sent{left_out}"
        if not self.state:
            return f"{self.written:,} of {self.rows:,} rows are predicted{left_out}{by}"
        done = "have the score of your own model" if self.state == ALONE else "have no score"
        return (
            f"{self.elsewhere:,} of {self.rows:,} rows {done}, and none has a joint one{left_out}: "
            f"{self.why}"
        )


def id_names(settings: DataSettings) -> tuple[str, ...]:
    """Returns the names of a result's id columns.

    They are the columns of ``data.id``, or ``id``, or ``file`` for images. If a name equals that of
    another column of the result, all id columns get the prefix ``id_``.
    """
    # Joined tables use the id columns of the first table.
    settings = next(iter(settings.parts.values()), settings)
    folder = is_path(settings.source) and Path(settings.source).is_dir()
    names = settings.id or (FILE if folder else "id",)
    is_ambiguous = any(
        name in _RESERVED_COLUMNS or name.startswith((_SCORE, MATCHED, EXPECTED)) for name in names
    )
    return tuple(f"id_{name}" for name in names) if is_ambiguous else names


def id_values(names: Sequence[str], ids: Sequence[str]) -> dict[str, pa.Array]:
    """Returns {name: column} of normalised ids. An id of several columns is split into these."""
    values = Ids.of(ids).values
    if len(names) == 1:
        return {names[0]: values}
    parts = pa.compute.split_pattern(values, SEPARATOR, max_splits=len(names) - 1)
    return {name: pa.compute.list_element(parts, at) for at, name in enumerate(names)}


def _match_ids(names: Sequence[str], ids: Sequence[str]) -> dict[str, pa.Array]:
    return {f"{MATCHED}{name}": values for name, values in id_values(names, ids).items()}


def row_columns(names: Sequence[str], table: Table, rows: Rows) -> dict[str, pa.Array]:
    """Returns {name: column} of the ids of some rows of a table.

    The first columns have the ids as the source has them, and the next ones have the normalised ids
    of the entity alignment. ``names``: The names of the id columns.
    """
    matched = Ids.of(table.ids).take(rows)
    if table.own is None or table.places_N is None:
        return {**id_values(names, matched), **_match_ids(names, matched)}
    places = pa.array(table.places_N[rows])
    source_ids = {
        name: values.take(places) for name, values in zip(names, table.own.ids, strict=True)
    }
    return {**source_ids, **_match_ids(names, matched)}


def list_all_rows(
    names: Sequence[str],
    table: Table,
    columns: Mapping[str, Any],
    state: str = SCORED,
    others: str = ELSEWHERE,
) -> pa.Table:
    """Returns a result with all rows of the source, in the source's order.

    Rows that were not scored have null scores.

    Args:
        names: The names of the id columns.
        table: The N scored rows.
        columns: {name: column} of scores and classes, [N] each.
        state: The state of the scored rows.
        others: The state of rows that have an id and no score.
    """
    input_rows, places_N = table.own, table.places_N
    # A table that was made in memory has no source.
    if input_rows is None or places_N is None:
        input_rows = InputRows(
            tuple(id_values(names, table.ids).values()), np.zeros(len(table), np.uint8)
        )
        places_N = np.arange(len(table), dtype=np.int64)
    row_S = np.full(len(input_rows), -1, np.int64)
    row_S[places_N] = np.arange(len(table))
    rows = pa.array(row_S, mask=row_S < 0)
    state_S = np.where(
        row_S >= 0,
        len(LEFT_OUT),
        np.where(input_rows.left_out == 0, len(LEFT_OUT) + 1, input_rows.left_out),
    )
    states = pa.array([*LEFT_OUT, state, others]).take(pa.array(state_S))
    result = {
        name: pa.array(values).take(rows)
        for name, values in (_match_ids(names, table.ids) | dict(columns)).items()
    }
    matched_ids = {name: result.pop(name) for name in [*result][: len(names)]}
    return pa.table(
        {**dict(zip(names, input_rows.ids, strict=True)), **matched_ids, STATE: states, **result}
    )


def label_name(settings: DataSettings) -> str:
    """Returns the name of the label's column for use in a sentence."""
    settings = next(iter(settings.parts.values()), settings)
    return settings.label or ("target" if settings.is_named else "the label")


def meaning(labels: Labels, label: str) -> str:
    """Describes the scores of a result in one line. ``label``: The name of the label's column."""
    if labels.kind == "regression":
        return f"value: the predicted {label}, in the unit of the data"
    if labels.kind == "survival":
        return f"risk: the logarithm of the hazard; a greater risk means a shorter {label}"
    if labels.kind == "ranking":
        return f"score: a greater score means a greater {label} among the rows of a query"
    if labels.kind == "binary":
        positive = labels.classes[1]
        return f"{_SCORE}{positive}: the probability that {label} is {positive}"
    if labels.kind == "multilabel":
        return f"{_SCORE}…: for each label, the probability that it is true"
    return f"{_SCORE}…: for each class, the probability that {label} is this class"


def result_columns(
    recipe: Recipe, labels: Labels, outputs_NO: Tensor, threshold: float | None = None
) -> dict[str, Any]:
    """Returns the columns of a result that have the scores, by the kind of task.

    Regression: ``value``, in the label's unit. Binary: ``score_<class>`` of the positive class, and
    ``class``, which is positive above the ``threshold`` (None means 0.5). Multi-class:
    ``score_<class>`` of each class, and ``class``. Survival: ``risk``. Ranking: ``score``.
    Multi-label: ``score_<label>`` of each label.
    """
    # Vectorised and scalar code round the last bit of a float32 sigmoid differently, so this
    # computes in float64.
    link = partial(scores, recipe.task)
    known_NO = labels.select_known(outputs_NO)
    scores_ = in_blocks(link, None, known_NO.double()).to(outputs_NO.dtype).cpu()
    if recipe.task.kind == "survival":
        return {"risk": scores_.reshape(-1).numpy()}
    if recipe.task.kind == "ranking":
        return {"score": scores_.reshape(-1).numpy()}
    if recipe.task.kind == "regression":
        return {"value": labels.unscale(scores_.double()).reshape(-1).numpy()}
    if recipe.task.kind == "binary":
        # The accuracy uses the same decision.
        classes = labels.decode(decide(outputs_NO, threshold).to(torch.int64))
        return {f"{_SCORE}{labels.classes[1]}": scores_.reshape(-1).numpy(), "class": list(classes)}
    if recipe.task.kind == "multilabel":
        return {
            f"{_SCORE}{name}": scores_[:, column].numpy()
            for column, name in enumerate(labels.classes)
        }
    scores_by_class = {
        f"{_SCORE}{name}": scores_[:, column].numpy() for column, name in enumerate(labels.classes)
    }
    return {**scores_by_class, "class": list(labels.decode(scores_.argmax(dim=1)))}


def check_output(path: Path, *, replace: bool = False) -> None:
    """Raises InputError if a result cannot be written to ``path``.

    The name must end in .csv or .parquet, and the folder must exist. An existing file is an error
    unless ``replace`` is set.
    """
    if path.suffix not in FORMATS:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: the result's name must end in {' or '.join(FORMATS)}. Give another --out.",
        )
    if path.exists() and not (replace and path.is_file()):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a file, so it cannot be replaced. Give another --out."
            if replace
            else f"{path}: exists already. Move it away, give another --out, or add --replace.",
        )
    if not path.absolute().parent.is_dir():
        raise InputError(Code.FILE_INVALID, f"{path.absolute().parent}: no such folder. Create it.")


@dataclass(frozen=True)
class Output:
    """The file and the format of a prediction's result.

    Args:
        path: The file.
        like_input: Whether to write CSV with the separator and decimal sign of the active party's
            file.
        spreadsheet: Whether to put ``'`` before text that a spreadsheet treats as a formula.
        replace: Whether to replace an existing result once the new one is complete.
    """

    path: Path
    like_input: bool = False
    spreadsheet: bool = False
    replace: bool = False

    def check(self, settings: DataSettings | None = None) -> None:
        """Raises InputError if the result cannot be written in this format.

        ``settings``: The settings of the rows to predict, if they are known.
        """
        check_output(self.path, replace=self.replace)
        flags = [
            f
            for f, is_set in (
                ("--like-input", self.like_input),
                ("--spreadsheet", self.spreadsheet),
            )
            if is_set
        ]
        if flags and self.path.suffix != ".csv":
            raise InputError(
                Code.CONFIG_INVALID,
                f"{flags[0]}: works only with a .csv result (got --out {self.path}). Remove the "
                "flag.",
            )
        first = None if settings is None else next(iter(settings.parts.values()), settings)
        if self.like_input and first is not None and first.kind != "text":
            raise InputError(
                Code.CONFIG_INVALID,
                f"--like-input: {hide_passwords(first.source)} is not a text file, so it has no "
                "separator. Remove the flag.",
            )

    def write(self, table: pa.Table, input_rows: InputRows | None) -> None:
        """Writes the result. Raises InputError if this is not possible.

        ``input_rows``: The rows of the active party's source, which have its separator and decimal
        sign.
        """
        table = _guard_formulas(table) if self.spreadsheet else table
        if not self.like_input or input_rows is None or input_rows.separator is None:
            write_table(self.path, table)
            return
        with private_file(self.path) as file:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            _write_like(text, table, input_rows.separator, input_rows.decimal or ".")
            # detach() flushes the text and leaves the file open.
            text.detach()

    def advice(self, table: pa.Table) -> str:
        """Returns a warning if a spreadsheet would treat text in this result as formulas, or ''."""
        if self.path.suffix != ".csv" or self.spreadsheet:
            return ""
        count = sum(map(count_formula_cells, table.columns))
        return (
            f"{self.path}: {count:,} text cells begin with =, +, -, @ or a tab, which a "
            "spreadsheet treats as formulas; add --spreadsheet to put ' before them, or write "
            ".parquet"
            if count
            else ""
        )


def count_formula_cells(values: Any) -> int:
    """Returns the number of text cells in a column that a spreadsheet would treat as formulas.

    ``values``: An Arrow array, or any sequence.
    """
    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return (pa.compute.sum(_is_formula(column)).as_py() or 0) if _is_text(column) else 0


def _is_formula(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    looks_like_formula, is_number = (
        pa.compute.match_substring_regex(column, pattern) for pattern in (_FORMULA, _NUMBER)
    )
    return pa.compute.and_not(looks_like_formula, is_number)


def _is_text(column: pa.ChunkedArray | pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _guard_formulas(table: pa.Table) -> pa.Table:
    """Puts ``'`` before each text that a spreadsheet would treat as a formula."""
    for index, name in enumerate(table.column_names):
        column = table.column(index)
        if _is_text(column):
            guarded = pa.compute.replace_substring_regex(column, "^", "'")
            table = table.set_column(
                index, name, pa.compute.if_else(_is_formula(column), guarded, column)
            )
    return table


def remove_guards(table: pa.Table) -> pa.Table:
    """Removes the ``'`` that ``--spreadsheet`` put before texts."""
    for index, name in enumerate(table.column_names):
        column = table.column(index)
        if _is_text(column):
            original = pa.compute.replace_substring_regex(column, "^'", "")
            was_guarded = pa.compute.and_(
                pa.compute.starts_with(column, "'"), _is_formula(original)
            )
            table = table.set_column(index, name, pa.compute.if_else(was_guarded, original, column))
    return table


def _write_like(file: TextIO, table: pa.Table, separator: str, decimal: str) -> None:
    """Writes CSV with the separator and decimal sign of the input. Numbers have no quotes."""
    writer = csv.writer(file, delimiter=separator, lineterminator="\n")
    writer.writerow(table.column_names)
    for batch in table.to_batches(_AT_ONCE):
        columns = []
        for column in batch.columns:
            texts = pa.compute.cast(column, pa.large_string())
            if pa.types.is_floating(column.type):
                texts = pa.compute.replace_substring(texts, ".", decimal)
            columns.append(texts.to_pylist())
        writer.writerows(zip(*columns, strict=True))


def write_table(path: Path, table: pa.Table) -> None:
    """Writes a table as CSV or Parquet, depending on the ending of the file's name.

    Only the owner may read the file. If writing fails, no incomplete file remains.
    """
    with private_file(path) as file:
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, file)
        else:
            pyarrow.csv.write_csv(table, file)


def make_prediction_table(
    recipe: Recipe,
    ids: Sequence[str],
    prepared: Prepared,
    phase: str,
    predictions: Predictions,
    threshold: float | None = None,
) -> pa.Table:
    """Returns a table of predictions with phase, split, ids, true label and scores.

    Scores are float64, so that they rank the rows in the same order as the logits. A multi-label
    task has a column ``truth_<label>`` for each label.

    Args:
        recipe: The recipe of the run.
        ids: The names of the id columns.
        prepared: The prepared rows and labels of the active party.
        phase: The name of the phase.
        predictions: {split: (rows, outputs)}.
        threshold: The decision threshold of a binary task.
    """
    labels, targets, raw_N = prepared.labels, prepared.targets, prepared.table.labels
    assert labels is not None and targets is not None and raw_N is not None  # noqa: S101, PT018 - of the active party
    parts = []
    for split, (rows, outputs_NO) in predictions.items():
        columns = {
            "phase": [phase] * len(rows),
            "split": [split] * len(rows),
            **row_columns(ids, prepared.table, rows),
            **_make_truth_columns(recipe, labels, targets[rows], raw_N[rows]),
            **_make_group_column(recipe, prepared.table, rows),
            **make_key_column(recipe, prepared.table, rows),
            **result_columns(recipe, labels, outputs_NO.cpu().double(), threshold),
        }
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def _make_truth_columns(
    recipe: Recipe, labels: Labels, targets: Tensor, raw_N: npt.NDArray[Any]
) -> dict[str, Any]:
    if recipe.task.kind == "multilabel":
        return {
            f"truth_{name}": targets[:, column].numpy()
            for column, name in enumerate(labels.classes)
        }
    if recipe.task.kind == "survival":
        return {"truth": raw_N, "event": targets[:, 1].numpy()}
    is_numeric = recipe.task.kind in ("regression", "ranking")
    return {"truth": raw_N if is_numeric else labels.decode(targets)}


def _make_group_column(recipe: Recipe, table: Table, rows: Rows) -> dict[str, Any]:
    """Returns a column with the query of each row, if the task is a ranking."""
    if recipe.task.kind != "ranking" or table.groups is None:
        return {}
    return {"group": table.groups[rows]}


def keep(folder: Path, phase: str, table: pa.Table) -> None:
    """Writes the predictions of a phase to the file in ``folder`` that has those of all phases.

    They replace earlier predictions of the same phase, so a repeated round changes nothing. Raises
    InputError if the file cannot be read or written.
    """
    path = folder / KEPT
    if path.exists():
        try:
            old_table = pyarrow.parquet.read_table(path)
            other_phases = old_table.filter(pa.compute.field("phase") != phase)
            table = (
                pa.concat_tables([other_phases, table], promote_options="default")
                if len(other_phases)
                else table
            )
        except (OSError, pa.ArrowException):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot read the predictions of earlier phases. Remove the file to "
                "continue without them.",
            ) from None
    write_table(path, table)


def make_key_column(recipe: Recipe, table: Table, rows: Rows) -> dict[str, Any]:
    """Returns a column with the name of the key that matched each row, if the recipe has keys, or
    with the similarity of its link.
    """
    if table.pairs_N2 is not None:
        return {SIMILARITY: table.pairs_N2[rows, 0]}
    if table.key_N is None:
        return {}
    return {KEY: np.array(recipe.rows.key_names, object)[table.key_N[rows]]}

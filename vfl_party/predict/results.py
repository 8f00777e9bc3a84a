"""Scores as tables: what a prediction writes, and what an evaluation keeps."""

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

from vfl_common.config.data import DataSettings, is_path
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file
from vfl_common.passwords import hide_passwords
from vfl_party.base.phase import Predictions
from vfl_party.base.seeds import Rows
from vfl_party.data import Labels, Table
from vfl_party.data.ids import SEPARATOR, Ids
from vfl_party.data.rows import Prepared
from vfl_party.data.sources.images import FILE
from vfl_party.data.table import LEFT_OUT, InputRows
from vfl_party.models.metrics import decide, scores
from vfl_party.models.row_blocks import in_blocks

KEPT = "predictions.parquet"
FORMATS = (".csv", ".parquet")
# Rows that are written at once.
_AT_ONCE = 1 << 14
# Prefix of a class's name.
_SCORE = "score_"
# Prefix of an id column's name: the id by which the parties have matched the row.
MATCHED = "matched_"
# The column that names the parties that took part in a score.
PARTIES = "parties"
# Prefix of a metric's name: what was measured of the model with these parties.
EXPECTED = "expected_"
STATE, SCORED, ELSEWHERE = "state", "scored", "not at every party"
# State of rows that no party holds, if parties hold different rows.
NOBODY = "at no party"
# States of rows without a joint score because a party was away: with this party's score, or with
# none.
ALONE, WAITING = "alone", "waiting"
# State of a passive party's rows: it has sent what the active party scores, if that asks for them.
SENT = "sent"
# Columns of results; older ones have ``score``.
_OURS = ("phase", "split", "truth", "score", "class", "value", "risk", "event", STATE, PARTIES)
# Text that a spreadsheet takes for a formula.
_COMPUTED = r"^[=+\-@\t\r]"
# Such text that is a plain number.
_NUMBER = r"^[+-]?[0-9]+([.,][0-9]+)?$"


@dataclass(frozen=True)
class Predicted:
    """How many rows of a party's table are predicted, and why the others are left out.

    ``rows``: in the table; ``missing``: without an id; ``repeated``: left out because another row
    has their id. All others that are not ``written`` are not at every party. ``state``: that of
    the rows that are written without the other parties, ``ALONE`` or ``WAITING``; ``SENT`` of a
    passive party's rows if the parties hold different ones; '' if all were there. ``why``: who was
    away. ``others``: why the other rows with an id have no score; '' if not every party has them.
    ``by``: who holds the rows, in words; '' if that goes without saying.
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
        """Counts the rows of a table, of which ``written`` are predicted."""
        counts = table.counts
        return (
            cls(written, len(table), state=state, why=why)
            if counts is None
            else cls(written, counts.rows, counts.missing, counts.repeated, state, why)
        )

    @property
    def elsewhere(self) -> int:
        """The number of rows that have an id, which not every party holds."""
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
    """Returns the names of a result's id columns: those of ``data.id``; without it ``id``, or
    ``file`` for images.

    If one of them has the name of another column of a result, ``id_`` is put before each.
    """
    # Joined tables have the ids of the first.
    settings = next(iter(settings.parts.values()), settings)
    folder = is_path(settings.source) and Path(settings.source).is_dir()
    names = settings.id or (FILE if folder else "id",)
    taken = any(name in _OURS or name.startswith((_SCORE, MATCHED, EXPECTED)) for name in names)
    return tuple(f"id_{name}" for name in names) if taken else names


def id_values(names: Sequence[str], ids: Sequence[str]) -> dict[str, pa.Array]:
    """Returns ids as columns: an id of several columns is divided again. They stay as the rules
    spell them.
    """
    values = Ids.of(ids).values
    if len(names) == 1:
        return {names[0]: values}
    parts = pa.compute.split_pattern(values, SEPARATOR, max_splits=len(names) - 1)
    return {name: pa.compute.list_element(parts, at) for at, name in enumerate(names)}


def _match_ids(names: Sequence[str], ids: Sequence[str]) -> dict[str, pa.Array]:
    return {f"{MATCHED}{name}": values for name, values in id_values(names, ids).items()}


def row_columns(names: Sequence[str], table: Table, rows: Rows) -> dict[str, pa.Array]:
    """Returns the ids of some rows of a table: as its source has them, then as the parties have
    matched them.

    ``names``: of the id columns.
    """
    matched = Ids.of(table.ids).take(rows)
    if table.own is None or table.places_N is None:
        return {**id_values(names, matched), **_match_ids(names, matched)}
    places = pa.array(table.places_N[rows])
    own = {name: values.take(places) for name, values in zip(names, table.own.ids, strict=True)}
    return {**own, **_match_ids(names, matched)}


def list_all_rows(
    names: Sequence[str],
    table: Table,
    columns: Mapping[str, Any],
    state: str = SCORED,
    others: str = ELSEWHERE,
) -> pa.Table:
    """Returns a result with a row for each row of the source, in its order; scores are null where
    there are none.

    Args:
        names: of the id columns.
        table: the rows that are scored, [N].
        columns: their scores and classes, [N] each.
        state: of these rows; ``others``: of those that have an id and no score.
    """
    own, places_N = table.own, table.places_N
    # The table was made in memory, and not read from a source.
    if own is None or places_N is None:
        own = InputRows(tuple(id_values(names, table.ids).values()), np.zeros(len(table), np.uint8))
        places_N = np.arange(len(table), dtype=np.int64)
    row_S = np.full(len(own), -1, np.int64)
    row_S[places_N] = np.arange(len(table))
    rows = pa.array(row_S, mask=row_S < 0)
    state_S = np.where(
        row_S >= 0, len(LEFT_OUT), np.where(own.left_out == 0, len(LEFT_OUT) + 1, own.left_out)
    )
    states = pa.array([*LEFT_OUT, state, others]).take(pa.array(state_S))
    result = {
        name: pa.array(values).take(rows)
        for name, values in (_match_ids(names, table.ids) | dict(columns)).items()
    }
    matched = {name: result.pop(name) for name in [*result][: len(names)]}
    return pa.table({**dict(zip(names, own.ids, strict=True)), **matched, STATE: states, **result})


def label_name(settings: DataSettings) -> str:
    """Returns the name of the label's column, for a sentence about it."""
    settings = next(iter(settings.parts.values()), settings)
    return settings.label or ("target" if settings.is_named else "the label")


def meaning(labels: Labels, label: str) -> str:
    """Returns one line about the numbers of a result. ``label``: the name of the label's column."""
    if labels.kind == "regression":
        return f"value: the predicted {label}, in its own unit"
    if labels.kind == "survival":
        return f"risk: the logarithm of the hazard; the greater it is, the shorter is {label}"
    if labels.kind == "ranking":
        return f"score: the greater it is, the greater is {label} among the rows of a query"
    if labels.kind == "binary":
        positive = labels.classes[1]
        return f"{_SCORE}{positive}: the probability that {label} is {positive}"
    if labels.kind == "multilabel":
        return f"{_SCORE}…: for each label, the probability that it is true"
    return f"{_SCORE}…: for each class, the probability that {label} is this class"


def result_columns(
    recipe: Recipe, labels: Labels, outputs_NO: Tensor, threshold: float | None = None
) -> dict[str, Any]:
    """Returns the columns of the result.

    Regression: ``value``, in the label's own unit. Binary: ``score_<class>`` of the positive class,
    and ``class``, which is positive above the ``threshold`` (None: 0.5). Multi-class:
    ``score_<class>`` of each class, and ``class``. Survival: ``risk``. Ranking: ``score``. Several
    labels: ``score_<label>`` of each.
    """
    # Float32 sigmoids would round the last bit differently in vectorised and scalar code.
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
        # As the accuracy counts.
        chosen = labels.decode(decide(outputs_NO, threshold).to(torch.int64))
        return {f"{_SCORE}{labels.classes[1]}": scores_.reshape(-1).numpy(), "class": list(chosen)}
    if recipe.task.kind == "multilabel":
        return {f"{_SCORE}{name}": scores_[:, at].numpy() for at, name in enumerate(labels.classes)}
    named = {
        f"{_SCORE}{name}": scores_[:, column].numpy() for column, name in enumerate(labels.classes)
    }
    return {**named, "class": list(labels.decode(scores_.argmax(dim=1)))}


def check_output(path: Path, *, replace: bool = False) -> None:
    """Raises InputError if ``path`` cannot become a result: a wrong ending, no folder, or a file
    that exists and is not to be replaced.
    """
    if path.suffix not in FORMATS:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: the result's name must end in {' or '.join(FORMATS)}. Give another --out.",
        )
    if path.exists() and not (replace and path.is_file()):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a file. Give another --out."
            if replace
            else f"{path}: exists already. Move it away, give another --out, or add --replace.",
        )
    if not path.absolute().parent.is_dir():
        raise InputError(Code.FILE_INVALID, f"{path.absolute().parent}: no such folder. Create it.")


@dataclass(frozen=True)
class Output:
    """Where and how a prediction is written.

    ``like_input``: CSV with the separator and the decimal sign of the active party's own file;
    ``spreadsheet``: with ``'`` before text that a spreadsheet would compute; ``replace``: an older
    result of this name is replaced, once the new one is whole.
    """

    path: Path
    like_input: bool = False
    spreadsheet: bool = False
    replace: bool = False

    def check(self, settings: DataSettings | None = None) -> None:
        """Raises InputError if this cannot become a result of the rows of ``settings``, as far as
        these are known.
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
                f"{flags[0]}: is for a .csv result (got --out {self.path}). Remove it.",
            )
        first = None if settings is None else next(iter(settings.parts.values()), settings)
        if self.like_input and first is not None and first.kind != "text":
            raise InputError(
                Code.CONFIG_INVALID,
                f"--like-input: {hide_passwords(first.source)} is not a text file, so it has no "
                "separator. Remove the flag.",
            )

    def write(self, table: pa.Table, own: InputRows | None) -> None:
        """Writes the result. ``own``: the rows of the active party's source. Raises InputError."""
        table = _guard(table) if self.spreadsheet else table
        if not self.like_input or own is None or own.separator is None:
            write_table(self.path, table)
            return
        with private_file(self.path) as file:
            text = io.TextIOWrapper(file, "utf-8", newline="")
            _write_like(text, table, own.separator, own.decimal or ".")
            # Detaching writes what is left, and leaves the file open.
            text.detach()

    def advice(self, table: pa.Table) -> str:
        """Returns a warning if a spreadsheet computes cells of this result; '' if it does not."""
        if self.path.suffix != ".csv" or self.spreadsheet:
            return ""
        count = sum(map(count_formula_cells, table.columns))
        return (
            f"{self.path}: {count:,} cells of text begin with =, +, -, @ or a tab, and a "
            "spreadsheet computes them; give --spreadsheet, which puts ' before them, or write "
            ".parquet"
            if count
            else ""
        )


def count_formula_cells(values: Any) -> int:
    """Returns how many cells of a column a spreadsheet would compute; none of numbers. ``values``:
    Arrow's, or any.
    """
    column = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
    return (pa.compute.sum(_is_computed(column)).as_py() or 0) if _is_text(column) else 0


def _is_computed(column: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
    odd, number = (
        pa.compute.match_substring_regex(column, pattern) for pattern in (_COMPUTED, _NUMBER)
    )
    return pa.compute.and_not(odd, number)


def _is_text(column: pa.ChunkedArray | pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _guard(table: pa.Table) -> pa.Table:
    """Puts ``'`` before each text that a spreadsheet would compute."""
    for at, name in enumerate(table.column_names):
        column = table.column(at)
        if _is_text(column):
            guarded = pa.compute.replace_substring_regex(column, "^", "'")
            table = table.set_column(
                at, name, pa.compute.if_else(_is_computed(column), guarded, column)
            )
    return table


def remove_guards(table: pa.Table) -> pa.Table:
    """Returns texts as they were before ``--spreadsheet``."""
    for at, name in enumerate(table.column_names):
        column = table.column(at)
        if _is_text(column):
            rest = pa.compute.replace_substring_regex(column, "^'", "")
            was_guarded = pa.compute.and_(pa.compute.starts_with(column, "'"), _is_computed(rest))
            table = table.set_column(at, name, pa.compute.if_else(was_guarded, rest, column))
    return table


def _write_like(file: TextIO, table: pa.Table, separator: str, decimal: str) -> None:
    """Writes CSV with the separator and decimal sign of another file. Numbers have no quotes."""
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
    """Writes CSV or Parquet, by the name's ending: the whole file or nothing. Only the owner may
    read the scores.
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
    """Returns a row for each prediction: phase, split, ids, the label as in the data, and the
    columns of a result.

    ``ids``: the names of the id columns. Scores are float64, so that they rank the rows as the
    logits do, from which the metrics were computed. Of several labels, each has a column
    ``truth_<label>``.
    """
    labels, targets, raw_N = prepared.labels, prepared.targets, prepared.table.labels
    assert labels is not None and targets is not None and raw_N is not None  # noqa: S101, PT018 - of the active party
    parts = []
    for split, (rows, outputs_NO) in predictions.items():
        columns = {
            "phase": [phase] * len(rows),
            "split": [split] * len(rows),
            **row_columns(ids, prepared.table, rows),
            **_truth(recipe, labels, targets[rows], raw_N[rows]),
            **_group(recipe, prepared.table, rows),
            **result_columns(recipe, labels, outputs_NO.cpu().double(), threshold),
        }
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def _truth(
    recipe: Recipe, labels: Labels, targets: Tensor, raw_N: npt.NDArray[Any]
) -> dict[str, Any]:
    if recipe.task.kind == "multilabel":
        return {f"truth_{name}": targets[:, at].numpy() for at, name in enumerate(labels.classes)}
    if recipe.task.kind == "survival":
        return {"truth": raw_N, "event": targets[:, 1].numpy()}
    numbers = recipe.task.kind in ("regression", "ranking")
    return {"truth": raw_N if numbers else labels.decode(targets)}


def _group(recipe: Recipe, table: Table, rows: Rows) -> dict[str, Any]:
    """Returns the query of each row of a ranking, by which alone its scores mean something."""
    if recipe.task.kind != "ranking" or table.groups is None:
        return {}
    return {"group": table.groups[rows]}


def keep(folder: Path, phase: str, table: pa.Table) -> None:
    """Writes the predictions of a phase into ``folder``, with those of other phases, instead of its
    earlier ones.

    So a round that is repeated changes nothing. Raises InputError if the file cannot be read or
    written.
    """
    path = folder / KEPT
    if path.exists():
        try:
            before = pyarrow.parquet.read_table(path)
            others = before.filter(pa.compute.field("phase") != phase)
            table = (
                pa.concat_tables([others, table], promote_options="default")
                if len(others)
                else table
            )
        except (OSError, pa.ArrowException):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: cannot be read as the predictions of an earlier phase. Remove it to go "
                "on without them.",
            ) from None
    write_table(path, table)

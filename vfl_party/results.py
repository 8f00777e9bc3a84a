"""Scores as tables: what a prediction writes, and what an evaluation keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from vfl_party.data import Labels, Table
from vfl_party.data.ids import SEPARATOR, Ids
from vfl_party.data.sources.images import FILE
from vfl_party.metrics import scores
from vfl_party.phase import Predictions
from vfl_party.rows import Prepared

KEPT = "predictions.parquet"
FORMATS = (".csv", ".parquet")
_SCORE = "score_"  # before the name of a class
_OURS = ("phase", "split", "truth", "score", "class", "value")  # columns of results; runs made before have ``score``


@dataclass(frozen=True)
class Predicted:
    """How many rows of a party's table are predicted, and why the others are left out.

    ``rows``: in the table; ``missing``: without an id; ``repeated``: left out because another row has their id. All
    others that are not ``written`` are not at every party.
    """

    written: int
    rows: int
    missing: int = 0
    repeated: int = 0

    @classmethod
    def of(cls, table: Table, written: int) -> Predicted:
        """Counts the rows of a table, of which ``written`` are predicted."""
        counts = table.counts
        return (
            cls(written, len(table)) if counts is None else cls(written, counts.rows, counts.missing, counts.repeated)
        )

    @property
    def elsewhere(self) -> int:
        """The number of rows that have an id, which not every party holds."""
        return self.rows - self.missing - self.repeated - self.written

    def __str__(self) -> str:
        reasons = {
            "without an id": self.missing,
            "with a repeated id": self.repeated,
            "not at every party": self.elsewhere,
        }
        why = ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count)
        return f"{self.written:,} of {self.rows:,} rows are predicted{f'; left out: {why}' if why else ''}"


def id_names(settings: DataSettings) -> tuple[str, ...]:
    """Returns the names of a result's id columns: those of ``data.id``; without it ``id``, or ``file`` for images.

    If one of them has the name of another column of a result, ``id_`` is put before each.
    """
    settings = next(iter(settings.parts.values()), settings)  # joined tables have the ids of the first
    folder = is_path(settings.source) and Path(settings.source).is_dir()
    names = settings.id or (FILE if folder else "id",)
    taken = any(name in _OURS or name.startswith(_SCORE) for name in names)
    return tuple(f"id_{name}" for name in names) if taken else names


def id_values(names: Sequence[str], ids: Sequence[str]) -> dict[str, pa.Array]:
    """Returns ids as columns: an id of several columns is divided again. They stay as the rules spell them."""
    values = Ids.of(ids).values
    if len(names) == 1:
        return {names[0]: values}
    parts = pa.compute.split_pattern(values, SEPARATOR, max_splits=len(names) - 1)
    return {name: pa.compute.list_element(parts, at) for at, name in enumerate(names)}


def label_name(settings: DataSettings) -> str:
    """Returns the name of the label's column, for a sentence about it."""
    settings = next(iter(settings.parts.values()), settings)
    return settings.label or ("target" if settings.is_named else "the label")


def meaning(labels: Labels, label: str) -> str:
    """Says in one line what the numbers of a result are. ``label``: the name of the label's column."""
    if labels.kind == "regression":
        return f"value: the predicted {label}, in its own unit"
    if labels.kind == "binary":
        positive = labels.classes[1]
        return f"{_SCORE}{positive}: the probability that {label} is {positive}"
    return f"{_SCORE}…: for each class, the probability that {label} is this class"


def result_columns(recipe: Recipe, labels: Labels, outputs_NO: Tensor) -> dict[str, Any]:
    """Returns the columns of the result.

    Regression: ``value``, in the label's own unit. Binary: ``score_<class>`` of the positive class, and ``class``.
    Multi-class: ``score_<class>`` of each class, and ``class``.
    """
    found = scores(recipe.task, outputs_NO).cpu()
    if recipe.task.kind == "regression":
        return {"value": labels.unscale(found.double()).reshape(-1).numpy()}
    if recipe.task.kind == "binary":
        chosen = labels.decode((outputs_NO > 0).to(torch.int64))  # as the accuracy counts
        return {f"{_SCORE}{labels.classes[1]}": found.reshape(-1).numpy(), "class": list(chosen)}
    known = found[:, : len(labels.classes)]
    named = {f"{_SCORE}{name}": known[:, column].numpy() for column, name in enumerate(labels.classes)}
    return {**named, "class": list(labels.decode(known.argmax(dim=1)))}


def check_output(path: Path) -> None:
    """Raises InputError if ``path`` cannot become a result: a wrong ending, no folder, or a file that exists."""
    if path.suffix not in FORMATS:
        raise InputError(Code.FILE_INVALID, f"{path}: the result's name must end in {' or '.join(FORMATS)}")
    if path.exists():
        raise InputError(Code.FILE_INVALID, f"{path}: exists already; move it away or give another --out")
    if not path.absolute().parent.is_dir():
        raise InputError(Code.FILE_INVALID, f"{path.absolute().parent}: no such folder")


def write_table(path: Path, table: pa.Table) -> None:
    """Writes CSV or Parquet, by the name's ending: the whole file or nothing. Only the owner may read the scores."""
    with private_file(path) as file:
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, file)
        else:
            pyarrow.csv.write_csv(table, file)


def kept_table(
    recipe: Recipe, ids: Sequence[str], prepared: Prepared, phase: str, predictions: Predictions
) -> pa.Table:
    """Returns a row for each prediction: phase, split, id, the label as in the data, and the columns of a result.

    ``ids``: the names of the id columns. Scores are float64, so that they rank the rows as the logits do, from which
    the metrics were computed.
    """
    labels, targets, raw_N = prepared.labels, prepared.targets, prepared.table.labels
    assert labels is not None and targets is not None and raw_N is not None  # noqa: S101, PT018 - of the active party
    parts = []
    for split, (rows, outputs_NO) in predictions.items():
        truth_N = raw_N[rows] if recipe.task.kind == "regression" else labels.decode(targets[rows])
        columns = {
            "phase": [phase] * len(rows),
            "split": [split] * len(rows),
            **id_values(ids, Ids.of(prepared.table.ids).taken(rows)),
            "truth": truth_N,
            **result_columns(recipe, labels, outputs_NO.cpu().double()),
        }
        parts.append(pa.table(columns))
    return pa.concat_tables(parts)


def keep(folder: Path, phase: str, table: pa.Table) -> None:
    """Writes the predictions of a phase into ``folder``, beside those of other phases, in the place of its own.

    So a round that is repeated changes nothing. Raises InputError if the file cannot be read or written.
    """
    path = folder / KEPT
    if path.exists():
        try:
            before = pyarrow.parquet.read_table(path)
            table = pa.concat_tables([before.filter(pa.compute.field("phase") != phase), table])
        except (OSError, pa.ArrowException):
            text = f"{path}: cannot be read as the predictions of an earlier phase; remove it to go on without them"
            raise InputError(Code.FILE_INVALID, text) from None
    write_table(path, table)

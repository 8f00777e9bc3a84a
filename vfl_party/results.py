"""Scores as tables: what a prediction writes, and what an evaluation keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
import torch
from torch import Tensor

from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import private_file
from vfl_party.data import Labels
from vfl_party.metrics import scores
from vfl_party.phase import Predictions
from vfl_party.rows import Prepared

KEPT = "predictions.parquet"
FORMATS = (".csv", ".parquet")


def result_columns(recipe: Recipe, labels: Labels, outputs_NO: Tensor) -> dict[str, Any]:
    """Returns the columns of the result.

    Regression: ``value``, in the label's own unit. Binary: ``score`` (of the second class) and ``class``.
    Multi-class: ``score_<class>`` for each, and ``class``.
    """
    found = scores(recipe.task, outputs_NO).cpu()
    if recipe.task.kind == "regression":
        return {"value": labels.unscale(found.double()).reshape(-1).numpy()}
    if recipe.task.kind == "binary":
        chosen = labels.decode((outputs_NO > 0).to(torch.int64))  # as the accuracy counts
        return {"score": found.reshape(-1).numpy(), "class": list(chosen)}
    known = found[:, : len(labels.classes)]
    named = {f"score_{name}": known[:, column].numpy() for column, name in enumerate(labels.classes)}
    return {**named, "class": list(labels.decode(known.argmax(dim=1)))}


def check_output(path: Path) -> None:
    """Raises InputError if ``path`` cannot become a result: a wrong ending, no folder, or a file that exists."""
    if path.suffix not in FORMATS:
        raise InputError(Code.FILE_INVALID, f"{path}: the result's name must end in {' or '.join(FORMATS)}")
    if path.exists():
        raise InputError(Code.FILE_INVALID, f"{path}: exists already; move it away or give another --output")
    if not path.absolute().parent.is_dir():
        raise InputError(Code.FILE_INVALID, f"{path.absolute().parent}: no such folder")


def write_table(path: Path, table: pa.Table) -> None:
    """Writes CSV or Parquet, by the name's ending: the whole file or nothing. Only the owner may read the scores."""
    with private_file(path) as file:
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(table, file)
        else:
            pyarrow.csv.write_csv(table, file)


def kept_table(recipe: Recipe, prepared: Prepared, phase: str, predictions: Predictions) -> pa.Table:
    """Returns a row for each prediction: phase, split, id, the label as in the data, and the columns of a result.

    Scores are float64, so that they rank the rows as the logits do, from which the metrics were computed.
    """
    labels, targets, raw_N = prepared.labels, prepared.targets, prepared.table.labels
    assert labels is not None and targets is not None and raw_N is not None  # noqa: S101, PT018 - of the active party
    parts = []
    for split, (rows, outputs_NO) in predictions.items():
        truth_N = raw_N[rows] if recipe.task.kind == "regression" else labels.decode(targets[rows])
        columns = {
            "phase": [phase] * len(rows),
            "split": [split] * len(rows),
            "id": [prepared.table.ids[row] for row in rows],
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

"""Joins the scores of two models and the labels of the same rows by id."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_common.config.data import DataSettings
from vfl_common.config.models import class_text
from vfl_common.errors import Code, InputError
from vfl_common.passwords import hide_passwords
from vfl_common.text import list_names
from vfl_party.data import Table
from vfl_party.data.checks import mask_unlabelled
from vfl_party.data.ids import SEPARATOR
from vfl_party.data.load import read_rows, tabulate
from vfl_party.predict.results import FORMATS, KEPT, SCORED, STATE, Output
from vfl_party.production.input_drift import read_scores

_SCORE, _MATCHED, _VALUE = "score_", "matched_", "value"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ModelScores:
    """Rows that one model has scored.

    ``keys``: their ids. ``scores_NC``: a column for each of ``names``. ``classes``: the predicted
    classes; None in regression. ``truth``: the labels, if known. ``unlabelled``: the number of rows
    of the table of labels that are left out because they have no label.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    scores_NC: Floats  # noqa: N815 - the shape is part of the name
    classes: tuple[str, ...] | None
    truth: tuple[Any, ...] | None
    unlabelled: int = 0

    @property
    def named(self) -> bool:
        """Whether the classes are names: none is a number."""
        return self.classes is not None and not any(map(_is_number, self._known))

    @property
    def _known(self) -> set[str]:
        """The classes that the model knows, as far as the rows show them."""
        return {name.removeprefix(_SCORE) for name in self.names} | set(self.classes or ())

    def take(self, rows: list[int]) -> ModelScores:
        """Returns the rows at some positions."""
        return ModelScores(
            tuple(self.keys[row] for row in rows),
            self.names,
            self.scores_NC[rows],
            None if self.classes is None else tuple(self.classes[row] for row in rows),
            None if self.truth is None else tuple(self.truth[row] for row in rows),
            self.unlabelled,
        )

    def with_truth(self, table: Table, label: str) -> ModelScores:
        """Returns the rows whose label a table has in the column ``label``.

        Raises InputError if there are none, or if the label is not what the model predicts.
        """
        assert table.labels is not None  # noqa: S101 - it was read with its label
        unlabelled_rows = 0 if table.counts is None else table.counts.unlabelled
        known = dict(zip(table.ids, table.labels.tolist(), strict=True))
        matched = self.take([row for row, key in enumerate(self.keys) if key in known])
        if not matched.keys:
            raise InputError(
                Code.DATA_INVALID,
                f"{table.source}: has none of the scored ids"
                f"{' with a label' if unlabelled_rows else ''}. Give the rows that were scored.",
            )
        truth = tuple(known[key] for key in matched.keys)
        self._check_truth(truth, f"{table.source}: column {label!r}")
        return replace(matched, truth=truth, unlabelled=unlabelled_rows)

    def _check_truth(self, truth: tuple[Any, ...], where: str) -> None:
        """Raises InputError if this cannot be what the model predicts."""
        if self.classes is None:
            if not all(isinstance(value, float) for value in truth):
                raise InputError(
                    Code.DATA_INVALID,
                    f"{where}: contains text, not numbers. Give the column of the label.",
                )
            return
        known = self._known
        true = {class_text(value) for value in truth}
        if not known & true:
            raise InputError(
                Code.DATA_INVALID,
                f"{where}: contains none of the classes that the model knows "
                f"({list_names(sorted(known))}). Give the column of the label.",
            )
        if len(self.names) == 1 and len(known | true) > 2:
            raise InputError(
                Code.DATA_INVALID,
                f"{where}: contains {len(true):,} different values, but the model knows two "
                "classes. Give the column of the label.",
            )


def in_common(old: ModelScores, new: ModelScores) -> tuple[ModelScores, ModelScores]:
    """Returns the rows that both have, in the same order.

    Raises InputError if there are fewer than two, or if the two models predict different things.
    """
    if old.names != new.names:
        raise InputError(
            Code.DATA_INVALID,
            f"compare: the two models give different scores ({', '.join(old.names)}; "
            f"{', '.join(new.names)}). Compare models of the same label.",
        )
    at = {key: row for row, key in enumerate(new.keys)}
    pairs = [(row, at[key]) for row, key in enumerate(old.keys) if key in at]
    if len(pairs) < 2:
        raise InputError(
            Code.DATA_INVALID,
            f"compare: the two models need at least two common test rows (got {len(pairs)}). Score "
            "the same new rows with both: give --data, or --truth.",
        )
    return old.take([a for a, _ in pairs]), new.take([b for _, b in pairs])


def read_test_rows(run: Path, active: str) -> ModelScores:
    """Returns the test rows of a run, by the ids of entity alignment. Raises InputError."""
    path = run / active / KEPT
    if not path.exists():
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: no such file. Train with a phase of kind evaluate or gbdt, which writes it "
            "at the active party.",
        )
    table = read_scores(path)
    table = table.filter(pa.compute.field("split") == "test")
    if not table.num_rows:
        raise InputError(
            Code.FILE_INVALID, f"{path}: has no test rows. Give new rows with --data, or --truth."
        )
    last = table.column("phase")[-1].as_py()
    return _to_scored(path, table.filter(pa.compute.field("phase") == last), _MATCHED)


def score_new_rows(run: Path, data: Mapping[str, Any], active: str) -> ModelScores:
    """Scores new rows with a run on this machine; the active party's rows have the label.

    Raises VflError.
    """
    from vfl.library.predicting import new_rows, predict_rows
    from vfl.simulation.origin import Origin
    from vfl_common.run_folder import RunFolder
    from vfl_party.data import make_loader

    with tempfile.TemporaryDirectory(prefix="vfl-") as place:
        output = Output(Path(place) / "scores.parquet")
        predict_rows(run, data, output)
        scores = read_scores(output.path)
    origin = Origin.of(run)
    name = next(iter(origin.data))
    recipe = RunFolder(run / name, run.name).recipe()
    settings, frames = new_rows(recipe, data, origin)
    own = settings[active].with_id_rules(tuple(recipe.rows.id_rules))
    if own.label is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{run}: does not say which column is the label. Score the rows with vfl-party "
            "predict, and give its files with --truth and --label.",
        )
    label = own.label
    # Only ids and labels are read again.
    own = own.model_copy(
        update={"columns": (), "drop": (), "numeric": (), "categorical": (), "unlabelled": "drop"}
    )
    truth = make_loader(frames)(own, True)
    return _to_scored(run, _only_scored(scores), _MATCHED).with_truth(truth, label)


def read_file(path: Path, truth: str, label: str) -> ModelScores:
    """Returns the rows of a file of scores, with the labels from a table of the active party.

    Raises InputError.
    """
    table = _only_scored(read_scores(path))
    ids = [name for name in _before_matched(path, table) if name in table.column_names]
    scored = _to_scored(path, table, "")
    # Read as text, so that a class named NA is not a missing cell.
    texts = (label,) if scored.named else ()
    settings = DataSettings(
        source=truth,
        id=tuple(ids),
        label=label,
        columns=(),
        categorical=texts,
        unlabelled="drop",
    ).absolute(Path())
    rows = read_rows(settings, True)
    if rows.labels is not None and mask_unlabelled(rows.labels).all():
        raise InputError(
            Code.DATA_INVALID,
            f"{hide_passwords(settings.source)}: column {label!r}: has no label in any row. Add "
            "the labels, or give another column.",
        )
    once = "Keep one row for each id."
    return scored.with_truth(tabulate(rows, settings, True, once), label)


def is_file(path: Path) -> bool:
    """Whether a path names a file of scores, not a run."""
    return path.suffix in FORMATS and not path.is_dir()


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _only_scored(table: pa.Table) -> pa.Table:
    if STATE not in table.column_names:
        return table
    return table.filter(pa.compute.field(STATE) == SCORED)


def _before_matched(path: Path, table: pa.Table) -> list[str]:
    names = [name for name in table.column_names if name.startswith(_MATCHED)]
    if not names:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: was not written by vfl-party predict. Give a file that it wrote.",
        )
    return [name.removeprefix(_MATCHED) for name in names]


def _to_scored(path: Path, table: pa.Table, before: str) -> ModelScores:
    """Reads scores. ``before``: the prefix of the columns whose cells are the key."""
    ids = [f"{before}{name}" for name in _before_matched(path, table)]
    cells = [table.column(name).to_pylist() for name in ids]
    keys = tuple(SEPARATOR.join(map(str, row)) for row in zip(*cells, strict=True))
    names = [n for n in table.column_names if n == _VALUE or n.startswith(_SCORE)]
    columns = [table.column(name).to_numpy().astype(np.float64) for name in names]
    with_class = "class" in table.column_names
    classes = (
        tuple(class_text(value) for value in table.column("class").to_pylist())
        if with_class
        else None
    )
    truth = tuple(table.column("truth").to_pylist()) if "truth" in table.column_names else None
    if not columns or (not with_class and _VALUE not in names):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: scores of several labels, of survival, or of a ranking cannot be compared. "
            "Choose one of the tasks binary, multiclass, regression.",
        )
    scores_NC = np.stack(columns, axis=1)
    return ModelScores(keys, tuple(names), scores_NC, classes, truth)

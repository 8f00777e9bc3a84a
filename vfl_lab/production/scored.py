"""Reads the scores of models, and joins them with the labels of the same rows by id."""

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
from vfl_common.config.task import class_text
from vfl_common.errors import Code, InputError
from vfl_common.text import hide_passwords, list_names
from vfl_party.data import Table
from vfl_party.data.checks import mask_unlabelled
from vfl_party.data.id_rules import SEPARATOR
from vfl_party.data.load import read_rows, tabulate
from vfl_party.predict.input_drift import read_scores
from vfl_party.predict.results import FORMATS, KEPT, SCORED, STATE, Output

_SCORE, _MATCHED, _VALUE = "score_", "matched_", "value"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ModelScores:
    """The scores of one model.

    Args:
        keys: [N] The ids of the rows.
        names: [C] The names of the score columns.
        scores_NC: [N, C] The scores.
        classes: [N] The predicted classes; None in a regression.
        truth: [N] The labels; None if they are not known.
        unlabelled: The number of rows that were left out because they have no label.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    scores_NC: Floats  # noqa: N815 - the shape is part of the name
    classes: tuple[str, ...] | None
    truth: tuple[Any, ...] | None
    unlabelled: int = 0

    @property
    def has_named_classes(self) -> bool:
        """Whether all classes are names instead of numbers."""
        return self.classes is not None and not any(map(_is_number, self._model_classes))

    @property
    def _model_classes(self) -> set[str]:
        """The classes of the model that occur in its score columns or predictions."""
        return {name.removeprefix(_SCORE) for name in self.names} | set(self.classes or ())

    def take(self, rows: list[int]) -> ModelScores:
        """Returns the scores at some row positions."""
        return ModelScores(
            tuple(self.keys[row] for row in rows),
            self.names,
            self.scores_NC[rows],
            None if self.classes is None else tuple(self.classes[row] for row in rows),
            None if self.truth is None else tuple(self.truth[row] for row in rows),
            self.unlabelled,
        )

    def with_truth(self, table: Table, label: str) -> ModelScores:
        """Adds the labels from the column ``label`` of a table. Rows without a label are left out.

        Raises InputError if no row has a label, or if the model does not predict this label.
        """
        assert table.labels is not None  # noqa: S101 - the table was read with its label
        unlabelled_rows = 0 if table.counts is None else table.counts.unlabelled
        label_by_key = dict(zip(table.ids, table.labels.tolist(), strict=True))
        matched = self.take([row for row, key in enumerate(self.keys) if key in label_by_key])
        if not matched.keys:
            raise InputError(
                Code.DATA_INVALID,
                f"{table.source}: contains none of the scored ids"
                f"{' with a label' if unlabelled_rows else ''}. Give the rows that were scored.",
            )
        truth = tuple(label_by_key[key] for key in matched.keys)
        self._check_truth(truth, f"{table.source}: column {label!r}")
        without_truth = len(self.keys) - len(matched.keys)
        return replace(matched, truth=truth, unlabelled=max(unlabelled_rows, without_truth))

    def _check_truth(self, truth: tuple[Any, ...], where: str) -> None:
        """Raises InputError if the labels cannot be what the model predicts."""
        if self.classes is None:
            if not all(isinstance(value, float) for value in truth):
                raise InputError(
                    Code.DATA_INVALID,
                    f"{where}: contains text, not numbers. Give the column of the label.",
                )
            return
        model_classes = self._model_classes
        true_classes = {class_text(value) for value in truth}
        if not model_classes & true_classes:
            raise InputError(
                Code.DATA_INVALID,
                f"{where}: contains none of the classes that the model predicts "
                f"({list_names(sorted(model_classes))}). Give the column of the label.",
            )
        if len(self.names) == 1 and len(model_classes | true_classes) > 2:
            raise InputError(
                Code.DATA_INVALID,
                f"{where}: contains {len(true_classes):,} different values, but the model predicts "
                "two classes. Give the column of the label.",
            )


def select_common_rows(old: ModelScores, new: ModelScores) -> tuple[ModelScores, ModelScores]:
    """Selects the rows that both models have scored, in the same order.

    Raises InputError if there are fewer than two such rows, or if the models predict different
    labels.
    """
    if old.names != new.names:
        raise InputError(
            Code.DATA_INVALID,
            f"compare: the models have different scores ({', '.join(old.names)}; "
            f"{', '.join(new.names)}). Compare models that predict the same label.",
        )
    row_of_key = {key: row for row, key in enumerate(new.keys)}
    pairs = [(row, row_of_key[key]) for row, key in enumerate(old.keys) if key in row_of_key]
    if len(pairs) < 2:
        raise InputError(
            Code.DATA_INVALID,
            f"compare: the models need at least two common rows (got {len(pairs)}). Score the same "
            "new rows with both models: give --data, or --truth.",
        )
    return old.take([a for a, _ in pairs]), new.take([b for _, b in pairs])


def read_test_rows(run: Path, active: str) -> ModelScores:
    """Reads the scores of a run's test rows, keyed by the ids of entity alignment. Raises
    InputError.
    """
    path = run / active / KEPT
    if not path.exists():
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: no such file. Train with a phase of kind evaluate or gbdt, which writes this "
            "file at the active party.",
        )
    table = read_scores(path)
    table = table.filter(pa.compute.field("split") == "test")
    if not table.num_rows:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: contains no test rows. Give new rows with --data, or --truth.",
        )
    last_phase = table.column("phase")[-1].as_py()
    return _parse_scores(path, table.filter(pa.compute.field("phase") == last_phase), _MATCHED)


def score_new_rows(run: Path, data: Mapping[str, Any], active: str) -> ModelScores:
    """Scores new rows with a run on this machine. The active party's rows must have the label.

    Raises VflError.
    """
    from vfl.library.run import make_settings_of_new_rows, predict_rows
    from vfl.simulation.federation import Origin
    from vfl_common.run_folder import RunFolder
    from vfl_party.data import make_loader

    with tempfile.TemporaryDirectory(prefix="vfl-") as temporary:
        output = Output(Path(temporary) / "scores.parquet")
        predict_rows(run, data, output)
        scores = read_scores(output.path)
    origin = Origin.of(run)
    name = next(iter(origin.data))
    recipe = RunFolder(run / name, run.name).recipe()
    settings, frames = make_settings_of_new_rows(recipe, data, origin)
    active_settings = settings[active].with_id_rules(recipe.rows)
    if active_settings.label is None:
        raise InputError(
            Code.CONFIG_INVALID,
            f"{run}: does not name the column of the label. Score the rows with vfl-party "
            "predict, and give the score files with --truth and --label.",
        )
    label = active_settings.label
    # Only ids and labels are needed, so no feature columns are read.
    active_settings = active_settings.model_copy(
        update={"columns": (), "drop": (), "numeric": (), "categorical": (), "unlabelled": "drop"}
    )
    truth = make_loader(frames)(active_settings, True)
    return _parse_scores(run, _drop_unscored(scores), _MATCHED).with_truth(truth, label)


def read_file(path: Path, truth: str, label: str) -> ModelScores:
    """Reads a score file, and adds the labels from a table of the active party.

    Raises InputError.
    """
    table = _drop_unscored(read_scores(path))
    ids = [name for name in _list_id_columns(path, table) if name in table.column_names]
    scores = _parse_scores(path, table, "")
    # Class names are read as text, so that a class named NA is not a missing value.
    text_columns = (label,) if scores.has_named_classes else ()
    settings = DataSettings(
        source=truth,
        id=tuple(ids),
        label=label,
        columns=(),
        categorical=text_columns,
        unlabelled="drop",
        key_places=tuple((place,) for place in range(len(ids))) if len(ids) > 1 else (),
        column_rules=((),) * len(ids) if len(ids) > 1 else (),
    ).absolute(Path())
    rows = read_rows(settings, True)
    if rows.labels is not None and mask_unlabelled(rows.labels).all():
        raise InputError(
            Code.DATA_INVALID,
            f"{hide_passwords(settings.source)}: column {label!r}: contains no labels. Add "
            "them, or give another column.",
        )
    fix = "Keep one row for each id."
    return scores.with_truth(tabulate(rows, settings, True, fix), label)


def is_file(path: Path) -> bool:
    """Returns whether a path names a score file instead of a run."""
    return path.suffix in FORMATS and not path.is_dir()


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _drop_unscored(table: pa.Table) -> pa.Table:
    if STATE not in table.column_names:
        return table
    return table.filter(pa.compute.field(STATE) == SCORED)


def _list_id_columns(path: Path, table: pa.Table) -> list[str]:
    names = [name for name in table.column_names if name.startswith(_MATCHED)]
    if not names:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: was not written by vfl-party predict. Give a file of vfl-party predict.",
        )
    return [name.removeprefix(_MATCHED) for name in names]


def _parse_scores(path: Path, table: pa.Table, prefix: str) -> ModelScores:
    """Converts a table of scores. ``prefix``: The prefix of the columns that form the key."""
    ids = [f"{prefix}{name}" for name in _list_id_columns(path, table)]
    cells = [table.column(name).to_pylist() for name in ids]
    rows = zip(*cells, strict=True)
    # With the keys of a recipe, a cell of an id may be missing.
    keys = tuple(SEPARATOR.join("" if cell is None else str(cell) for cell in row) for row in rows)
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
            f"{path}: only scores of the tasks binary, multiclass and regression can be compared. "
            "Give scores of one of these tasks.",
        )
    scores_NC = np.stack(columns, axis=1)
    return ModelScores(keys, tuple(names), scores_NC, classes, truth)

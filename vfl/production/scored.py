"""Rows with scores of two models and the truth, put side by side by id."""

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

from vfl_common.config.data import DataSettings, shown
from vfl_common.config.models import class_text
from vfl_common.errors import Code, InputError
from vfl_common.text import listed
from vfl_party.data import Table
from vfl_party.data.checks import unlabelled
from vfl_party.data.ids import SEPARATOR
from vfl_party.data.load import read_rows, tabulate
from vfl_party.predict.results import FORMATS, KEPT, SCORED, STATE, Output
from vfl_party.production.input_drift import read_scores

_SCORE, _MATCHED, _VALUE = "score_", "matched_", "value"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scored:
    """Rows that one model has scored. ``keys``: their ids. ``scores_NC``: a column for each of
    ``names``. ``classes``: the model's answer, None in regression. ``truth``: if it is known.
    ``unlabelled``: rows of the table of truth that have no label, and are left out.
    """

    keys: tuple[str, ...]
    names: tuple[str, ...]
    scores_NC: Floats  # noqa: N815 - the shape is part of the name
    classes: tuple[str, ...] | None
    truth: tuple[Any, ...] | None
    unlabelled: int = 0

    @property
    def named(self) -> bool:
        """Whether no class is a number."""
        return self.classes is not None and not any(map(_is_number, self._known))

    @property
    def _known(self) -> set[str]:
        """The classes that the model knows, as far as the rows show."""
        return {name.removeprefix(_SCORE) for name in self.names} | set(self.classes or ())

    def taken(self, rows: list[int]) -> Scored:
        """Returns some rows."""
        return Scored(
            tuple(self.keys[row] for row in rows),
            self.names,
            self.scores_NC[rows],
            None if self.classes is None else tuple(self.classes[row] for row in rows),
            None if self.truth is None else tuple(self.truth[row] for row in rows),
            self.unlabelled,
        )

    def with_truth(self, table: Table, label: str) -> Scored:
        """Returns the rows whose truth a table has in the column ``label``. Raises InputError if
        there is none, or if it is not what the model predicts.
        """
        assert table.labels is not None  # noqa: S101 - it was read with its label
        unlabelled_rows = 0 if table.counts is None else table.counts.unlabelled
        known = dict(zip(table.ids, table.labels.tolist(), strict=True))
        found = self.taken([row for row, key in enumerate(self.keys) if key in known])
        if not found.keys:
            what = "none of the scored ids" + (" with a label" if unlabelled_rows else "")
            text = f"{table.source}: has {what}; give the rows that were scored"
            raise InputError(Code.DATA_INVALID, text)
        truth = tuple(known[key] for key in found.keys)
        wrong = self._unlike(truth)
        if wrong:
            text = f"{table.source}: column {label!r} holds {wrong}"
            raise InputError(Code.DATA_INVALID, f"{text}; give the column that has the label")
        return replace(found, truth=truth, unlabelled=unlabelled_rows)

    def _unlike(self, truth: tuple[Any, ...]) -> str:
        """Says why this cannot be what the model predicts; '' if it can be."""
        if self.classes is None:
            return "" if all(isinstance(each, float) for each in truth) else "text, no numbers"
        known = self._known
        true = {class_text(each) for each in truth}
        if not known & true:
            return f"none of the classes that the model knows ({listed(sorted(known))})"
        count = len(known | true)
        if len(self.names) == 1 and count > 2:
            return f"{len(true):,} different values, and the model knows two classes"
        return ""


def in_common(old: Scored, new: Scored) -> tuple[Scored, Scored]:
    """Returns the rows that both have, in the same order. Raises InputError if there are none, or
    if the two score something else.
    """
    if old.names != new.names:
        text = f"the two models give other scores: {', '.join(old.names)}, and"
        raise InputError(
            Code.DATA_INVALID, f"{text} {', '.join(new.names)}; compare models of the same label"
        )
    at = {key: row for row, key in enumerate(new.keys)}
    pairs = [(row, at[key]) for row, key in enumerate(old.keys) if key in at]
    if len(pairs) < 2:
        text = "the two have fewer than two tested rows in common"
        raise InputError(
            Code.DATA_INVALID, f"{text}; let both score the same new rows: --data, or --truth"
        )
    return old.taken([a for a, _ in pairs]), new.taken([b for _, b in pairs])


def tested(run: Path, active: str) -> Scored:
    """Returns the test rows of a run, by the ids that the parties have matched. Raises
    InputError.
    """
    path = run / active / KEPT
    if not path.exists():
        text = f"{path}: no such file; a phase of kind evaluate or gbdt writes it"
        raise InputError(Code.FILE_INVALID, f"{text}, at the active party")
    table = read_scores(path)
    table = table.filter(pa.compute.field("split") == "test")
    if not table.num_rows:
        text = f"{path}: has no test rows; give new rows with --data, or --truth"
        raise InputError(Code.FILE_INVALID, text)
    last = table.column("phase")[-1].as_py()
    return _scored(path, table.filter(pa.compute.field("phase") == last), _MATCHED)


def predicted(run: Path, data: Mapping[str, Any], active: str) -> Scored:
    """Scores new rows with a run on this machine; the active party's have the label. Raises
    VflError.
    """
    from vfl.library.predicting import new_rows, predict_rows
    from vfl.simulation.origin import Origin
    from vfl_common.run_folder import RunFolder
    from vfl_party.data import loading

    with tempfile.TemporaryDirectory(prefix="vfl-") as place:
        output = Output(Path(place) / "scores.parquet")
        predict_rows(run, data, output)
        scores = read_scores(output.path)
    origin = Origin.of(run)
    name = next(iter(origin.data))
    recipe = RunFolder(run / name, run.name).recipe()
    settings, frames = new_rows(recipe, data, origin)
    own = settings[active].ruled(tuple(recipe.rows.id_rules))
    if own.label is None:
        raise InputError(
            Code.CONFIG_INVALID, f"{run}: the run does not say which column is the label"
        )
    label = own.label
    # Its columns are not needed again.
    own = own.model_copy(
        update={"columns": (), "drop": (), "numeric": (), "categorical": (), "unlabelled": "drop"}
    )
    truth = loading(frames)(own, True)
    return _scored(run, _only_scored(scores), _MATCHED).with_truth(truth, label)


def of_file(path: Path, truth: str, label: str) -> Scored:
    """Returns the rows of a prediction's file, with the truth from a table of the active party.
    Raises InputError.
    """
    table = _only_scored(read_scores(path))
    ids = [name for name in _before_matched(path, table) if name in table.column_names]
    scored = _scored(path, table, "")
    # Text, so that a class may be called NA, as in a cell that is missing.
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
    if rows.labels is not None and unlabelled(rows.labels).all():
        text = f"{shown(settings.source)}: no row has a label in column {label!r}"
        raise InputError(Code.DATA_INVALID, f"{text}; add the truth, or give another column")
    once = "Keep one row for each id."
    return scored.with_truth(tabulate(rows, settings, True, once), label)


def is_file(path: Path) -> bool:
    """Whether a person names a file of scores, and not a run."""
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
    names = [each for each in table.column_names if each.startswith(_MATCHED)]
    if not names:
        raise InputError(Code.FILE_INVALID, f"{path}: is no file that vfl-party predict wrote")
    return [each.removeprefix(_MATCHED) for each in names]


def _scored(path: Path, table: pa.Table, before: str) -> Scored:
    """Reads scores. ``before``: in the names of the columns whose cells are the key."""
    ids = [f"{before}{name}" for name in _before_matched(path, table)]
    cells = [table.column(name).to_pylist() for name in ids]
    keys = tuple(SEPARATOR.join(map(str, each)) for each in zip(*cells, strict=True))
    names = [n for n in table.column_names if n == _VALUE or n.startswith(_SCORE)]
    columns = [table.column(name).to_numpy().astype(np.float64) for name in names]
    with_class = "class" in table.column_names
    classes = (
        tuple(class_text(each) for each in table.column("class").to_pylist())
        if with_class
        else None
    )
    truth = tuple(table.column("truth").to_pylist()) if "truth" in table.column_names else None
    if not columns or (not with_class and _VALUE not in names):
        text = f"{path}: scores of several labels, of survival, or of a ranking, cannot be compared"
        raise InputError(Code.FILE_INVALID, f"{text}; the tasks are binary, multiclass, regression")
    scores_NC = np.stack(columns, axis=1)
    return Scored(keys, tuple(names), scores_NC, classes, truth)

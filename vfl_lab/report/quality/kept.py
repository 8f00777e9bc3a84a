"""Reads the predictions that an active party has stored as arrays, one split at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet

from vfl_common.config.task import Kind, class_text
from vfl_common.errors import Code, InputError
from vfl_party.data.id_rules import SEPARATOR
from vfl_party.predict.results import KEPT

_SCORE, _MATCHED, _TRUTH = "score_", "matched_", "truth_"
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SplitPredictions:
    """Rows of one split with their truth and scores.

    ``keys``: their aligned ids. ``classes``: the negative and the positive class (binary), all
    classes (multiclass), the labels (multilabel), otherwise none. ``truth_N``: 0 or 1 (binary), the
    index of the class (multiclass), [N, L] (multilabel), the label (regression, ranking), the time
    (survival). ``scores_NO``: the probability of the positive class (binary, O = 1), of each class
    or label, or the predicted value. ``decided_N``: the decision of the model, like ``truth_N``;
    None without classes. ``more_N``: the event (survival), or the query (ranking).
    """

    split: str
    kind: Kind
    keys: tuple[str, ...]
    classes: tuple[str, ...]
    truth_N: npt.NDArray[Any]  # noqa: N815 - the shape is part of the name
    scores_NO: Floats  # noqa: N815
    decided_N: npt.NDArray[np.int64] | None = None  # noqa: N815
    more_N: npt.NDArray[Any] | None = None  # noqa: N815

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def scores_N(self) -> Floats:  # noqa: N802 - the shape is part of the name
        """The only score of each row, [N]."""
        return self.scores_NO[:, 0]

    @property
    def is_positive_N(self) -> npt.NDArray[np.bool_]:  # noqa: N802
        """Whether each row is of the positive class, [N]."""
        return np.asarray(self.truth_N == 1)

    def take(self, rows: Sequence[int]) -> SplitPredictions:
        """Returns the rows at some positions."""
        at = np.asarray(rows, np.int64)
        return replace(
            self,
            keys=tuple(self.keys[row] for row in rows),
            truth_N=self.truth_N[at],
            scores_NO=self.scores_NO[at],
            decided_N=None if self.decided_N is None else self.decided_N[at],
            more_N=None if self.more_N is None else self.more_N[at],
        )

    def pair_with(
        self, other: SplitPredictions
    ) -> tuple[SplitPredictions, SplitPredictions] | None:
        """Returns the rows that both have, in the same order; None if there are fewer than two, or
        if the tasks differ.
        """
        if (self.kind, self.classes) != (other.kind, other.classes):
            return None
        at = {key: row for row, key in enumerate(other.keys)}
        pairs = [(row, at[key]) for row, key in enumerate(self.keys) if key in at]
        if len(pairs) < 2:
            return None
        return self.take([a for a, _ in pairs]), other.take([b for _, b in pairs])


def read_kept(folder: Path, kind: Kind) -> dict[str, SplitPredictions]:
    """Reads the predictions in a party's folder: {split: its rows}; empty without predictions.

    If two phases have measured a split, the later one counts, as in the summary. Raises InputError
    if the file is damaged.
    """
    path = folder / KEPT
    try:
        table = pyarrow.parquet.read_table(path)
    except FileNotFoundError:
        return {}
    except (OSError, pa.ArrowException) as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error}). Remove it, or train again."
        ) from None
    try:
        phases, splits = (np.array(table.column(n).to_pylist()) for n in ("phase", "split"))
        by_split = {}
        for split in dict.fromkeys(splits.tolist()):
            last = phases[splits == split][-1]
            rows = table.filter(pa.array((splits == split) & (phases == last)))
            by_split[split] = _read_split(rows, split, kind)
    except (KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: has another format than this version writes ({type(error).__name__}). Remove "
            "it, or train again.",
        ) from None
    return by_split


def _read_split(table: pa.Table, split: str, kind: Kind) -> SplitPredictions:
    ids = [name for name in table.column_names if name.startswith(_MATCHED)]
    cells = [table.column(name).to_pylist() for name in ids]
    keys = tuple(SEPARATOR.join(map(str, row)) for row in zip(*cells, strict=True))
    if kind in ("binary", "multiclass"):
        return _read_classes(table, split, kind, keys)
    if kind == "multilabel":
        names = [n.removeprefix(_SCORE) for n in table.column_names if n.startswith(_SCORE)]
        truth_NL = np.stack([_read_numbers(table, f"{_TRUTH}{n}") for n in names], axis=1).astype(
            int
        )
        scores_NL = np.stack([_read_numbers(table, f"{_SCORE}{n}") for n in names], axis=1)
        return SplitPredictions(split, kind, keys, tuple(names), truth_NL, scores_NL)
    name = {"regression": "value", "survival": "risk", "ranking": "score"}[kind]
    more_N: npt.NDArray[Any] | None = None
    if kind == "survival":
        more_N = _read_numbers(table, "event")
    elif kind == "ranking":
        more_N = np.array(list(map(str, table.column("group").to_pylist())))
    truth_N, scores_NO = _read_numbers(table, "truth"), _read_numbers(table, name)[:, None]
    return SplitPredictions(split, kind, keys, (), truth_N, scores_NO, more_N=more_N)


def _read_classes(
    table: pa.Table, split: str, kind: Kind, keys: tuple[str, ...]
) -> SplitPredictions:
    names = [n.removeprefix(_SCORE) for n in table.column_names if n.startswith(_SCORE)]
    scores_NO = np.stack([_read_numbers(table, f"{_SCORE}{n}") for n in names], axis=1)
    truth, chosen = (
        [class_text(cell) for cell in table.column(name).to_pylist()] for name in ("truth", "class")
    )
    if kind == "binary":
        positive = names[0]
        others = sorted({*truth, *chosen} - {positive})
        classes = (others[0] if others else f"not {positive}", positive)
        at = {class_name: int(class_name == positive) for class_name in {*truth, *chosen}}
    else:
        classes = tuple(names)
        at = {name: place for place, name in enumerate(names)}
    truth_N, decided_N = (np.array([at[value] for value in of], np.int64) for of in (truth, chosen))
    return SplitPredictions(split, kind, keys, classes, truth_N, scores_NO, decided_N)


def _read_numbers(table: pa.Table, name: str) -> Floats:
    return np.asarray(table.column(name).to_numpy(), np.float64)

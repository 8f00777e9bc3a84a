"""Converts labels to training targets and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.config.task import TaskSettings, class_text
from vfl_party.base.devices import get_real_dtype
from vfl_party.data import checks
from vfl_party.data.row_arrays import parts, release

# The maximum number of queries. float32 represents all whole numbers up to it exactly.
_MAX_QUERIES = 1 << 24


@dataclass(frozen=True)
class Labels:
    """The conversion of labels to targets.

    Args:
        kind: The kind of the task.
        source: The name of the table, for errors.
        classes: The class labels of a classification, sorted (numbers as numbers, text by code
            points). If ``task.positive`` is set, this class is the second. The position of a class
            is its code. For ``multilabel``, the names of the label columns.
        mean: For a regression, the mean of the training labels; their minimum with ``minmax``; 0
            for counts.
        std: For a regression, the standard deviation of the training labels; their range with
            ``minmax``; their mean for counts. Targets are (label - mean) / std.
    """

    kind: str
    source: str
    classes: tuple[str | int | float, ...] = ()
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def fit(
        cls,
        raw: npt.NDArray[Any] | None,
        task: TaskSettings,
        train_rows: npt.NDArray[np.int64],
        *,
        source: str,
        scale: Literal["standard", "minmax"] = "standard",
        names: tuple[str, ...] = (),
    ) -> Labels:
        """Learns the classes from all labels, or the scale of a regression from the training rows.

        Args:
            raw: The labels: [N] numbers or text; [N, labels] for ``multilabel``; [N, 2] times and
                events for ``survival``; [N, 2] relevances and queries for ``ranking``.
            task: The task of the recipe.
            train_rows: The positions of the training rows, int64.
            source: The name of the table, for errors.
            scale: The scaling of a regression's labels.
            names: The names of the label columns, for ``multilabel``.

        Raises InputError if the labels do not fit the task.
        """
        if raw is None:
            raise checks.unusable(
                source, "has no labels. Set data.label in the active party's data."
            )
        if task.kind in ("survival", "ranking"):
            return cls(task.kind, source)
        if task.kind == "multilabel" or names:
            return cls(task.kind, source, _check_label_columns(task, names, source))
        if task.kind == "regression":
            values = _convert_numbers(raw, source)[train_rows]
            if len(values) == 0:
                raise checks.unusable(
                    source,
                    "no training rows are left. Give more rows, or make the other splits smaller.",
                )
            lowest, highest = values.min(), values.max()
            if task.counts:
                return cls(task.kind, source, std=_compute_mean_count(raw, values, scale, source))
            if lowest == highest:
                mean, std = lowest, 1.0
            elif scale == "minmax":
                with np.errstate(over="ignore"):
                    mean, std = lowest, highest - lowest
            else:
                # An overflow raises InputError below.
                with np.errstate(over="ignore", invalid="ignore"):
                    mean, std = values.mean(), values.std()
            if not (np.isfinite(mean) and np.isfinite(std)) or std == 0.0:
                raise checks.unusable(
                    source,
                    "the labels are too large or too small to be scaled. Use another unit for "
                    "the labels.",
                )
            return cls(task.kind, source, mean=float(mean), std=float(std))
        classes = tuple(_simplify(value) for value in _find_distinct(raw).tolist())
        if task.kind == "binary" and len(classes) != 2:
            raise checks.unusable(
                source,
                f"the label of a binary task must have two different values (got {len(classes)}). "
                "Correct the column or the task.",
            )
        if task.classes is not None and len(classes) > task.classes:
            raise checks.unusable(
                source,
                f"the label must have at most the {task.classes} different values of task.classes "
                f"(got {len(classes)}). Correct the column or the recipe.",
            )
        return cls(task.kind, source, _put_positive_second(classes, task.positive, source))

    def encode(self, raw: npt.NDArray[Any]) -> torch.Tensor:
        """Converts labels to targets.

        Returns:
            Binary: float32 [N, 1] of 0 and 1. Multiclass: codes, int64 [N]. Multilabel: float32 [N,
                labels] of 0 and 1. Regression: scaled labels, float32 [N, 1]. Survival: float32 [N,
                2], the time, and 1 if the event happened, else 0. Ranking: float32 [N, 2], the
                relevance and the number of the query.

        Raises InputError for a label that ``fit`` did not see.
        """
        if self.kind == "regression":
            scaled_N = (_convert_numbers(raw, self.source) - self.mean) / self.std
            return torch.from_numpy(scaled_N.astype(np.float32)).to(get_real_dtype())[:, None]
        if self.kind == "survival":
            return _convert_times(raw, self.source)
        if self.kind == "ranking":
            return _convert_relevances(raw, self.source)
        if self.kind == "multilabel":
            columns = [
                _convert_flags(column, f"label column {name!r}", self.source)
                for column, name in zip(raw.T, self.classes, strict=True)
            ]
            return torch.from_numpy(np.stack(columns, axis=1)).to(get_real_dtype())
        codes_by_class = {name: code for code, name in enumerate(self.classes)}
        dtype = get_real_dtype() if self.kind == "binary" else torch.int64
        codes_N = torch.empty(len(raw), dtype=dtype)
        for part in parts(len(raw)):
            values, inverse_B = np.unique(raw[part], return_inverse=True)
            codes = [codes_by_class.get(_simplify(value), -1) for value in values.tolist()]
            codes_N[part] = torch.tensor(codes, dtype=dtype)[torch.from_numpy(inverse_B)]
        release(raw)
        unknown = int((codes_N < 0).sum())
        if unknown:
            raise checks.unusable(
                self.source,
                f"{unknown} {'row has' if unknown == 1 else 'rows have'} a label that the "
                "training data did not have. Correct the labels.",
            )
        return codes_N[:, None] if self.kind == "binary" else codes_N

    def decode(self, codes: torch.Tensor | npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Converts codes [N] or [N, 1], or the scaled predictions of a regression, to labels
        [N].
        """
        flat = torch.as_tensor(codes).detach().cpu().reshape(-1)
        if self.kind == "regression":
            unscaled: npt.NDArray[Any] = self.unscale(flat.double()).numpy()
            return unscaled
        has_text = any(isinstance(name, str) for name in self.classes)
        names: npt.NDArray[Any] = np.array(self.classes, dtype=object if has_text else None)
        return np.take(names, flat.long().numpy())

    def select_known(self, outputs_NO: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the classes that occur in the labels, [N, K]; all outputs for
        other tasks than ``multiclass``.

        A multi-class task may have more classes than its labels. Metrics and predictions use only
        the classes that occur.
        """
        return outputs_NO[:, : len(self.classes)] if self.kind == "multiclass" else outputs_NO

    def unscale(self, scaled: torch.Tensor) -> torch.Tensor:
        """Converts a regression's scaled predictions to the unit of the labels, in the same
        shape.
        """
        return scaled * self.std + self.mean

    def state(self) -> dict[str, Any]:
        """Returns all fields, for JSON."""
        return {
            "kind": self.kind,
            "source": self.source,
            "classes": list(self.classes),
            "mean": self.mean,
            "std": self.std,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Labels:
        """Restores the object from ``state``."""
        return cls(**{**state, "classes": tuple(state["classes"])})


def _put_positive_second(
    classes: tuple[str | int | float, ...], positive: bool | float | str | None, source: str
) -> tuple[str | int | float, ...]:
    """Returns the classes with the positive class second; unchanged if ``positive`` is None. Raises
    InputError.
    """
    if positive is None:
        return classes
    is_positive = [class_text(name) == class_text(positive) for name in classes]
    if not any(is_positive):
        raise checks.unusable(
            source,
            f"the label has no value {positive!r}, which task.positive of the recipe names. "
            "Correct the recipe, or remove the key.",
        )
    return classes[::-1] if is_positive[0] else classes


def _compute_mean_count(
    raw: npt.NDArray[Any], train: npt.NDArray[np.float64], scale: str, source: str
) -> float:
    """Returns the mean of the training rows' counts, by which all counts are divided. This changes
    the loss only by a factor.

    Raises InputError if the labels are not counts.
    """
    if scale != "standard":
        raise checks.unusable(
            source,
            'data.label_scale cannot be used with task.loss = "poisson", which divides counts by '
            "their mean. Remove data.label_scale.",
        )
    if _convert_numbers(raw, source).min() < 0:
        raise checks.unusable(
            source,
            'task.loss = "poisson" needs counts, but the label has numbers below 0. Correct the '
            "column or the recipe.",
        )
    mean = float(train.mean())
    if not (np.isfinite(mean) and mean > 0):
        raise checks.unusable(
            source,
            "the labels are 0 in all training rows, or too large to be summed. Correct the column.",
        )
    return mean


def _check_label_columns(
    task: TaskSettings, names: tuple[str, ...], source: str
) -> tuple[str | int | float, ...]:
    """Returns the names of the label columns. Raises InputError if they do not fit the task."""
    if task.kind != "multilabel":
        raise checks.unusable(
            source,
            f"data.labels is for a multilabel task (got {task.kind}). Give data.label, or correct "
            "the recipe.",
        )
    if not names:
        raise checks.unusable(
            source,
            "the recipe's task is multilabel, but data.label names one column. Give data.labels "
            "instead.",
        )
    if len(names) != task.outputs:
        raise checks.unusable(
            source,
            f"data.labels must name {task.outputs} columns, the task.classes of the recipe (got "
            f"{len(names)}). Correct one of them.",
        )
    return names


def _convert_times(raw: npt.NDArray[Any], source: str) -> torch.Tensor:
    """Converts labels of a survival task to times and events, float32 [N, 2]. Raises InputError for
    other labels.
    """
    if raw.ndim != 2:
        raise checks.unusable(
            source,
            "the recipe's task is survival, but data.event is missing. Name the column that says "
            "whether the event happened.",
        )
    times, events = raw[:, 0], _convert_flags(raw[:, 1], "the column of data.event", source)
    if any(isinstance(time, str) for time in times[:1].tolist()):
        raise checks.unusable(
            source,
            "the labels are text, but a survival task needs times. Correct data.label or the task.",
        )
    if (times.astype(np.float64) < 0).any():
        raise checks.unusable(source, "the label has times below 0. Correct the column.")
    return torch.from_numpy(np.stack([times.astype(np.float32), events], axis=1)).to(
        get_real_dtype()
    )


def _convert_relevances(raw: npt.NDArray[Any], source: str) -> torch.Tensor:
    """Converts labels of a ranking to relevances and query numbers, float32 [N, 2]. Raises
    InputError for other labels.
    """
    if raw.ndim != 2:
        raise checks.unusable(
            source,
            "the recipe's task is ranking, but data.group is missing. Name the column with the "
            "query of each row.",
        )
    relevances = raw[:, 0]
    if any(isinstance(relevance, str) for relevance in relevances[:1].tolist()):
        raise checks.unusable(
            source,
            "the labels are text, but a ranking needs numbers for the relevance of each row. "
            "Correct data.label or the task.",
        )
    if (relevances.astype(np.float64) < 0).any():
        raise checks.unusable(
            source,
            "the label has numbers below 0, but a relevance must be 0 or greater. Correct the "
            "column.",
        )
    query_N = np.unique(raw[:, 1], return_inverse=True)[1].reshape(-1)
    if query_N.max(initial=0) > _MAX_QUERIES:
        raise checks.unusable(
            source, f"has more than {_MAX_QUERIES:,} queries. Give fewer queries."
        )
    pairs_N2 = np.stack([relevances, query_N], axis=1).astype(np.float32)
    return torch.from_numpy(pairs_N2).to(get_real_dtype())


def _convert_flags(column: npt.NDArray[Any], name: str, source: str) -> npt.NDArray[np.float32]:
    """Converts a label column to 0 and 1, float32 [N]. Raises InputError for other values."""
    texts_N = np.char.lower(column.astype(str))
    yes_N, no_N = np.isin(texts_N, ("1", "1.0", "true")), np.isin(texts_N, ("0", "0.0", "false"))
    if not (yes_N | no_N).all():
        raise checks.unusable(
            source, f"{name} must hold only 0 and 1, or true and false. Correct the column."
        )
    return yes_N.astype(np.float32)


def _convert_numbers(raw: npt.NDArray[Any], source: str) -> npt.NDArray[np.float64]:
    if raw.dtype.kind not in "biuf":
        raise checks.unusable(
            source,
            "the labels are text, but a regression needs numbers. Correct data.label or the task.",
        )
    return raw.astype(np.float64)


def _find_distinct(raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the distinct values, sorted. Works part by part, because sorting all values at once
    takes several times their memory.
    """
    values = [np.unique(raw[part]) for part in parts(len(raw))]
    release(raw)
    return np.unique(np.concatenate(values)) if values else np.unique(raw)


def _simplify(value: Any) -> str | int | float:
    """Converts a class label to its simplest form: 1.0 becomes 1."""
    if isinstance(value, bool | float) and float(value).is_integer():
        return int(value)
    return value  # type: ignore[no-any-return]

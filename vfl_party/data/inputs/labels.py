"""Converts labels to training targets and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.config.task import TaskSettings, class_text
from vfl_party.base.dtypes import real
from vfl_party.data import checks
from vfl_party.data.row_arrays import parts, release

# Maximum number of queries: float32 represents each number up to it.
_MAX_QUERIES = 1 << 24


@dataclass(frozen=True)
class Labels:
    """The conversion of labels to targets.

    Args:
        kind: the task's kind.
        classes: a classification's labels, sorted (numbers as numbers, text by code points), with
            ``task.positive`` as the second; a class's position is its code. For ``multilabel`` the
            names of the label columns.
        mean: of a regression's training labels; with ``minmax`` their minimum, for counts 0.
        std: of a regression's training labels; with ``minmax`` their range, for counts their mean.
            Targets are (label - mean) / std.
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
        """Learns the classes from all labels, or a regression's scale from the training rows.

        Args:
            raw: [N] numbers or text; [N, labels] for ``multilabel``, whose columns have the
                ``names``; [N, 2] times and events for ``survival``, or relevances and queries for
                ``ranking``.
            task: of the recipe.
            train_rows: int64, positions of the training rows.
            source: the table's name, for errors.
            scale: of a regression's labels.
            names: of several label columns.

        Raises InputError if the labels do not fit the task.
        """
        if raw is None:
            raise checks.unusable(
                source, "has no labels. Set data.label in the active party's data."
            )
        if task.kind in ("survival", "ranking"):
            return cls(task.kind, source)
        if task.kind == "multilabel" or names:
            return cls(task.kind, source, _label_columns(task, names, source))
        if task.kind == "regression":
            values = _numbers(raw, source)[train_rows]
            if len(values) == 0:
                raise checks.unusable(
                    source,
                    "no training rows are left. Give more rows, or make the other splits smaller.",
                )
            lowest, highest = values.min(), values.max()
            if task.counts:
                return cls(task.kind, source, std=_mean_count(raw, values, scale, source))
            if lowest == highest:
                mean, std = lowest, 1.0
            elif scale == "minmax":
                with np.errstate(over="ignore"):
                    mean, std = lowest, highest - lowest
            else:
                # Overflow is refused below.
                with np.errstate(over="ignore", invalid="ignore"):
                    mean, std = values.mean(), values.std()
            if not (np.isfinite(mean) and np.isfinite(std)) or std == 0.0:
                raise checks.unusable(
                    source,
                    "the labels are too large or too small to be scaled. Give them in another "
                    "unit.",
                )
            return cls(task.kind, source, mean=float(mean), std=float(std))
        classes = tuple(_plain(value) for value in _different(raw).tolist())
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
        return cls(task.kind, source, _with_positive(classes, task.positive, source))

    def encode(self, raw: npt.NDArray[Any]) -> torch.Tensor:
        """Returns the targets of labels.

        Binary: float32 [N, 1] of 0 and 1. Multiclass: int64 [N]. Multilabel: float32 [N, labels] of
        0 and 1. Regression: float32 [N, 1], scaled. Survival: float32 [N, 2], the time, and 1 if
        the event happened then. Ranking: float32 [N, 2], the relevance and the number of the query.

        Raises InputError for a label that ``fit`` did not see.
        """
        if self.kind == "regression":
            scaled_N = (_numbers(raw, self.source) - self.mean) / self.std
            return torch.from_numpy(scaled_N.astype(np.float32)).to(real())[:, None]
        if self.kind == "survival":
            return _times(raw, self.source)
        if self.kind == "ranking":
            return _relevances(raw, self.source)
        if self.kind == "multilabel":
            columns = [
                _yes_or_no(column, f"label column {name!r}", self.source)
                for column, name in zip(raw.T, self.classes, strict=True)
            ]
            return torch.from_numpy(np.stack(columns, axis=1)).to(real())
        places = {name: code for code, name in enumerate(self.classes)}
        dtype = real() if self.kind == "binary" else torch.int64
        codes_N = torch.empty(len(raw), dtype=dtype)
        for part in parts(len(raw)):
            values, inverse_B = np.unique(raw[part], return_inverse=True)
            codes = [places.get(_plain(value), -1) for value in values.tolist()]
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
        """Returns the labels, [N], of codes [N] or [N, 1]; for a regression, of scaled
        predictions.
        """
        flat = torch.as_tensor(codes).detach().cpu().reshape(-1)
        if self.kind == "regression":
            unscaled: npt.NDArray[Any] = self.unscale(flat.double()).numpy()
            return unscaled
        text = any(isinstance(name, str) for name in self.classes)
        names: npt.NDArray[Any] = np.array(self.classes, dtype=object if text else None)
        return np.take(names, flat.long().numpy())

    def select_known(self, outputs_NO: torch.Tensor) -> torch.Tensor:
        """Returns the outputs of the classes that occur in the labels, [N, K]; for other tasks all
        outputs.

        A multi-class task may have more classes than its labels: metrics and predictions choose
        among those that occur.
        """
        return outputs_NO[:, : len(self.classes)] if self.kind == "multiclass" else outputs_NO

    def unscale(self, scaled: torch.Tensor) -> torch.Tensor:
        """Returns a regression's predictions in the label's own unit; same shape."""
        return scaled * self.std + self.mean

    def state(self) -> dict[str, Any]:
        """Returns the whole object, for JSON."""
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


def _with_positive(
    classes: tuple[str | int | float, ...], positive: bool | float | str | None, source: str
) -> tuple[str | int | float, ...]:
    """Returns the classes with the positive one second; unchanged if it is None. Raises
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


def _mean_count(
    raw: npt.NDArray[Any], train: npt.NDArray[np.float64], scale: str, source: str
) -> float:
    """Returns the mean of the training rows' counts, by which all are divided: the loss changes
    only by a factor.

    Raises InputError if the labels are not counts.
    """
    if scale != "standard":
        raise checks.unusable(
            source,
            'data.label_scale cannot be used with task.loss = "poisson", which divides counts by '
            "their mean. Remove data.label_scale.",
        )
    if _numbers(raw, source).min() < 0:
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


def _label_columns(
    task: TaskSettings, names: tuple[str, ...], source: str
) -> tuple[str | int | float, ...]:
    """Returns the names of the label columns. Raises InputError if the task has another number."""
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


def _times(raw: npt.NDArray[Any], source: str) -> torch.Tensor:
    """Returns times and whether the event happened, float32 [N, 2]. Raises InputError for other
    labels.
    """
    if raw.ndim != 2:
        raise checks.unusable(
            source,
            "the recipe's task is survival, but data.event is missing. Name the column that says "
            "whether the event happened.",
        )
    times, events = raw[:, 0], _yes_or_no(raw[:, 1], "the column of data.event", source)
    if any(isinstance(time, str) for time in times[:1].tolist()):
        raise checks.unusable(
            source,
            "the labels are text, but a survival task needs times. Correct data.label or the task.",
        )
    if (times.astype(np.float64) < 0).any():
        raise checks.unusable(source, "the label has times below 0. Correct the column.")
    return torch.from_numpy(np.stack([times.astype(np.float32), events], axis=1)).to(real())


def _relevances(raw: npt.NDArray[Any], source: str) -> torch.Tensor:
    """Returns relevances and the numbers of queries, float32 [N, 2]. Raises InputError for other
    labels.
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
            source, f"has more than {_MAX_QUERIES:,} queries. Give a part of them."
        )
    pairs_N2 = np.stack([relevances, query_N], axis=1).astype(np.float32)
    return torch.from_numpy(pairs_N2).to(real())


def _yes_or_no(column: npt.NDArray[Any], name: str, source: str) -> npt.NDArray[np.float32]:
    """Returns a label column as 0 and 1, float32 [N]. Raises InputError if it holds anything
    else.
    """
    texts_N = np.char.lower(column.astype(str))
    yes_N, no_N = np.isin(texts_N, ("1", "1.0", "true")), np.isin(texts_N, ("0", "0.0", "false"))
    if not (yes_N | no_N).all():
        raise checks.unusable(
            source, f"{name} must hold only 0 and 1, or true and false. Correct the column."
        )
    return yes_N.astype(np.float32)


def _numbers(raw: npt.NDArray[Any], source: str) -> npt.NDArray[np.float64]:
    if raw.dtype.kind not in "biuf":
        raise checks.unusable(
            source,
            "the labels are text, but a regression needs numbers. Correct data.label or the task.",
        )
    return raw.astype(np.float64)


def _different(raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the distinct values, sorted. It works part by part: sorting all takes several times
    their memory.
    """
    values = [np.unique(raw[part]) for part in parts(len(raw))]
    release(raw)
    return np.unique(np.concatenate(values)) if values else np.unique(raw)


def _plain(value: Any) -> str | int | float:
    """Returns a class in its plainest form: 1.0 is 1."""
    if isinstance(value, bool | float) and float(value).is_integer():
        return int(value)
    return value  # type: ignore[no-any-return]

"""Settings of the task: the kind of labels, the loss, class weights, the threshold and metrics."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    field_validator,
)

from vfl_common.config.base import KindName, OfPlugIn, Section

Kind = Literal["binary", "multiclass", "multilabel", "regression", "survival", "ranking"]
Positive = Annotated[float, Field(gt=0.0, le=1e6)]
# A number between 0 and 1, exclusive.
Share = Annotated[float, Field(gt=0.0, lt=1.0)]

BINARY, NUMBERS = frozenset({"binary", "multilabel"}), frozenset({"regression"})
CLASSES = BINARY | {"multiclass"}
# The kinds of tasks whose loss compares the rows of a batch, so that it is not a mean of per-row
# losses.
COMPARED = frozenset({"survival", "ranking"})
# {built-in metric that is computed only if ``task.metrics`` names it: the kinds of tasks that have
# it}.
METRICS = {
    "average_precision": BINARY,
    "brier": CLASSES,
    "gini": BINARY,
    "ks": BINARY,
    "log_loss": CLASSES,
    "mae": NUMBERS,
    "mape": NUMBERS,
    "precision": CLASSES,
    "r2": NUMBERS,
    "recall": CLASSES,
}
# {kind of task: metrics that are always computed}. Tasks with classes have ``_CLASS_METRICS``.
_ALWAYS_COMPUTED = {
    "regression": ("loss", "rmse", "rmse_scaled"),
    "survival": ("loss", "c_index"),
    "ranking": ("loss", "ndcg"),
}
_CLASS_METRICS = ("loss", "accuracy", "auc", "f1")
# The metrics for which a lower value is better.
LOWER_IS_BETTER = frozenset({"loss", "rmse", "rmse_scaled", "brier", "log_loss", "mae", "mape"})
# {prefix of a metric with a number k, such as top_3: the kinds of tasks that have it}.
_KINDS_OF_PREFIX = {"top": frozenset({"multiclass"}), "ndcg": frozenset({"ranking"})}
_TOP = re.compile(rf"({'|'.join(_KINDS_OF_PREFIX)})_([1-9][0-9]*)")


def is_our_metric(name: str) -> bool:
    """Returns whether the metric is built in, for any kind of task."""
    always_computed = {
        *_CLASS_METRICS,
        *(metric for names in _ALWAYS_COMPUTED.values() for metric in names),
    }
    return name in always_computed or name in METRICS or _TOP.fullmatch(name) is not None


class FocalSettings(Section):
    """Focal loss: cross-entropy in which rows that the model predicts confidently count less (Lin
    et al. 2017).
    """

    kind: Literal["focal"]
    """Each row's cross-entropy times (1 - p)^gamma, where p is the probability of its class; for
    all tasks with classes.
    """
    gamma: Annotated[float, Field(ge=0.0, le=100.0)] = 2.0
    """The exponent: with a larger one, confident rows count less; 0 is cross-entropy."""


class QuantileSettings(Section):
    """The pinball loss, whose best prediction is a quantile (Koenker and Bassett 1978)."""

    kind: Literal["quantile"]
    """The pinball loss, so that a share ``q`` of the labels is below the prediction; for
    ``regression``.
    """
    q: Share
    """The desired share of labels below the prediction; 0.5 is the median."""


class HuberSettings(Section):
    """The Huber loss: squared for small errors, linear for large ones (Huber 1964)."""

    kind: Literal["huber"]
    """The Huber loss: squared up to an error of ``delta``, linear beyond it; for ``regression``."""
    delta: Positive = 1.0
    """The error up to which the loss is squared, in the scale of the model's output (see
    ``data.label_scale``).
    """


class PlainLossSettings(Section):
    """A loss without settings."""

    kind: Literal["mae", "poisson", "ranknet", "listnet"]
    """``mae``: absolute errors, whose best prediction is the median. ``poisson``: the negative
    log-likelihood of counts, whose logarithm the model predicts. Both are for ``regression``.
    ``ranknet``: a loss on each pair of rows of a query. ``listnet``: a softmax over a query's rows.
    Both are for ``ranking``.
    """


class PluginLossSettings(OfPlugIn):
    """The loss of a plug-in, which checks its own ``settings``: see
    ``vfl_party/models/losses.py``.
    """

    kind: KindName
    """The name of a plug-in's loss; for all tasks but ``survival`` and ``ranking``."""


# The built-in losses. Any other kind is a plug-in's.
LOSSES = ("focal", "quantile", "huber", "mae", "poisson", "ranknet", "listnet")
# {kind of task: its losses in addition to the default loss}.
_LOSSES_OF_TASK = dict.fromkeys(CLASSES, ("focal",)) | {
    "regression": ("huber", "mae", "poisson", "quantile"),
    "ranking": ("listnet", "ranknet"),
}
_WITHOUT_SETTINGS = frozenset({"mae", "poisson", "ranknet", "listnet"})


def _expand_loss(value: Any) -> Any:
    """Turns a loss's name into its table."""
    return {"kind": value} if isinstance(value, str) else value


def _tag_of_loss(value: Any) -> str | None:
    """Returns the tag of a loss's settings class: its kind, ``plain`` or ``plugin``; None if the
    settings have no kind.
    """
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str):
        return None
    return "plain" if kind in _WITHOUT_SETTINGS else kind if kind in LOSSES else "plugin"


LossSettings = Annotated[
    Annotated[FocalSettings, Tag("focal")]
    | Annotated[QuantileSettings, Tag("quantile")]
    | Annotated[HuberSettings, Tag("huber")]
    | Annotated[PlainLossSettings, Tag("plain")]
    | Annotated[PluginLossSettings, Tag("plugin")],
    Discriminator(_tag_of_loss),
    BeforeValidator(_expand_loss),
]


RULES = ("f1", "rate", "cost")
_RULES = ", ".join(RULES)


class ThresholdRule(Section):
    """The rule that chooses the threshold from the scores of the validation rows."""

    rule: Literal["f1", "rate", "cost"]
    """``f1``: the highest F1. ``rate``: a share ``rate`` of the rows is decided positive. ``cost``:
    the lowest cost of wrong decisions.
    """
    rate: Share | None = None
    """The share of the rows that is decided positive; only for ``rate``, which needs it."""
    false_positive: Positive | None = None
    """The cost of a false positive; only for ``cost``, which needs it."""
    false_negative: Positive | None = None
    """The cost of a false negative; only for ``cost``, which needs it."""

    def model_post_init(self, _context: Any) -> None:
        for key, rule in (
            ("rate", "rate"),
            ("false_positive", "cost"),
            ("false_negative", "cost"),
        ):
            is_set = getattr(self, key) is not None
            if is_set != (rule == self.rule):
                raise ValueError(
                    f'{key} is for rule = "{rule}". Remove it.'
                    if is_set
                    else f'rule = "{rule}" needs {key}. Add it.'
                )


def _expand_rule(value: Any) -> Any:
    """Turns a rule's name into its table. Raises ValueError if it is neither a rule nor a share."""
    table = {"rule": value} if isinstance(value, str) else value
    if isinstance(table, dict):
        if "rule" in table and table["rule"] not in RULES:
            raise ValueError(
                f"there is no rule {str(table['rule'])[:40]!r}. Choose one of {_RULES}."
            )
    elif not isinstance(table, ThresholdRule) and (
        isinstance(table, bool) or not isinstance(table, int | float) or not 0.0 < table < 1.0
    ):
        raise ValueError(f"must be a number above 0 and below 1, or one of {_RULES}. Correct it.")
    return table


def _tag_of_threshold(value: Any) -> str:
    return "rule" if isinstance(value, dict | ThresholdRule) else "number"


Threshold = Annotated[
    Annotated[Share, Tag("number")] | Annotated[ThresholdRule, Tag("rule")],
    Discriminator(_tag_of_threshold),
    BeforeValidator(_expand_rule),
]


class TaskSettings(Section):
    """The kind of labels, which decides the loss and the metrics."""

    kind: Kind
    """The kind of labels, which decides the loss and the metrics. ``multilabel``: several binary
    columns, which ``data.labels`` names. ``survival``: the time until an event or until censoring;
    ``data.event`` says which. ``ranking``: the relevance of each row to its query, which
    ``data.group`` names.
    """
    classes: Annotated[int, Field(ge=2)] | None = None
    """The number of classes, or of the labels of ``multilabel``; only ``multiclass`` and
    ``multilabel`` need and accept it.
    """
    metrics: tuple[KindName, ...] = ()
    """Metrics in addition to those that are always computed: ``ks``, ``gini``,
    ``average_precision`` (binary, multilabel); ``brier``, ``log_loss``, ``precision``, ``recall``
    (classes); ``top_K`` such as ``top_3`` (multiclass); ``r2``, ``mae``, ``mape`` (regression);
    ``ndcg_K`` such as ``ndcg_10`` (ranking); or a plug-in's.
    """
    positive: bool | int | float | str | None = None
    """``binary``: the class whose probability a score is, and for which AUC and f1 are computed.
    Default: the second one in sorted order.
    """
    loss: LossSettings | None = None
    """The training loss: the name of a built-in or plug-in loss, or a table with its settings.
    Default: cross-entropy for classes, the squared error for a regression, ``ranknet`` for a
    ranking.
    """
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The share of each label that is spread over all classes in the loss; for tasks with
    classes.
    """
    class_weight: Literal["balanced"] | dict[str, Positive] | None = None
    """The weight of each class in the loss: ``balanced``, so that all classes have the same total
    weight; or a table such as ``{yes = 5.0}``, in which missing classes have weight 1.
    """
    label_epsilon: Annotated[float, Field(ge=0.01, le=50.0)] | None = None
    """``binary``, ``multiclass``: ε of randomised response on each training label. The noise of a
    label is the same in all runs, so ε does not grow with epochs. It is derived from the id, so a
    party file must set ``data.id_rules`` if the recipe has ``rows.id_rules``. Labels of validation
    and test rows get no noise, because metrics need them. Default: no noise.
    """
    threshold: Threshold | None = None
    """``binary``: the probability above which a row is decided positive: a number, or a rule that
    chooses it from the validation rows. Default: 0.5.
    """

    @field_validator("class_weight", mode="before")
    @classmethod
    def _check_class_weight(cls, value: Any) -> Any:
        if value is None or value == "balanced":
            return value
        if isinstance(value, dict):
            numbers = [
                isinstance(weight, int | float)
                and not isinstance(weight, bool)
                and 0.0 < weight <= 1e6
                for weight in value.values()
            ]
            if value and all(numbers):
                return {str(name): float(weight) for name, weight in value.items()}
        raise ValueError(
            'must be "balanced", or a table with a number above 0 for each class, such as '
            "{yes = 5.0}. Correct it."
        )

    def model_post_init(self, _context: Any) -> None:
        if self.positive is not None and self.kind != "binary":
            raise ValueError("positive is for binary tasks. Remove it.")
        if (self.kind in ("multiclass", "multilabel")) != (self.classes is not None):
            raise ValueError(
                "classes must be set for multiclass and multilabel tasks, and only for them (got "
                f"kind = '{self.kind}'). Add or remove it."
            )
        self._check_loss()
        if self.label_epsilon is not None and self.kind not in ("binary", "multiclass"):
            raise ValueError(
                f"label_epsilon is for binary and multiclass tasks (got {self.kind}). Remove it."
            )
        if self.threshold is not None and self.kind != "binary":
            raise ValueError("threshold is for binary tasks. Remove it.")
        names = self.all_metrics
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise ValueError(f"metrics: {duplicate} is computed anyway. Remove it.")
        for name in self.metrics:
            kinds = _kinds_with(name)
            if kinds is not None and self.kind not in kinds:
                raise ValueError(
                    f"metrics: a {self.kind} task has no {name}, which is for "
                    f"{' and '.join(sorted(kinds))}. Remove it."
                )

    def _check_loss(self) -> None:
        """Raises ValueError if the loss, or a setting that changes it, is for other kinds of
        tasks.
        """
        has_classes = self.kind in CLASSES
        if self.loss is not None and self.kind == "survival":
            raise ValueError("loss: a survival task always uses Cox's loss. Remove it.")
        is_plugin = isinstance(self.loss, PluginLossSettings) and self.kind not in COMPARED
        losses = _LOSSES_OF_TASK.get(self.kind, ())
        if self.loss is not None and not is_plugin and self.loss.kind not in losses:
            choices = losses[0] if len(losses) == 1 else f"one of {', '.join(losses)}"
            raise ValueError(
                f"loss: {self.loss.kind} is not for a {self.kind} task. Use {choices}, or remove "
                "it."
            )
        if not has_classes and self.label_smoothing:
            raise ValueError(
                f"label_smoothing is for tasks with classes (got {self.kind}). Remove it."
            )
        if self.class_weight is not None and self.kind not in ("binary", "multiclass"):
            raise ValueError(
                f"class_weight is for binary and multiclass tasks (got {self.kind}). Remove it."
            )
        if self.loss is not None and self.label_smoothing:
            raise ValueError("label_smoothing needs cross-entropy. Remove it, or remove loss.")

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """The metrics that ``evaluate`` computes, except those that are undefined for the rows."""
        return (*_ALWAYS_COMPUTED.get(self.kind, _CLASS_METRICS), *self.metrics)

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """The built-in metrics among ``metrics``."""
        return tuple(name for name in self.metrics if _kinds_with(name) is not None)

    @property
    def plugin_metrics(self) -> tuple[str, ...]:
        """The metrics of plug-ins among ``metrics``."""
        return tuple(name for name in self.metrics if _kinds_with(name) is None)

    @property
    def compares(self) -> bool:
        """Whether the loss compares the rows of a batch, so that it is not a mean of per-row
        losses.
        """
        return self.kind in COMPARED

    @property
    def outputs(self) -> int:
        """The width of the top model's output: the number of logits, or 1."""
        return self.classes or 1

    @property
    def counts(self) -> bool:
        """Whether the labels are counts, whose logarithm the model predicts."""
        return self.loss is not None and self.loss.kind == "poisson"

    @property
    def shaped(self) -> frozenset[str]:
        """The keys of the recipe that change the loss from the default loss of the task's kind."""
        return frozenset(
            key for key in ("loss", "label_smoothing", "class_weight") if getattr(self, key)
        )


def parse_k(metric: str) -> int | None:
    """Returns the k of a metric ``top_k`` or ``ndcg_k``; None for any other metric."""
    match = _TOP.fullmatch(metric)
    return int(match[2]) if match else None


def _kinds_with(metric: str) -> frozenset[str] | None:
    """Returns the kinds of tasks that have a built-in metric; None if the metric is not built
    in.
    """
    match = _TOP.fullmatch(metric)
    return _KINDS_OF_PREFIX[match[1]] if match else METRICS.get(metric)


def class_text(value: object) -> str:
    """Returns the canonical text of a class label: 1, 1.0 and "1" give the same text, as do true
    and "true".
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)

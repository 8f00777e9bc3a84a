"""Settings of the task: the kind of labels, the loss, what rows count, thresholds and metrics."""

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
# Between 0 and 1, and neither of them.
Share = Annotated[float, Field(gt=0.0, lt=1.0)]

BINARY, NUMBERS = frozenset({"binary", "multilabel"}), frozenset({"regression"})
CLASSES = BINARY | {"multiclass"}
# Their loss compares the rows of a batch: it is no mean of the rows' own losses.
COMPARED = frozenset({"survival", "ranking"})
# {metric of ours that is computed if ``task.metrics`` names it: the kinds of tasks that have it}.
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
# Metrics that are always computed; tasks with classes have ``_OF_CLASSES``.
_ALWAYS = {
    "regression": ("loss", "rmse", "rmse_scaled"),
    "survival": ("loss", "c_index"),
    "ranking": ("loss", "ndcg"),
}
_OF_CLASSES = ("loss", "accuracy", "auc", "f1")
# Metrics of which less is better.
LOWER_IS_BETTER = frozenset({"loss", "rmse", "rmse_scaled", "brier", "log_loss", "mae", "mape"})
# {the beginning of a metric's name before its k: the kinds of tasks that have it}.
_OF_FIRST = {"top": frozenset({"multiclass"}), "ndcg": frozenset({"ranking"})}
_TOP = re.compile(rf"({'|'.join(_OF_FIRST)})_([1-9][0-9]*)")


def is_our_metric(name: str) -> bool:
    """Whether a metric of this name is ours, for whatever kind of task."""
    always = {*_OF_CLASSES, *(metric for names in _ALWAYS.values() for metric in names)}
    return name in always or name in METRICS or _TOP.fullmatch(name) is not None


class FocalSettings(Section):
    """Cross-entropy in which rows that the model is sure of count less (Lin et al. 2017)."""

    kind: Literal["focal"]
    """Each row's cross-entropy times (1 - p)^gamma, where p is the probability of its class; for
    all tasks with classes.
    """
    gamma: Annotated[float, Field(ge=0.0, le=100.0)] = 2.0
    """How much less the rows count of which the model is sure; 0 is cross-entropy."""


class QuantileSettings(Section):
    """The pinball loss, whose best prediction is a quantile (Koenker and Bassett 1978)."""

    kind: Literal["quantile"]
    """The pinball loss, so that a share ``q`` of the labels is below the prediction; for
    ``regression``.
    """
    q: Share
    """The share of the labels that is to be below the prediction; 0.5 is the median."""


class HuberSettings(Section):
    """Squared errors if they are small, absolute ones if they are large (Huber 1964)."""

    kind: Literal["huber"]
    """Squared errors up to ``delta``, absolute ones beyond; for ``regression``."""
    delta: Positive = 1.0
    """Where squared errors end, in the scale that the model sees (see ``data.label_scale``)."""


class PlainLossSettings(Section):
    """A loss without settings."""

    kind: Literal["mae", "poisson", "ranknet", "listnet"]
    """``mae``: absolute errors, whose best prediction is the median. ``poisson``: the likelihood of
    counts, whose logarithm the model predicts. Both for ``regression``. ``ranknet``: each pair of
    rows of a query, by which is more relevant. ``listnet``: the softmax over a query's rows. Both
    for ``ranking``.
    """


class PluginLossSettings(OfPlugIn):
    """The loss of a plug-in, which checks its own ``settings``: see
    ``vfl_party/models/metrics/plugin_loss.py``.
    """

    kind: KindName
    """The name of a plug-in's loss; for all tasks but ``survival`` and ``ranking``."""


# Ours; any other kind is a plug-in's.
LOSSES = ("focal", "quantile", "huber", "mae", "poisson", "ranknet", "listnet")
# {kind of task: its losses beside the default one}.
_LOSSES_OF = dict.fromkeys(CLASSES, ("focal",)) | {
    "regression": ("huber", "mae", "poisson", "quantile"),
    "ranking": ("listnet", "ranknet"),
}
_PLAIN = frozenset({"mae", "poisson", "ranknet", "listnet"})


def _expand_loss(value: Any) -> Any:
    """Turns a loss's name into its table."""
    return {"kind": value} if isinstance(value, str) else value


def _whose_loss(value: Any) -> str | None:
    """Returns which settings a loss has: its kind, or ``plugin``; None if it names no kind."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if not isinstance(kind, str):
        return None
    return "plain" if kind in _PLAIN else kind if kind in LOSSES else "plugin"


LossSettings = Annotated[
    Annotated[FocalSettings, Tag("focal")]
    | Annotated[QuantileSettings, Tag("quantile")]
    | Annotated[HuberSettings, Tag("huber")]
    | Annotated[PlainLossSettings, Tag("plain")]
    | Annotated[PluginLossSettings, Tag("plugin")],
    Discriminator(_whose_loss),
    BeforeValidator(_expand_loss),
]


RULES = ("f1", "rate", "cost")
_RULES = ", ".join(RULES)


class ThresholdRule(Section):
    """How the threshold is chosen by the scores of the validation rows."""

    rule: Literal["f1", "rate", "cost"]
    """``f1``: the highest F1. ``rate``: a share ``rate`` of the rows is decided positive. ``cost``:
    the least cost of wrong decisions.
    """
    rate: Share | None = None
    """The share of the rows that is decided positive; only for ``rate``, which needs it."""
    false_positive: Positive | None = None
    """The cost of a row that is decided positive and is not; only for ``cost``, which needs it."""
    false_negative: Positive | None = None
    """The cost of a positive row that is not decided so; only for ``cost``, which needs it."""

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


def _as_rule(value: Any) -> Any:
    """Turns a rule's name into its table. Raises ValueError if it is neither a rule nor a share."""
    table = {"rule": value} if isinstance(value, str) else value
    if isinstance(table, dict):
        if "rule" in table and table["rule"] not in RULES:
            raise ValueError(f"there is no rule {str(table['rule'])[:40]!r}. Take one of {_RULES}.")
    elif not isinstance(table, ThresholdRule) and (
        isinstance(table, bool) or not isinstance(table, int | float) or not 0.0 < table < 1.0
    ):
        raise ValueError(f"must be a number above 0 and below 1, or one of the rules {_RULES}")
    return table


def _number_or_rule(value: Any) -> str:
    return "rule" if isinstance(value, dict | ThresholdRule) else "number"


Threshold = Annotated[
    Annotated[Share, Tag("number")] | Annotated[ThresholdRule, Tag("rule")],
    Discriminator(_number_or_rule),
    BeforeValidator(_as_rule),
]


class TaskSettings(Section):
    """The kind of labels, and with it the loss and the metrics."""

    kind: Kind
    """The kind of labels, and with it loss and metrics. ``multilabel``: several columns of yes and
    no, which ``data.labels`` names. ``survival``: the time until something happens or a row is lost
    from sight, which ``data.event`` tells apart. ``ranking``: how relevant each row is to its
    query, which ``data.group`` tells apart.
    """
    classes: Annotated[int, Field(ge=2)] | None = None
    """The number of classes, or of the labels of ``multilabel``; these two need it, the others
    refuse it.
    """
    metrics: tuple[KindName, ...] = ()
    """Metrics beside those that are always computed: ``ks``, ``gini``, ``average_precision``
    (binary, multilabel); ``brier``, ``log_loss``, ``precision``, ``recall`` (classes); ``top_3``
    and the like (multiclass); ``r2``, ``mae``, ``mape`` (regression); ``ndcg_10`` and the like
    (ranking); or a plug-in's.
    """
    positive: bool | int | float | str | None = None
    """``binary``: the class whose probability a score is, and for which AUC and f1 are computed.
    Default: the second one in sorted order.
    """
    loss: LossSettings | None = None
    """The loss of training: a name, ours or a plug-in's, or a table with its settings. Default:
    cross-entropy for classes, the squared error for a regression, ``ranknet`` for a ranking.
    """
    label_smoothing: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """The share of each label that is spread over all classes in the loss; for tasks with
    classes.
    """
    class_weight: Literal["balanced"] | dict[str, Positive] | None = None
    """How much a row of each class counts in the loss: ``balanced``, so that all classes count the
    same in total; or a table, such as ``{yes = 5.0}``, in which a class that is not named counts 1.
    """
    label_epsilon: Annotated[float, Field(ge=0.01, le=50.0)] | None = None
    """``binary``, ``multiclass``: ε of randomised response on each training label. The noise of a
    label is drawn once and kept over all runs, so ε does not grow with epochs. It follows from the
    id, so a party file must have its own ``data.id_rules`` if the recipe has some. Labels of
    validation and test rows, which metrics need, stay as they are. Default: no noise.
    """
    threshold: Threshold | None = None
    """``binary``: the probability above which a row is decided positive: a number, or a rule that
    chooses it by the validation rows. Default: 0.5.
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
            "{yes = 5.0}"
        )

    def model_post_init(self, _context: Any) -> None:
        if self.positive is not None and self.kind != "binary":
            raise ValueError("positive is for binary tasks. Remove it.")
        if (self.kind in ("multiclass", "multilabel")) != (self.classes is not None):
            raise ValueError(
                "give 'classes' for multiclass and multilabel tasks, and only for them"
            )
        self._check_loss()
        if self.label_epsilon is not None and self.kind not in ("binary", "multiclass"):
            raise ValueError(
                f"label_epsilon is for binary and multiclass tasks (got {self.kind}). Remove it."
            )
        if self.threshold is not None and self.kind != "binary":
            raise ValueError("threshold is for binary tasks. Remove it.")
        names = self.all_metrics
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"metrics: {twice} is computed already. Remove it.")
        for name in self.metrics:
            kinds = _kinds_with(name)
            if kinds is not None and self.kind not in kinds:
                raise ValueError(
                    f"metrics: a {self.kind} task has no {name}, which is for "
                    f"{' and '.join(sorted(kinds))}. Remove it."
                )

    def _check_loss(self) -> None:
        """Raises ValueError if the loss, or what changes it, is for other kinds of tasks."""
        classes = self.kind in CLASSES
        if self.loss is not None and self.kind == "survival":
            raise ValueError("loss: a survival task has its own, Cox's. Remove it.")
        plugin = isinstance(self.loss, PluginLossSettings) and self.kind not in COMPARED
        known = _LOSSES_OF.get(self.kind, ())
        if self.loss is not None and not plugin and self.loss.kind not in known:
            one = known[0] if len(known) == 1 else f"one of {', '.join(known)}"
            raise ValueError(
                f"loss: {self.loss.kind} is not for a {self.kind} task. Take {one}, or remove it."
            )
        if not classes and self.label_smoothing:
            raise ValueError(f"label_smoothing is for classes, and a {self.kind} has none")
        if self.class_weight is not None and self.kind not in ("binary", "multiclass"):
            raise ValueError(f"class_weight is for binary and multiclass tasks, not {self.kind}")
        if self.loss is not None and self.label_smoothing:
            raise ValueError("label_smoothing is for cross-entropy. Remove it, or loss.")

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """The metrics of ``evaluate``; it leaves out those that are undefined for the rows."""
        return (*_ALWAYS.get(self.kind, _OF_CLASSES), *self.metrics)

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Those of ``metrics`` that are ours."""
        return tuple(name for name in self.metrics if _kinds_with(name) is not None)

    @property
    def plugin_metrics(self) -> tuple[str, ...]:
        """Those of ``metrics`` that are plug-ins'."""
        return tuple(name for name in self.metrics if _kinds_with(name) is None)

    @property
    def compares(self) -> bool:
        """Whether the loss compares the rows of a batch, and is no mean of the rows' own losses."""
        return self.kind in COMPARED

    @property
    def outputs(self) -> int:
        """The width of the top model's output: logits, or one value."""
        return self.classes or 1

    @property
    def counts(self) -> bool:
        """Whether the labels are counts, whose logarithm the model predicts."""
        return self.loss is not None and self.loss.kind == "poisson"

    @property
    def shaped(self) -> frozenset[str]:
        """The keys by which the recipe changes what is minimised, beyond the kind's own loss."""
        return frozenset(
            key for key in ("loss", "label_smoothing", "class_weight") if getattr(self, key)
        )


def top_of(metric: str) -> int | None:
    """Returns k of a metric ``top_k`` or ``ndcg_k``; None of another."""
    match = _TOP.fullmatch(metric)
    return int(match[2]) if match else None


def _kinds_with(metric: str) -> frozenset[str] | None:
    """Returns the kinds of tasks that have a metric of ours; None of another's."""
    match = _TOP.fullmatch(metric)
    return _OF_FIRST[match[1]] if match else METRICS.get(metric)


def class_text(value: object) -> str:
    """Returns a class as text, in which 1, 1.0 and "1" are one, and so are true and "true"."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)

"""Reads the measured quality of a model for sets of parties from the summary of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from vfl_common.config.recipe import Recipe
from vfl_common.registry import ModelRegistry
from vfl_common.summary import Summary, load_summary, parse_holders
from vfl_party.models.metrics import first_metric, lower_is_better


@dataclass(frozen=True)
class Quality:
    """The values of a metric of the model for sets of participating parties.

    Args:
        metric: The name of the metric, or '' if nothing was measured.
        less: Whether a lower value is better.
        values: {participating parties: value on the rows that all parties have}.
        student: The value for the run's student, or None.
        held: {parties: value on the rows that exactly these parties have}, with ``rows.partial``.
    """

    metric: str = ""
    less: bool = False
    values: Mapping[frozenset[str], float] = field(default_factory=dict)
    student: float | None = None
    held: Mapping[frozenset[str], float] = field(default_factory=dict)

    @property
    def by_party(self) -> bool:
        """Whether the metric was measured for more than one set of parties."""
        return len(self.values) + len(self.held) > 1

    def of(self, parties: Iterable[str]) -> float | None:
        """Returns the metric's value when exactly these parties take part, or None."""
        names = frozenset(parties)
        return self.values.get(names, self.held.get(names))

    def of_holders(self, parties: Iterable[str]) -> float | None:
        """Returns the metric's value on the rows that exactly these parties have.

        If there are no such rows, this is the value when these parties take part, or None.
        """
        names = frozenset(parties)
        return self.held.get(names, self.values.get(names))

    def enough(self, value: float, bound: float) -> bool:
        """Returns whether a value is at least as good as ``bound``."""
        return value <= bound if self.less else value >= bound


def read_quality(run: Path, recipe: Recipe) -> Quality:
    """Reads the quality of a model from the summary in a run's folder.

    Without ``evaluate.subsets`` and ``rows.partial`` it was measured only for all parties together.
    Raises InputError if the summary is damaged.
    """
    path, task = run / "summary.json", recipe.task
    summary = load_summary(path) if path.exists() else None
    if summary is None:
        return Quality()
    worth = summary.worth
    held = _read_by_holders(summary, first_metric(task) if worth is None else worth.metric)
    if worth is None:
        metric, names = (
            first_metric(task),
            [party.name for party in recipe.parties if party.features],
        )
        joint_value = None if held or recipe.own_rows else _read_metric(summary, metric)
        values = {} if joint_value is None else {frozenset(names): joint_value}
        if not values and not held:
            return Quality()
        return Quality(metric, lower_is_better(task, metric), values, held=held)
    # A value on the test rows takes precedence over one on the validation rows.
    measured = {
        frozenset(subset.parties): subset.test if subset.test is not None else subset.validation
        for subset in worth.subsets
    }
    values_by_parties = {names: value for names, value in measured.items() if value is not None}
    student = _read_metric(summary, worth.metric, " student")
    return Quality(
        worth.metric, lower_is_better(task, worth.metric), values_by_parties, student, held
    )


def _read_by_holders(summary: Summary, metric: str) -> dict[frozenset[str], float]:
    """Returns {parties: the metric's value on the rows that exactly these parties have}.

    A value on the test rows replaces the value on the validation rows.
    """
    values: dict[frozenset[str], float] = {}
    for split in ("validation", "test"):
        for name, metrics in summary.metrics.items():
            holders = parse_holders(split, name)
            if holders and metric in metrics and metrics[metric] == metrics[metric]:
                values[frozenset(holders)] = metrics[metric]
    return values


def _read_metric(summary: Summary, metric: str, suffix: str = "") -> float | None:
    """Returns a metric's value on the test rows, or else on the validation rows, or None.

    ``suffix``: The end of a key in the summary's metrics, after the name of the split.
    """
    splits = [f"{split}{suffix}" for split in ("test", "validation")]
    metrics = next((summary.metrics[name] for name in splits if name in summary.metrics), {})
    value = metrics.get(metric)
    return value if value == value else None


def better_alone(value: float | None, quality: Quality, recipe: Recipe, out: Path) -> str:
    """Returns advice if a run of the active party alone is better than the joint model without
    others.

    Returns '' if there is no such run.

    Args:
        value: The metric's value for the joint model when no other party takes part, or None.
        quality: The quality of the joint model, which names the metric.
        recipe: The recipe of the joint model.
        out: The folder of runs.
    """
    active = recipe.active.name
    if value is None:
        return ""
    better: list[tuple[float, str]] = []
    for run in ModelRegistry(out, active).list_trained():
        if not run.alone or run.recipe != recipe.name:
            continue
        try:
            own_value = _read_metric(
                load_summary(out / run.run_id / "summary.json"), quality.metric
            )
        except (OSError, ValidationError):
            continue
        if own_value is not None and own_value != value and quality.enough(own_value, value):
            better.append((-own_value if quality.less else own_value, run.run_id))
    if not better:
        return ""
    best, run_id = max(better)
    return (
        f"without the other parties this model reaches {quality.metric} {value:.4f}, and {active} "
        f"alone {abs(best):.4f} on its own test rows (run {run_id}); score with that run, or train "
        "a student (phase student)"
    )

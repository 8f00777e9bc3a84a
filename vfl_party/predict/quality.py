"""What was measured of a model with some of its parties: ``worth`` in the run's summary, and the
metrics of the rows that some parties hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from vfl_common.config.recipe import Recipe
from vfl_common.production.registry import ModelRegistry
from vfl_common.summary import Summary, load_summary, parse_holders
from vfl_party.models.metrics import first_metric, lower_is_better


@dataclass(frozen=True)
class Quality:
    """A metric of the model, by the set of parties that take part.

    ``metric``: its name; '' if nothing was measured. ``less``: whether less is better. ``values``:
    of rows that all hold, with these parties. ``student``: that of the run's student, if it was
    measured. ``held``: of the rows that exactly these parties hold (``rows.partial``).
    """

    metric: str = ""
    less: bool = False
    values: Mapping[frozenset[str], float] = field(default_factory=dict)
    student: float | None = None
    held: Mapping[frozenset[str], float] = field(default_factory=dict)

    @property
    def by_party(self) -> bool:
        """Whether more was measured than the model with all parties."""
        return len(self.values) + len(self.held) > 1

    def of(self, parties: Iterable[str]) -> float | None:
        """Returns what was measured with exactly these parties."""
        names = frozenset(parties)
        return self.values.get(names, self.held.get(names))

    def of_holders(self, parties: Iterable[str]) -> float | None:
        """Returns what was measured of the rows that exactly these parties hold; without such rows,
        with these parties.
        """
        names = frozenset(parties)
        return self.held.get(names, self.values.get(names))

    def enough(self, value: float, bound: float) -> bool:
        """Whether a value is at least as good as ``bound``."""
        return value <= bound if self.less else value >= bound


def read_quality(run: Path, recipe: Recipe) -> Quality:
    """Reads the qualities from the summary of a run's folder; that of all parties alone, if it was
    trained without ``evaluate.subsets`` and ``rows.partial``. Raises InputError if it is damaged.
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
        whole = None if held or recipe.own_rows else _read_metric(summary, metric)
        values = {} if whole is None else {frozenset(names): whole}
        if not values and not held:
            return Quality()
        return Quality(metric, lower_is_better(task, metric), values, held=held)
    # Test rows count before validation rows.
    measured = {
        frozenset(subset.parties): subset.test if subset.test is not None else subset.validation
        for subset in worth.subsets
    }
    known = {names: value for names, value in measured.items() if value is not None}
    student = _read_metric(summary, worth.metric, " student")
    return Quality(worth.metric, lower_is_better(task, worth.metric), known, student, held)


def _read_by_holders(summary: Summary, metric: str) -> dict[frozenset[str], float]:
    """Returns {holders: the metric of the rows that exactly they hold}, of the test rows, if there
    are any.
    """
    values: dict[frozenset[str], float] = {}
    for split in ("validation", "test"):
        for name, of in summary.metrics.items():
            holders = parse_holders(split, name)
            if holders and metric in of and of[metric] == of[metric]:
                values[frozenset(holders)] = of[metric]
    return values


def _read_metric(summary: Summary, metric: str, of: str = "") -> float | None:
    """Returns a metric of the test rows, else of the validation rows; None if there is neither.
    ``of``: what follows the split's name.
    """
    splits = [f"{split}{of}" for split in ("test", "validation")]
    metrics = next((summary.metrics[name] for name in splits if name in summary.metrics), {})
    value = metrics.get(metric)
    return value if value == value else None


def better_alone(value: float | None, quality: Quality, recipe: Recipe, out: Path) -> str:
    """Returns a sentence if a run of the active party alone, such as a baseline, reaches more than
    the joint model does when no other party takes part; '' if not, or if nobody has measured it.

    Args:
        value: what was measured of the joint model then.
        quality: has the metric.
        out: the folder of runs.
    """
    active = recipe.active.name
    if value is None:
        return ""
    better: list[tuple[float, str]] = []
    for run in ModelRegistry(out, active).list_trained():
        if not run.alone or run.recipe != recipe.name:
            continue
        try:
            own = _read_metric(load_summary(out / run.run_id / "summary.json"), quality.metric)
        except (OSError, ValidationError):
            continue
        if own is not None and own != value and quality.enough(own, value):
            better.append((-own if quality.less else own, run.run_id))
    if not better:
        return ""
    best, run_id = max(better)
    return (
        f"without the other parties this model reaches {quality.metric} {value:.4f}, and {active} "
        f"alone {abs(best):.4f} on its own test rows (run {run_id}); score with that run, or train "
        "a student (phase student)"
    )

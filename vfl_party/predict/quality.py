"""What was measured of a model with some of its parties: ``worth`` in the run's summary, and the
metrics of the rows that some parties hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vfl_common.config.task import TaskSettings
from vfl_common.summary import Summary, holders_in, load_summary
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

    def enough(self, value: float, least: float) -> bool:
        """Whether a value is at least as good as ``least``."""
        return value <= least if self.less else value >= least


def read_quality(run: Path, task: TaskSettings) -> Quality:
    """Reads the qualities from the summary of a run's folder; none, if it was trained without
    ``evaluate.subsets`` and ``rows.partial``. Raises InputError if it is damaged.
    """
    path = run / "summary.json"
    summary = load_summary(path) if path.exists() else None
    if summary is None:
        return Quality()
    worth = summary.worth
    held = _held(summary, first_metric(task) if worth is None else worth.metric)
    if worth is None:
        metric = first_metric(task) if held else ""
        return Quality(metric, bool(held) and lower_is_better(task, metric), held=held)
    # Of the test rows, if there are any.
    found = {
        frozenset(each.parties): each.test if each.test is not None else each.validation
        for each in worth.subsets
    }
    known = {names: value for names, value in found.items() if value is not None}
    student = next(
        (
            summary.metrics[f"{split} student"].get(worth.metric)
            for split in ("test", "validation")
            if f"{split} student" in summary.metrics
        ),
        None,
    )
    return Quality(worth.metric, lower_is_better(task, worth.metric), known, student, held)


def _held(summary: Summary, metric: str) -> dict[frozenset[str], float]:
    """Returns {holders: the metric of the rows that exactly they hold}, of the test rows, if there
    are any.
    """
    found: dict[frozenset[str], float] = {}
    for split in ("validation", "test"):
        for name, of in summary.metrics.items():
            holders = holders_in(split, name)
            if holders and metric in of and of[metric] == of[metric]:
                found[frozenset(holders)] = of[metric]
    return found

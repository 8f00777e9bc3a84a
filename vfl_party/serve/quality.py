"""What was measured of a model with some of its parties: ``worth`` in the run's summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vfl_common.config.task import TaskSettings
from vfl_common.summary import load_summary
from vfl_party.models.metrics import lower_is_better


@dataclass(frozen=True)
class Quality:
    """A metric of the model, by the set of parties that take part.

    ``metric``: its name; '' if nothing was measured. ``less``: whether less is better. ``student``:
    that of the run's student, if it was measured.
    """

    metric: str = ""
    less: bool = False
    values: Mapping[frozenset[str], float] = field(default_factory=dict)
    student: float | None = None

    def of(self, parties: Iterable[str]) -> float | None:
        """Returns what was measured with exactly these parties."""
        return self.values.get(frozenset(parties))

    def enough(self, value: float, least: float) -> bool:
        """Whether a value is at least as good as ``least``."""
        return value <= least if self.less else value >= least


def read_quality(run: Path, task: TaskSettings) -> Quality:
    """Reads the qualities from the summary of a run's folder; none, if it was trained without
    ``evaluate.subsets``. Raises InputError if it is damaged.
    """
    path = run / "summary.json"
    summary = load_summary(path) if path.exists() else None
    worth = summary.worth if summary is not None else None
    if summary is None or worth is None:
        return Quality()
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
    return Quality(worth.metric, lower_is_better(task, worth.metric), known, student)

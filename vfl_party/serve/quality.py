"""What was measured of a model with some of its parties: ``worth`` in the run's summary."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl_common.config.task import TaskSettings
from vfl_common.text import clean
from vfl_party.models.metrics import lower_is_better

# The first of a model's test rows, else of its validation rows.
_SPLITS = ("test", "validation")


@dataclass(frozen=True)
class Quality:
    """A metric of the model, by the set of parties that take part.

    ``metric``: its name; '' if nothing was measured. ``less``: whether less is better.
    """

    metric: str = ""
    less: bool = False
    values: Mapping[frozenset[str], float] = field(default_factory=dict)

    def of(self, parties: Iterable[str]) -> float | None:
        """Returns what was measured with exactly these parties."""
        return self.values.get(frozenset(parties))

    def enough(self, value: float, least: float) -> bool:
        """Whether a value is at least as good as ``least``."""
        return value <= least if self.less else value >= least


def read_quality(run: Path, task: TaskSettings) -> Quality:
    """Reads the qualities from the summary of a run's folder; none, if it was trained without
    ``evaluate.subsets``.
    """
    try:
        worth = json.loads((run / "summary.json").read_text()).get("worth") or {}
        metric = clean(str(worth["metric"]), 64)
        values = {frozenset(each["parties"]): _value(each) for each in worth["subsets"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Quality()
    known = {key: value for key, value in values.items() if value is not None}
    return Quality(metric, lower_is_better(task, metric), known)


def _value(subset: Mapping[str, Any]) -> float | None:
    found = next((subset[split] for split in _SPLITS if subset.get(split) is not None), None)
    return float(found) if found is not None and math.isfinite(float(found)) else None

"""Keeps the learning curves of a page with a limited number of points, and sends their changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vfl.report.rounds import RoundLine
from vfl_common.text import clean

# The maximum number of points of a curve. If it is exceeded, every second point is removed.
MAX_POINTS = 1_000
# The maximum number of curves on a page. A run has a few curves for each party and phase.
MAX_CURVES = 500
# The maximum length of a name, in characters.
MAX_NAME = 80


class CurveKey(NamedTuple):
    """The party, phase, split and metric that identify a curve."""

    party: str
    phase: str
    split: str
    metric: str


class Point(NamedTuple):
    """A point of a curve.

    ``version`` is the number of the reading in which the point was new.
    """

    version: int
    round: int
    value: float


@dataclass
class Curve:
    """The values of one metric by round.

    ``whole_since``: The number of a reading. A page that is older needs all points again.
    """

    whole_since: int
    points: list[Point] = field(default_factory=list)
    last: Point | None = None
    # The number of rounds from one point to the next.
    _stride: int = 1

    def add(self, version: int, round_: int, value: float) -> None:
        """Adds the value of a round. A repeated round replaces this round and all later rounds."""
        if self.last is not None and round_ <= self.last.round:
            self.points = [point for point in self.points if point.round < round_]
            self.whole_since = version
        self.last = Point(version, round_, value)
        if round_ % self._stride == 0 or not self.points:
            self.points.append(self.last)
        if len(self.points) > MAX_POINTS:
            self._stride *= 2
            first_point = self.points[0]
            later_points = [p for p in self.points[1:] if p.round % self._stride == 0]
            self.points, self.whole_since = [first_point, *later_points], version

    def get_changes(self, version: int) -> dict[str, Any] | None:
        """Returns the changes since ``version`` for a page; None if there are no changes."""
        if self.last is None or self.last.version <= version:
            return None
        whole = self.whole_since > version
        points = self.points if whole else _select_new_points(self.points, version)
        return {
            "whole": whole,
            "points": [[point.round, point.value] for point in points],
            "last": [self.last.round, self.last.value],
        }


def _select_new_points(points: list[Point], version: int) -> list[Point]:
    """Returns the points at the end of the list that are newer than ``version``."""
    start = len(points)
    while start and points[start - 1].version > version:
        start -= 1
    return points[start:]


@dataclass
class Curves:
    """All curves of a run."""

    by_key: dict[CurveKey, Curve] = field(default_factory=dict)

    def add_line(self, version: int, party: str, line: RoundLine) -> None:
        """Adds the metrics of a round, from a line of a party's ``metrics.jsonl``."""
        for split, named in line.metrics.items():
            for metric, value in named.items():
                texts = (clean(text, MAX_NAME) for text in (line.phase, split, metric))
                key = CurveKey(party, *texts)
                if key not in self.by_key:
                    if len(self.by_key) >= MAX_CURVES:
                        continue
                    self.by_key[key] = Curve(version)
                self.by_key[key].add(version, line.round, value)

    def remove_party(self, party: str) -> None:
        """Removes all curves of a party."""
        self.by_key = {key: curve for key, curve in self.by_key.items() if key.party != party}

    def get_changes(self, version: int) -> list[dict[str, Any]]:
        """Returns the changes of all curves since ``version``, for a page."""
        changes = ((key, curve.get_changes(version)) for key, curve in self.by_key.items())
        return [key._asdict() | change for key, change in changes if change is not None]

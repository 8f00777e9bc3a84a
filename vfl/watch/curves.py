"""The learning curves of a page, of bounded size, sent in increments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vfl.report.rounds import RoundLine
from vfl_common.text import clean

# The maximum number of points of a curve; of a longer one, every second point is kept.
MAX_POINTS = 1_000
# The maximum number of curves of a page; a run has a few for each party and phase.
MAX_CURVES = 500
# The maximum length of a name, in characters.
MAX_NAME = 80


class CurveKey(NamedTuple):
    """The key of a curve."""

    party: str
    phase: str
    split: str
    metric: str


class Point(NamedTuple):
    """A point of a curve. ``version``: the reading that brought it."""

    version: int
    round: int
    value: float


@dataclass
class Curve:
    """The values of one metric by round. ``whole_since``: pages with a state before this reading
    need all points.
    """

    whole_since: int
    points: list[Point] = field(default_factory=list)
    last: Point | None = None
    # The interval between rounds that have a point.
    _stride: int = 1

    def add(self, version: int, round_: int, value: float) -> None:
        """Adds a round. One that is not after the last replaces it and all later ones."""
        if self.last is not None and round_ <= self.last.round:
            self.points = [point for point in self.points if point.round < round_]
            self.whole_since = version
        self.last = Point(version, round_, value)
        if round_ % self._stride == 0 or not self.points:
            self.points.append(self.last)
        if len(self.points) > MAX_POINTS:
            self._stride *= 2
            first = self.points[0]
            rest = [point for point in self.points[1:] if point.round % self._stride == 0]
            self.points, self.whole_since = [first, *rest], version

    def since(self, version: int) -> dict[str, Any] | None:
        """Returns the news for a page with version ``version`` of the curve; None if nothing."""
        if self.last is None or self.last.version <= version:
            return None
        whole = self.whole_since > version
        points = self.points if whole else _after(self.points, version)
        return {
            "whole": whole,
            "points": [[point.round, point.value] for point in points],
            "last": [self.last.round, self.last.value],
        }


def _after(points: list[Point], version: int) -> list[Point]:
    """Returns the points that are newer than ``version``: the last ones."""
    place = len(points)
    while place and points[place - 1].version > version:
        place -= 1
    return points[place:]


@dataclass
class Curves:
    """All curves of a run."""

    by_key: dict[CurveKey, Curve] = field(default_factory=dict)

    def take(self, version: int, party: str, line: RoundLine) -> None:
        """Adds a line of a party's ``metrics.jsonl``."""
        for split, named in line.metrics.items():
            for metric, value in named.items():
                texts = (clean(text, MAX_NAME) for text in (line.phase, split, metric))
                key = CurveKey(party, *texts)
                if key not in self.by_key:
                    if len(self.by_key) >= MAX_CURVES:
                        continue
                    self.by_key[key] = Curve(version)
                self.by_key[key].add(version, line.round, value)

    def forget(self, party: str) -> None:
        """Removes a party's curves, when its files were replaced."""
        self.by_key = {key: curve for key, curve in self.by_key.items() if key.party != party}

    def since(self, version: int) -> list[dict[str, Any]]:
        """Returns the news for a page with version ``version`` of the curves."""
        parts = ((key, curve.since(version)) for key, curve in self.by_key.items())
        return [key._asdict() | part for key, part in parts if part is not None]

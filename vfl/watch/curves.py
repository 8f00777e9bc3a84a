"""The learning curves of a page: bounded, however long the run is, and told in parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vfl.report.rounds import RoundLine
from vfl_common.text import clean

# Points of a curve; a longer one keeps every second.
MOST_POINTS = 1_000
# Curves of a page; a run has a few for each party and phase.
MOST_CURVES = 500
# Characters of a name.
MOST_NAME = 80


class Of(NamedTuple):
    """Which curve it is."""

    party: str
    phase: str
    split: str
    metric: str


class Point(NamedTuple):
    """``version``: the reading that brought it."""

    version: int
    round: int
    value: float


@dataclass
class Curve:
    """The values of one metric by round. ``whole_since``: the reading since which a page that has
    an older state needs all points.
    """

    whole_since: int
    points: list[Point] = field(default_factory=list)
    last: Point | None = None
    # Only every so many rounds have a point.
    _stride: int = 1

    def add(self, version: int, round_: int, value: float) -> None:
        """Takes a round; one that is not after the last takes the place of it and all later
        ones.
        """
        if self.last is not None and round_ <= self.last.round:
            self.points = [each for each in self.points if each.round < round_]
            self.whole_since = version
        self.last = Point(version, round_, value)
        if round_ % self._stride == 0 or not self.points:
            self.points.append(self.last)
        if len(self.points) > MOST_POINTS:
            self._stride *= 2
            first = self.points[0]
            kept = [each for each in self.points[1:] if each.round % self._stride == 0]
            self.points, self.whole_since = [first, *kept], version

    def since(self, version: int) -> dict[str, Any] | None:
        """Returns what a page that knows the curve as of ``version`` lacks; None if nothing."""
        if self.last is None or self.last.version <= version:
            return None
        whole = self.whole_since > version
        points = self.points if whole else _after(self.points, version)
        return {
            "whole": whole,
            "points": [[each.round, each.value] for each in points],
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

    found: dict[Of, Curve] = field(default_factory=dict)

    def take(self, version: int, party: str, line: RoundLine) -> None:
        """Takes a line of a party's ``metrics.jsonl``."""
        for split, named in line.metrics.items():
            for metric, value in named.items():
                texts = (clean(each, MOST_NAME) for each in (line.phase, split, metric))
                of = Of(party, *texts)
                if of not in self.found:
                    if len(self.found) >= MOST_CURVES:
                        continue
                    self.found[of] = Curve(version)
                self.found[of].add(version, line.round, value)

    def forget(self, party: str) -> None:
        """Drops a party's curves: its files are others now."""
        self.found = {of: curve for of, curve in self.found.items() if of.party != party}

    def since(self, version: int) -> list[dict[str, Any]]:
        """Returns what a page that knows the curves as of ``version`` lacks."""
        parts = ((of, curve.since(version)) for of, curve in self.found.items())
        return [of._asdict() | part for of, part in parts if part is not None]

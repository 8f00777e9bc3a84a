"""What the tables of TAResSFL share: MocoSFL-1 and -3 by one setting of the resistance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.mocosfl.attack import NOTES, SMALL, resisted
from benchmarks.papers.mocosfl.common import CIFAR10
from benchmarks.papers.rules import Claim

# The first one at the scale small, too.
_CUTS = (1, 3)
# Shares of target images in the source.
SHARES: dict[str, dict[str, Any]] = {
    "0.0%": {"target": 0.0},
    "0.5%": {"target": 0.005},
    "1.0%": {"target": 0.01},
}
ATTACKED = {"accuracy, %": "accuracy", "attack MSE": "mse"}


def table(
    place: str,
    title: str,
    source: str,
    columns: Mapping[str, Mapping[str, Any]],
    *,
    small: tuple[str, ...],
    metrics: Mapping[str, str],
    figures: dict[str, tuple[float, ...]],
    claims: tuple[Claim, ...],
) -> Table:
    """Returns a table with a line for each cut and metric.

    Args:
        place, title, source: as in ``Table``.
        columns: {name: what ``resisted`` gets}.
        small: the columns of the scale ``small``.
        metrics: {name in the table: name in ``resisted``}.
        figures: the paper's numbers, {line: a number a column}.
        claims: as in ``Table``.
    """

    def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
        for name, more in columns.items():
            if work.scale == "small" and name not in small:
                continue
            for cut in _CUTS if work.scale == "paper" else _CUTS[:1]:
                runs = [resisted(work, seed, cut=cut, **more) for seed in work.seeds]
                for metric, key in metrics.items():
                    cell = (CIFAR10.name, f"MocoSFL-{cut}, {metric}", name)
                    yield cell, [each[key] for each in runs]

    return Table(
        place=place,
        title=title,
        data=(CIFAR10 if small else replace(CIFAR10, at=("paper",)),),
        lines=tuple(
            Line(
                f"MocoSFL-{cut}, {metric}", at=("paper", "small") if cut == _CUTS[0] else ("paper",)
            )
            for cut in _CUTS
            for metric in metrics
        ),
        columns=tuple(
            Column(name, at=("paper", "small") if name in small else ("paper",), lower=False)
            for name in columns
        ),
        figures={CIFAR10.name: {line: tuple(values) for line, values in figures.items()}},
        source=source,
        claims=claims,
        seeds=(1, 2, 3),
        small=SMALL,
        notes=NOTES,
        digits=3,
        compute=compute,
    )

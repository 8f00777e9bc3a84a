"""MocoSFL, Table 11."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.mocosfl.attack import NOTES, SMALL, resisted
from benchmarks.papers.mocosfl.common import CIFAR10
from benchmarks.papers.rules import Claim, pair

_CUTS = (1, 3)
_COLUMNS = {"λ = 1": 1.0, "λ = 2": 2.0, "λ = 4": 4.0}
_SMALL = ("λ = 1", "λ = 2")
_METRICS = {"accuracy, %": "accuracy", "attack MSE": "mse"}


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for name, value in _COLUMNS.items():
        if work.scale == "small" and name not in _SMALL:
            continue
        for cut in _CUTS:
            runs = [resisted(work, seed, cut=cut, weight=value) for seed in work.seeds]
            for metric, key in _METRICS.items():
                place = (CIFAR10.name, f"MocoSFL-{cut}, {metric}", name)
                yield place, [each[key] for each in runs]


TABLE = Table(
    place="Table 11",
    title="TAResSFL by the weight of the regularization (λ)",
    data=(CIFAR10,),
    lines=tuple(Line(f"MocoSFL-{cut}, {metric}") for cut in _CUTS for metric in _METRICS),
    columns=tuple(
        Column(name, at=("paper", "small") if name in _SMALL else ("paper",), lower=False)
        for name in _COLUMNS
    ),
    figures={
        CIFAR10.name: {
            "MocoSFL-1, accuracy, %": (79.83, 77.86, 80.43),
            "MocoSFL-1, attack MSE": (0.019, 0.04, 0.04),
            "MocoSFL-3, accuracy, %": (82.58, 84.81, 80.82),
            "MocoSFL-3, attack MSE": (0.04, 0.038, 0.041),
        }
    },
    source="appendix B.4, Table 11",
    claims=(
        Claim(
            "λ = 2 resists more than λ = 1 (MocoSFL-1)",
            pair([(("MocoSFL-1, attack MSE", "λ = 2"), ("MocoSFL-1, attack MSE", "λ = 1"))]),
        ),
    ),
    seeds=(1, 2, 3),
    small=SMALL,
    notes=NOTES,
    digits=3,
    compute=compute,
)

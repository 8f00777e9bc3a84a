"""MocoSFL, Table 10."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.mocosfl.attack import NOTES, SMALL, resisted
from benchmarks.papers.mocosfl.common import CIFAR10
from benchmarks.papers.rules import Claim, pair

_CUTS = (1, 3)
_COLUMNS = {"C2S2": (2, 2), "C4S2": (4, 2), "C8S2": (8, 2)}
_SMALL = ("C4S2", "C8S2")
_METRICS = {"accuracy, %": "accuracy", "attack MSE": "mse"}


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for name, value in _COLUMNS.items():
        if work.scale == "small" and name not in _SMALL:
            continue
        for cut in _CUTS:
            runs = [resisted(work, seed, cut=cut, bottleneck=value) for seed in work.seeds]
            for metric, key in _METRICS.items():
                place = (CIFAR10.name, f"MocoSFL-{cut}, {metric}", name)
                yield place, [each[key] for each in runs]


TABLE = Table(
    place="Table 10",
    title="TAResSFL with narrow and wide bottlenecks",
    data=(CIFAR10,),
    lines=tuple(Line(f"MocoSFL-{cut}, {metric}") for cut in _CUTS for metric in _METRICS),
    columns=tuple(
        Column(name, at=("paper", "small") if name in _SMALL else ("paper",), lower=False)
        for name in _COLUMNS
    ),
    figures={
        CIFAR10.name: {
            "MocoSFL-1, accuracy, %": (78.21, 77.86, 76.12),
            "MocoSFL-1, attack MSE": (0.037, 0.04, 0.02),
            "MocoSFL-3, accuracy, %": (80.94, 84.81, 82.39),
            "MocoSFL-3, attack MSE": (0.05, 0.038, 0.009),
        }
    },
    source="appendix B.4, Table 10",
    claims=(
        Claim(
            "C4S2 resists more than C8S2 (MocoSFL-1)",
            pair([(("MocoSFL-1, attack MSE", "C4S2"), ("MocoSFL-1, attack MSE", "C8S2"))]),
        ),
        Claim(
            "C4S2 resists more than C8S2 (MocoSFL-3)",
            pair([(("MocoSFL-3, attack MSE", "C4S2"), ("MocoSFL-3, attack MSE", "C8S2"))]),
        ),
    ),
    seeds=(1, 2, 3),
    small=SMALL,
    notes=NOTES,
    digits=3,
    compute=compute,
)

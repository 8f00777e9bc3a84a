"""MocoSFL, Table 9."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.mocosfl.attack import NOTES, SMALL, resisted
from benchmarks.papers.mocosfl.common import CIFAR10
from benchmarks.papers.rules import Claim, pair

_CUTS = (1, 3)
_COLUMNS = {"0.0%": 0.0, "0.5%": 0.005, "1.0%": 0.01}
_SMALL = ("1.0%",)
_METRICS = {"accuracy, %": "accuracy", "attack MSE": "mse"}


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for name, value in _COLUMNS.items():
        if work.scale == "small" and name not in _SMALL:
            continue
        for cut in _CUTS:
            runs = [
                resisted(work, seed, cut=cut, source="SVHN", target=value) for seed in work.seeds
            ]
            for metric, key in _METRICS.items():
                place = (CIFAR10.name, f"MocoSFL-{cut}, {metric}", name)
                yield place, [each[key] for each in runs]


TABLE = Table(
    place="Table 9",
    title="TAResSFL with SVHN as the source, by the share of target images",
    data=(CIFAR10,),
    lines=tuple(Line(f"MocoSFL-{cut}, {metric}") for cut in _CUTS for metric in _METRICS),
    columns=tuple(
        Column(name, at=("paper", "small") if name in _SMALL else ("paper",), lower=False)
        for name in _COLUMNS
    ),
    figures={
        CIFAR10.name: {
            "MocoSFL-1, accuracy, %": (70.54, 79.26, 74.25),
            "MocoSFL-1, attack MSE": (0.039, 0.035, 0.037),
            "MocoSFL-3, accuracy, %": (79.41, 76.02, 80.19),
            "MocoSFL-3, attack MSE": (0.041, 0.035, 0.034),
        }
    },
    source="appendix B.4, Table 9 (SVHN; 0 to 1 % of CIFAR-10)",
    claims=(
        Claim(
            "MocoSFL-3 is more accurate than MocoSFL-1",
            pair([(("MocoSFL-3, accuracy, %", "1.0%"), ("MocoSFL-1, accuracy, %", "1.0%"))]),
        ),
    ),
    seeds=(1, 2, 3),
    small=SMALL,
    notes=NOTES,
    digits=3,
    compute=compute,
)

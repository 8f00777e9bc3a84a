"""MocoSFL, Appendix B.5."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.mocosfl.attack import NOTES, SMALL, resisted
from benchmarks.papers.mocosfl.common import CIFAR10
from benchmarks.papers.rules import Claim, below

_CUTS = (1, 3)
_COLUMNS = {"0.0%": 0.0, "0.5%": 0.005, "1.0%": 0.01}
_SMALL = ("1.0%",)
_METRICS = {"MSE": "mse", "SSIM": "ssim", "PSNR": "psnr"}


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for name, value in _COLUMNS.items():
        if work.scale == "small" and name not in _SMALL:
            continue
        for cut in _CUTS:
            runs = [resisted(work, seed, cut=cut, target=value) for seed in work.seeds]
            for metric, key in _METRICS.items():
                place = (CIFAR10.name, f"MocoSFL-{cut}, {metric}", name)
                yield place, [each[key] for each in runs]


TABLE = Table(
    place="Appendix B.5",
    title="how well images are inverted: MSE, SSIM and PSNR, with CIFAR-100 as the source",
    data=(CIFAR10,),
    lines=tuple(Line(f"MocoSFL-{cut}, {metric}") for cut in _CUTS for metric in _METRICS),
    columns=tuple(
        Column(name, at=("paper", "small") if name in _SMALL else ("paper",), lower=False)
        for name in _COLUMNS
    ),
    figures={
        CIFAR10.name: {
            "MocoSFL-3, MSE": (0.039, 0.033, 0.039),
            "MocoSFL-3, SSIM": (0.487, 0.545, 0.424),
            "MocoSFL-3, PSNR": (15.35, 15.93, 14.79),
            "MocoSFL-1, MSE": (0.045, 0.035, 0.039),
            "MocoSFL-1, SSIM": (0.417, 0.593, 0.438),
            "MocoSFL-1, PSNR": (14.43, 16.32, 14.74),
        }
    },
    source="appendix B.5, the table without a number (for Table 4 of the main part)",
    claims=(
        Claim(
            "the SSIM of MocoSFL-3 is below 0.6",
            below("MocoSFL-3, SSIM", 0.6),
        ),
        Claim("the SSIM of MocoSFL-1 is below 0.6", below("MocoSFL-1, SSIM", 0.6)),
    ),
    seeds=(1, 2, 3),
    small=SMALL,
    notes=NOTES,
    digits=3,
    compute=compute,
)

"""MocoSFL, Table 6."""

from __future__ import annotations

from benchmarks.papers.describe import Table
from benchmarks.papers.mocosfl.common import CIFAR10, NOTES, SMALL, columns, line
from benchmarks.papers.rules import Claim, better

_NETWORKS = ("ResNet-18", "MobileNetV2", "VGG-13")
_NAMES = tuple(f"MocoSFL-3 ({each})" for each in _NETWORKS)
TABLE = Table(
    place="Table 6",
    title="MocoSFL-3 with MobileNetV2 and VGG-13, 100 clients",
    data=(CIFAR10,),
    lines=tuple(line(3, network) for network in _NETWORKS),
    columns=columns((100,), small=(100,)),
    figures={
        "CIFAR-10": dict(zip(_NAMES, ((87.29, 87.10), (81.64, 74.48), (81.41, 76.02)), strict=True))
    },
    source="appendix B.2, Table 6",
    claims=(
        Claim("ResNet-18 is above MobileNetV2", better(_NAMES[0], _NAMES[1])),
        Claim("ResNet-18 is above VGG-13", better(_NAMES[0], _NAMES[2])),
    ),
    small=SMALL + "; the CNN alone",
    notes=NOTES,
    percent=True,
    digits=2,
)

"""MocoSFL, Table 5."""

from __future__ import annotations

from benchmarks.papers.describe import Table
from benchmarks.papers.mocosfl.common import CIFAR10, NOTES, SMALL, columns, line
from benchmarks.papers.rules import Claim, better, close, near

_ONE, _THREE = "MocoSFL-1 (ResNet-18)", "MocoSFL-3 (ResNet-18)"
_OTHER = [((_ONE, f"{n} clients, non-IID"), (_ONE, f"{n} clients, IID")) for n in (5, 20, 100)]
TABLE = Table(
    place="Table 5",
    title="MocoSFL with ResNet-18 and ResNet-50, 5 to 100 clients",
    data=(CIFAR10,),
    lines=tuple(line(cut, network) for network in ("ResNet-18", "ResNet-50") for cut in (1, 3)),
    columns=columns((5, 20, 100), small=(5, 20)),
    figures={
        "CIFAR-10": {
            _ONE: (87.38, 87.81, 87.21, 85.84, 87.29, 87.71),
            _THREE: (87.09, 87.29, 87.09, 85.32, 87.29, 87.10),
            "MocoSFL-1 (ResNet-50)": (90.68, 90.78, 91.07, 89.35, 90.59, 90.96),
            "MocoSFL-3 (ResNet-50)": (90.86, 90.94, 90.58, 89.83, 90.67, 90.66),
        }
    },
    source="appendix B.1, Table 5 (linear probe)",
    claims=(
        Claim("MocoSFL-3 is within a point of MocoSFL-1", close(_THREE, _ONE, 1.0)),
        Claim("ResNet-50 is about 3 points better", better("MocoSFL-1 (ResNet-50)", _ONE)),
        Claim(
            "clients with two classes lose at most 1.5 points", near(_OTHER, 1.5, one_sided=True)
        ),
    ),
    small=SMALL + "; 5 and 20 clients",
    notes=NOTES,
    percent=True,
    digits=2,
)

"""MocoSFL, Fig. 12."""

from __future__ import annotations

from benchmarks.papers.describe import Line, Table
from benchmarks.papers.mocosfl.common import CIFAR10, NOTES, PROBE, SMALL, columns, pretraining
from benchmarks.papers.rules import Claim, better

TABLE = Table(
    place="Fig. 12",
    title="one memory of negative keys for all clients, or one for each",
    data=(CIFAR10,),
    lines=(
        Line("shared", [pretraining(3), PROBE]),
        Line("not shared", [pretraining(3, shared_memory=False), PROBE]),
    ),
    columns=columns((5,), small=(5,)),
    figures={},
    source="appendix B.3, Fig. 12, a chart",
    claims=(
        Claim(
            "sharing is significantly better, IID",
            better("shared", "not shared", ("IID",), floor=2.0),
        ),
        Claim(
            "sharing is significantly better, non-IID",
            better("shared", "not shared", ("non-IID",), floor=2.0),
        ),
    ),
    small=SMALL,
    notes=(
        *NOTES,
        "the least difference of 2 points was declared after the first run, at the first scale "
        "`small`, whose differences of 0.2 and 1.3 points the paper would not call significant",
        "the appendix does not say how many clients: here 5",
    ),
    percent=True,
    digits=2,
)

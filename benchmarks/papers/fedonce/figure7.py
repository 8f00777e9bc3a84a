"""FedOnce, Fig. 7."""

from __future__ import annotations

from benchmarks.papers.describe import Column, Table
from benchmarks.papers.fedonce.common import L0, MNIST, PHISHING, TABLES
from benchmarks.papers.rules import Claim, along

_SMALL = (2, 16, 64)
TABLE = Table(
    place="Fig. 7",
    title="the width of a representation (d)",
    data=(MNIST, PHISHING),
    lines=(L0,),
    columns=tuple(
        Column(
            f"d = {d}",
            changes={"model.embedding_size": d},
            at=("paper", "small") if d in _SMALL else ("paper",),
        )
        for d in (2, 4, 8, 16, 32, 64)
    ),
    figures={},
    source="section 5.2, Fig. 7, a chart; the text says that d of about 16 is best on MNIST",
    claims=(
        Claim(
            "d = 16 is above d = 2 on MNIST", along("FedOnce-L0", "d = 2", "d = 16"), on=("MNIST",)
        ),
        Claim(
            "d = 16 is above d = 64 on MNIST",
            along("FedOnce-L0", "d = 64", "d = 16"),
            on=("MNIST",),
        ),
    ),
    small=TABLES + "; d of 2, 16 and 64",
    notes=("P1 is the host; the paper takes the mean over all",),
    percent=True,
    digits=2,
)

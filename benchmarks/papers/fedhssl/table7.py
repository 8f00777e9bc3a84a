"""FedHSSL, Table VII."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.fedhssl.attack import (
    HYBRID,
    LOCAL_NAME,
    NOTES,
    SPLITNN,
    attacked,
    cap,
    lambda_p,
)
from benchmarks.papers.fedhssl.common import DIGITS, PAPER, SMALL
from benchmarks.papers.rules import Claim, best_of


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for data in work.data(TABLE):
        for method in (SPLITNN, LOCAL_NAME, HYBRID):
            iso = lambda_p(data, 0.2) if method == HYBRID else 0.0
            yield (
                (data.name, method, "CAP"),
                [cap(attacked(work, data, method, seed, iso=iso)) for seed in work.seeds],
            )


TABLE = Table(
    place="Table VII",
    title="utility and privacy after fine-tuning with noise (CAP)",
    data=(*PAPER, DIGITS),
    lines=tuple(Line(each) for each in (SPLITNN, LOCAL_NAME, HYBRID)),
    columns=(Column("CAP", lower=False),),
    figures={
        "NUSWIDE": {SPLITNN: (0.264,), LOCAL_NAME: (0.258,), HYBRID: (0.284,)},
        "Avazu": {SPLITNN: (0.238,), LOCAL_NAME: (0.262,), HYBRID: (0.262,)},
        "BHI": {SPLITNN: (0.242,), LOCAL_NAME: (0.221,), HYBRID: (0.246,)},
        "Modelnet": {SPLITNN: (0.342,), LOCAL_NAME: (0.334,), HYBRID: (0.348,)},
    },
    source="section VI-B, Table VII",
    claims=(Claim("FedHSSL-SimSiam has the best CAP", best_of([HYBRID], [SPLITNN, LOCAL_NAME])),),
    small=SMALL,
    notes=NOTES,
    compute=compute,
)

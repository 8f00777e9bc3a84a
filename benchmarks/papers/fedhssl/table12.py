"""FedHSSL, Table XII."""

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
from benchmarks.papers.rules import Claim, close

_TWENTY, _FORTY = f"{HYBRID} (20%)", f"{HYBRID} (40%)"
_LINES = {
    SPLITNN: (SPLITNN, 0.2),
    LOCAL_NAME: (LOCAL_NAME, 0.2),
    _TWENTY: (HYBRID, 0.2),
    _FORTY: (HYBRID, 0.4),
}


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for data in work.data(TABLE):
        for line, (method, aligned) in _LINES.items():
            iso = lambda_p(data, aligned) if method == HYBRID else 0.0
            yield (
                (data.name, line, "CAP"),
                [
                    cap(attacked(work, data, method, seed, aligned=aligned, iso=iso))
                    for seed in work.seeds
                ],
            )


def _of(*values: float) -> dict[str, tuple[float]]:
    return {line: (value,) for line, value in zip(_LINES, values, strict=True)}


TABLE = Table(
    place="Table XII",
    title="utility and privacy (CAP), 20 % beside 40 % aligned rows",
    data=(*PAPER, DIGITS),
    lines=tuple(Line(each) for each in _LINES),
    columns=(Column("CAP", lower=False),),
    figures={
        "NUSWIDE": _of(0.264, 0.258, 0.284, 0.277),
        "Avazu": _of(0.238, 0.262, 0.262, 0.264),
        "BHI": _of(0.242, 0.221, 0.246, 0.244),
        "Modelnet": _of(0.342, 0.334, 0.348, 0.349),
    },
    source="appendix C-D, Table XII",
    claims=(Claim("CAP with 40 % is near that with 20 %", close(_FORTY, _TWENTY, 0.01)),),
    small=SMALL,
    notes=NOTES,
    compute=compute,
)

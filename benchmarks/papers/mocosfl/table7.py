"""MocoSFL, Table 7."""

from __future__ import annotations

from benchmarks.papers.describe import At, Line, Table
from benchmarks.papers.mocosfl.common import (
    CIFAR10,
    IID,
    NOTES,
    OTHER,
    PROBE,
    SMALL,
    columns,
    pretraining,
)
from benchmarks.papers.rules import Claim, better

_BATCHES = (25, 50, 100, 200, 400)
_SMALL = (25, 100, 400)
_FIGURES = {
    25: (79.66, 74.51),
    50: (85.00, 80.31),
    100: (86.77, 83.14),
    200: (87.49, 84.90),
    400: (86.61, 84.64),
}
# As auto-adjust; at the scale small an epoch with B = 400 has 6 steps.
_AVERAGES = At(10, 5)
TABLE = Table(
    place="Table 7",
    title="the batch that the server sees (B), 5 clients",
    data=(CIFAR10,),
    lines=tuple(
        Line(
            f"B = {batch}",
            [pretraining(3, batch_size=batch // 5, averages_per_epoch=_AVERAGES), PROBE],
            at=("paper", "small") if batch in _SMALL else ("paper",),
        )
        for batch in _BATCHES
    ),
    columns=columns((5,), small=(5,), deals=(IID, OTHER)),
    figures={"CIFAR-10": {f"B = {batch}": row for batch, row in _FIGURES.items()}},
    source="appendix B.3, Table 7 (MocoSFL-3, ResNet-18)",
    claims=(
        Claim("a batch of 100 is far better than one of 25", better("B = 100", "B = 25")),
        Claim("a batch of 400 is a little worse than one of 200", better("B = 200", "B = 400")),
    ),
    small=SMALL + "; B of 25, 100 and 400; 5 averages an epoch",
    notes=NOTES,
    percent=True,
    digits=2,
)

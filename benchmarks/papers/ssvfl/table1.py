"""SS-VFL, Table 1."""

from __future__ import annotations

from benchmarks.papers.describe import Column, Table
from benchmarks.papers.measures import megabytes_to
from benchmarks.papers.rules import Claim, ratio
from benchmarks.papers.ssvfl.common import DATA, LINES, NOTES, SHARES, SMALL

_TARGETS = (0.70, 0.75, 0.80, 0.85)
_COLUMNS = tuple(
    Column(f"{share:.0%} to {target:.0%}", share=share, measure=megabytes_to(target), lower=True)
    for share, target in zip(SHARES, _TARGETS, strict=True)
)
TABLE = Table(
    place="Table 1",
    title="megabytes until a target accuracy, by the share of labelled rows",
    data=DATA,
    lines=LINES,
    columns=_COLUMNS,
    figures={
        "ImageNet100": {
            "VFL": (None, 1023.96, 1857.25, 3089.22),
            "SS-VFL-I": (1.24, 6.19, 12.38, 30.95),
            "SS-VFL-C": (143.63, 153.53, 210.49, 396.21),
        },
        "ModelNet10": {
            "VFL": (None, 175.55, 225.47, 330.47),
            "SS-VFL-I": (0.23, 1.17, 2.34, 5.86),
            "SS-VFL-C": (23.02, 37.03, 55.31, 104.30),
        },
    },
    source="section 4, Table 1",
    claims=(
        Claim(
            "supervised VFL needs at least 56 times the bytes of SS-VFL-I",
            ratio("VFL", "SS-VFL-I", 56.0),
        ),
        Claim(
            "SS-VFL-C needs at least 12 times the bytes of SS-VFL-I",
            ratio("SS-VFL-C", "SS-VFL-I", 12.0),
        ),
        Claim("supervised VFL needs more than SS-VFL-C", ratio("VFL", "SS-VFL-C", 3.0)),
    ),
    small=SMALL + "; the paper's targets",
    notes=(
        *NOTES,
        "the target is of validation rows, after each epoch; the paper takes test rows",
        "bytes of all parties, with the gradients",
    ),
    digits=2,
    runs_of="ssvfl.figure3",
)

"""SS-VFL, Fig. 3."""

from __future__ import annotations

from benchmarks.papers.describe import Column, Table
from benchmarks.papers.rules import Claim, better, close
from benchmarks.papers.ssvfl.common import (
    DATA,
    DIGITS,
    IMAGENET,
    LINES,
    MODELNET,
    NOTES,
    SHARES,
    SMALL,
)

TABLE = Table(
    place="Fig. 3",
    title="supervised and self-supervised VFL, by the share of labelled rows",
    data=DATA,
    lines=LINES,
    columns=tuple(Column(f"{share:.0%}", share=share) for share in SHARES),
    figures={},
    source="section 4, Fig. 3, a chart; the text says up to double the accuracy with 1 %",
    claims=(
        Claim("SS-VFL-I is above supervised VFL with 1 %", better("SS-VFL-I", "VFL", ("1%",))),
        Claim("SS-VFL-C is above supervised VFL with 1 %", better("SS-VFL-C", "VFL", ("1%",))),
        Claim(
            "SS-VFL-I and SS-VFL-C are close",
            close("SS-VFL-I", "SS-VFL-C", 0.02),
            on=(MODELNET.name, DIGITS.name),
        ),
        Claim(
            "SS-VFL-C is above SS-VFL-I with 25 %",
            better("SS-VFL-C", "SS-VFL-I", ("25%",)),
            on=(IMAGENET.name,),
        ),
        Claim("with 25 % supervised VFL is close", close("VFL", "SS-VFL-I", 0.02, ("25%",))),
    ),
    small=SMALL,
    notes=NOTES,
)

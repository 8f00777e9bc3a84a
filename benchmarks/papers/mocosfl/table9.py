"""MocoSFL, Table 9."""

from __future__ import annotations

from benchmarks.papers.mocosfl.resistance import ATTACKED, SHARES, table
from benchmarks.papers.rules import Claim, pair

TABLE = table(
    "Table 9",
    "TAResSFL with SVHN as the source, by the share of target images",
    "appendix B.4, Table 9 (SVHN; 0 to 1 % of CIFAR-10)",
    {name: {**share, "source": "SVHN"} for name, share in SHARES.items()},
    small=(),
    metrics=ATTACKED,
    figures={
        "MocoSFL-1, accuracy, %": (70.54, 79.26, 74.25),
        "MocoSFL-1, attack MSE": (0.039, 0.035, 0.037),
        "MocoSFL-3, accuracy, %": (79.41, 76.02, 80.19),
        "MocoSFL-3, attack MSE": (0.041, 0.035, 0.034),
    },
    claims=(
        Claim(
            "MocoSFL-3 is more accurate than MocoSFL-1",
            pair([(("MocoSFL-3, accuracy, %", "1.0%"), ("MocoSFL-1, accuracy, %", "1.0%"))]),
        ),
    ),
)

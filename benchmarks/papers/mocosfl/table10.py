"""MocoSFL, Table 10."""

from __future__ import annotations

from benchmarks.papers.mocosfl.resistance import ATTACKED, table
from benchmarks.papers.rules import Claim, pair

# A twentieth of the paper's errors.
_FLOOR = 0.002
TABLE = table(
    "Table 10",
    "TAResSFL with narrow and wide bottlenecks",
    "appendix B.4, Table 10",
    {
        "C2S2": {"bottleneck": (2, 2)},
        "C4S2": {"bottleneck": (4, 2)},
        "C8S2": {"bottleneck": (8, 2)},
    },
    small=("C4S2", "C8S2"),
    metrics=ATTACKED,
    figures={
        "MocoSFL-1, accuracy, %": (78.21, 77.86, 76.12),
        "MocoSFL-1, attack MSE": (0.037, 0.04, 0.02),
        "MocoSFL-3, accuracy, %": (80.94, 84.81, 82.39),
        "MocoSFL-3, attack MSE": (0.05, 0.038, 0.009),
    },
    claims=(
        Claim(
            "C4S2 resists more than C8S2 (MocoSFL-1)",
            pair(
                [(("MocoSFL-1, attack MSE", "C4S2"), ("MocoSFL-1, attack MSE", "C8S2"))],
                floor=_FLOOR,
            ),
        ),
        Claim(
            "C4S2 resists more than C8S2 (MocoSFL-3)",
            pair(
                [(("MocoSFL-3, attack MSE", "C4S2"), ("MocoSFL-3, attack MSE", "C8S2"))],
                floor=_FLOOR,
            ),
        ),
    ),
)

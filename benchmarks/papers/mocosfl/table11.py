"""MocoSFL, Table 11."""

from __future__ import annotations

from benchmarks.papers.mocosfl.resistance import ATTACKED, table
from benchmarks.papers.rules import Claim, pair

TABLE = table(
    "Table 11",
    "TAResSFL by the weight of the regularization (λ)",
    "appendix B.4, Table 11",
    {f"λ = {weight}": {"weight": float(weight)} for weight in (1, 2, 4)},
    small=("λ = 1", "λ = 2"),
    metrics=ATTACKED,
    figures={
        "MocoSFL-1, accuracy, %": (79.83, 77.86, 80.43),
        "MocoSFL-1, attack MSE": (0.019, 0.04, 0.04),
        "MocoSFL-3, accuracy, %": (82.58, 84.81, 80.82),
        "MocoSFL-3, attack MSE": (0.04, 0.038, 0.041),
    },
    claims=(
        Claim(
            "λ = 2 resists more than λ = 1 (MocoSFL-1)",
            pair(
                [(("MocoSFL-1, attack MSE", "λ = 2"), ("MocoSFL-1, attack MSE", "λ = 1"))],
                floor=0.002,
            ),
        ),
    ),
)

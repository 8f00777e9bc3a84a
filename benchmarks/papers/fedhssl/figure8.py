"""FedHSSL, Fig. 8."""

from __future__ import annotations

from benchmarks.papers.describe import Column, Table
from benchmarks.papers.fedhssl.common import (
    DATA,
    NOTES,
    SMALL,
    TWENTY,
    fine,
    guided,
    hybrid,
    schedule,
    starred,
)
from benchmarks.papers.rules import Claim, along, better

_LINES = (guided("simsiam"), hybrid("simsiam"))
_SMALL = (0.0, 0.5, 1.5)
TABLE = Table(
    place="Fig. 8",
    title="how strongly the cross-party encoder guides the local one (γ)",
    data=DATA,
    lines=(*_LINES, *map(starred, _LINES)),
    columns=tuple(
        Column(
            f"γ = {gamma:g}",
            labels=200,
            changes=TWENTY,
            phases={"fedhssl": {"gamma": gamma, "optimizer": schedule(gamma)}},
            at=("paper", "small") if gamma in _SMALL else ("paper",),
        )
        for gamma in (0.0, 0.1, 0.5, 1.0, 1.5, 2.0)
    ),
    finetune=fine,
    figures={},
    source="appendix C-A, Fig. 8, a chart without numbers",
    claims=(
        Claim("γ = 0.5 is above γ = 0 for FedGSSL*", along("FedGSSL-SimSiam*", "γ = 0", "γ = 0.5")),
        Claim("γ = 0.5 is above γ = 0 for FedHSSL*", along("FedHSSL-SimSiam*", "γ = 0", "γ = 0.5")),
        Claim(
            "FedHSSL* is above FedGSSL* for γ of 0.5 to 1.5",
            better("FedHSSL-SimSiam*", "FedGSSL-SimSiam*", ("γ = 0.5", "γ = 1", "γ = 1.5")),
        ),
    ),
    small=SMALL + "; γ of 0, 0.5 and 1.5; one learning rate",
    notes=(*NOTES, "the chart's values of γ are not in the text: those between 0 and 2 are ours"),
)

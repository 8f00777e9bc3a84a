"""FedOnce, Fig. 9."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import At, Column, Table
from benchmarks.papers.fedonce.common import COMBINE, HOST, L0, PHISHING, SOLO, TABLES, UJI, UNSAID
from benchmarks.papers.rules import Claim, along, close, pair

_SMALL = (0.0, 1.0)
_LEAST, _MOST = "α = 0", "α = 1"
TABLE = Table(
    place="Fig. 9",
    title="a host with few or many of the important columns",
    data=tuple(replace(each, parties=2) for each in (PHISHING, UJI)),
    lines=(
        L0,
        SOLO,
        # All columns are in one place, so that it does not depend on α.
        replace(COMBINE, only=("α = 1",)),
    ),
    columns=tuple(
        Column(
            f"α = {alpha:g}",
            prepare={"divide": "importance", "alpha": alpha},
            at=("paper", "small") if alpha in _SMALL else ("paper",),
        )
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0)
    ),
    figures={},
    source="section 5.5, Fig. 9, a chart",
    claims=(
        Claim(
            "FedOnce gains most where the host's columns are poor",
            # Half of what it gains there, less what it gains where they are good.
            pair(
                [
                    (("FedOnce-L0", _LEAST), ("Solo", _LEAST)),
                    (("Solo", _MOST), ("FedOnce-L0", _MOST)),
                ]
            ),
        ),
        Claim("Solo gains with the quality of its columns", along("Solo", _LEAST, _MOST)),
        Claim(
            "with the best columns Solo is close to Combine",
            close("Solo", "Combine", 2.0, (_MOST,)),
            on=("phishing",),
        ),
    ),
    seeds=(1,),
    folds=At(5, 3),
    small=TABLES + "; α of 0 and 1; three folds",
    notes=(UNSAID, HOST, "importance is LightGBM's gain in place of XGBoost's"),
    percent=True,
    digits=2,
)

"""FedOnce, Fig. 8."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import At, Column, Line, Table
from benchmarks.papers.fedonce.common import GISETTE, HOST, L0, SOLO, TABLES, UJI, UNSAID, adam
from benchmarks.papers.rules import Claim, along, better

# In place of SplitNN-Comm, whose bytes depend on k: the epochs that cost as many bytes.
_COMM = Line(
    "SplitNN, one epoch",
    [
        {"kind": "splitnn", "epochs": 1, "batch_size": 100, "optimizer": adam(1e-3)},
        {"kind": "evaluate"},
    ],
)
_STANDS = replace(
    UJI,
    name="UJIIndoorLoc, 520 columns",
    stands_for="gisette",
    at=("small",),
    rows=At(None, 2000),
)
_SMALL = (10, 50)
TABLE = Table(
    place="Fig. 8",
    title="10 to 200 parties",
    data=(GISETTE, _STANDS),
    lines=(L0, SOLO, _COMM),
    columns=tuple(
        Column(f"k = {k}", parties=k, at=("paper", "small") if k in _SMALL else ("paper",))
        for k in (10, 25, 50, 100, 200)
    ),
    figures={},
    source="section 5.4, Fig. 8, a chart",
    claims=(
        Claim(
            "Solo degrades with the number of parties",
            along("Solo", f"k = {_SMALL[1]}", f"k = {_SMALL[0]}"),
        ),
        Claim(
            "FedOnce-L0 is above SplitNN with its bytes", better("FedOnce-L0", "SplitNN, one epoch")
        ),
        Claim("FedOnce-L0 is above Solo", better("FedOnce-L0", "Solo")),
    ),
    small=TABLES + "; of UJIIndoorLoc 2,000 rows; 10 and 50 parties",
    notes=(
        UNSAID,
        HOST,
        "P1 is the host; the paper takes the mean over all",
        "one epoch of SplitNN costs twice the bytes of FedOnce's upload",
    ),
    percent=True,
    digits=2,
)

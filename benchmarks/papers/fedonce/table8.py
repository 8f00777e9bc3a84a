"""FedOnce, Table 8."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import Column, Table
from benchmarks.papers.fedonce.common import (
    HOST,
    L0,
    MOVIELENS,
    NUSWIDE,
    PHISHING,
    SOLO,
    TABLES,
    UNSAID,
)
from benchmarks.papers.rules import Claim, along, pair

_NOISE = (0.0, 0.1, 0.5, 1.0, 1.5)
_NAMES = tuple(f"σ = {noise:g}" for noise in _NOISE)
_STANDS = replace(PHISHING, stands_for="NUS-WIDE", at=("small",))
TABLE = Table(
    place="Table 8",
    title="Gaussian noise on representations",
    data=(NUSWIDE, MOVIELENS, _STANDS),
    lines=(replace(L0, only=_NAMES), replace(SOLO, only=("Solo",))),
    columns=(
        *(
            Column(name, phases={"head": {"noise": noise}} if noise else {})
            for name, noise in zip(_NAMES, _NOISE, strict=True)
        ),
        Column("Solo"),
    ),
    figures={
        "NUS-WIDE": {
            "FedOnce-L0": (0.8476, 0.8464, 0.8275, 0.8145, 0.8105, None),
            "Solo": (None, None, None, None, None, 0.8071),
        },
        "MovieLens": {
            "FedOnce-L0": (0.9373, 0.9578, 0.9690, 0.9679, 0.9969, None),
            "Solo": (None, None, None, None, None, 0.9835),
        },
    },
    source="section 5.8, Table 8 (accuracy; RMSE of MovieLens)",
    claims=(
        Claim("noise of 1.5 costs quality", along("FedOnce-L0", "σ = 1.5", "σ = 0")),
        Claim(
            "with noise of 0.5 FedOnce-L0 is still above Solo",
            pair([(("FedOnce-L0", "σ = 0.5"), ("Solo", "Solo"))]),
        ),
    ),
    small=TABLES,
    notes=(UNSAID, HOST, "P1 is the host; the paper takes the mean over all parties"),
    digits=4,
)

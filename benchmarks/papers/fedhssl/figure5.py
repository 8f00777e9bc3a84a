"""FedHSSL, Fig. 5: Table IV as curves."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.fedhssl import table4
from benchmarks.papers.rules import Claim, best

TABLE = replace(
    table4.TABLE,
    place="Fig. 5",
    title="Table IV as curves: which method is best at each number of labels",
    source="section V-B, Fig. 5, whose numbers are those of Table IV",
    runs_of="fedhssl.table4",
    claims=(Claim("FedHSSL-SimSiam is best at each number of labels", best("FedHSSL-SimSiam")),),
)

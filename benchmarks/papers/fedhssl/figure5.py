"""FedHSSL, Fig. 5: Table IV as curves."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.fedhssl import table4
from benchmarks.papers.rules import Claim, best_of

_OURS = [each.name for each in table4.TABLE.lines if each.name.startswith("FedHSSL")]
TABLE = replace(
    table4.TABLE,
    place="Fig. 5",
    title="Table IV as curves: which method is best at each number of labels",
    source="section V-B, Fig. 5, whose numbers are those of Table IV",
    runs_of="fedhssl.table4",
    claims=(
        Claim(
            "the best FedHSSL method is above the best method without it",
            best_of(_OURS, [each.name for each in table4.TABLE.lines if each.name not in _OURS]),
        ),
    ),
)

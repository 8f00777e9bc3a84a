"""FedHSSL, Fig. 6."""

from __future__ import annotations

from benchmarks.papers.describe import Table
from benchmarks.papers.fedhssl.common import (
    ALIGNED,
    DATA,
    NAMES,
    NOTES,
    SMALL,
    cross,
    fine,
    guided,
    hybrid,
    local,
    of_labels,
)
from benchmarks.papers.rules import Claim, better

_STEPS = (("FedCSSL-", "FedLocal"), ("FedGSSL-", "FedCSSL-"), ("FedHSSL-", "FedGSSL-"))
TABLE = Table(
    place="Fig. 6",
    title="what each step of FedHSSL adds",
    data=DATA,
    lines=tuple(
        make(ssl, at=("paper", "small") if ssl == "simsiam" else ("paper",))
        for ssl in NAMES
        for make in (local, cross, guided, hybrid)
    ),
    columns=of_labels(ALIGNED, small=(200,)),
    finetune=fine,
    figures={},
    source="section V-C, Fig. 6, a chart without numbers",
    claims=tuple(
        Claim(
            f"{first}SimSiam is above {second}SimSiam",
            better(f"{first}SimSiam", f"{second}SimSiam"),
        )
        for first, second in _STEPS
    ),
    small=SMALL + "; SimSiam and 200 labels alone; one learning rate",
    notes=(*NOTES, "the differences that the chart shows are not in the text, so the sign counts"),
)

"""FedHSSL, Table IX."""

from __future__ import annotations

from benchmarks.papers.describe import Column, Line, Table
from benchmarks.papers.fedhssl.common import (
    DATA,
    LOCAL,
    NOTES,
    RATES,
    SMALL,
    cross,
    fine,
    pretrained,
)
from benchmarks.papers.rules import Claim, better

_SHARES = ("20%", "40%", "100%")
_COLUMNS = tuple(
    Column(share, labels=200, changes={"rows.aligned": value})
    for share, value in zip(_SHARES, (0.2, 0.4, 1.0), strict=True)
)
# Of all rows when all are aligned.
_LOCAL = Line(
    "FedLocalSimSiam",
    pretrain=pretrained("simsiam", **LOCAL, local_rows="aligned"),
    rates=RATES,
)
TABLE = Table(
    place="Table IX",
    title="cross-party and local self-supervision on the same share of the rows",
    data=DATA,
    lines=(_LOCAL, cross("simsiam")),
    columns=_COLUMNS,
    finetune=fine,
    figures={
        "NUSWIDE": {
            "FedLocalSimSiam": (0.523, 0.517, 0.505),
            "FedCSSL-SimSiam": (0.535, 0.550, 0.562),
        },
        "Avazu": {
            "FedLocalSimSiam": (0.565, 0.566, 0.575),
            "FedCSSL-SimSiam": (0.615, 0.622, 0.627),
        },
        "BHI": {"FedLocalSimSiam": (0.748, 0.755, 0.760), "FedCSSL-SimSiam": (0.762, 0.778, 0.805)},
        "Modelnet": {
            "FedLocalSimSiam": (0.598, 0.609, 0.622),
            "FedCSSL-SimSiam": (0.652, 0.684, 0.686),
        },
    },
    source="appendix C-B, Table IX; the columns are the share of the training rows",
    claims=(
        Claim(
            "FedCSSL is above FedLocal on all rows",
            better("FedCSSL-SimSiam", "FedLocalSimSiam", ("100%",)),
        ),
        Claim(
            "FedCSSL is above FedLocal on each share", better("FedCSSL-SimSiam", "FedLocalSimSiam")
        ),
    ),
    small=SMALL + "; one learning rate",
    notes=NOTES,
)

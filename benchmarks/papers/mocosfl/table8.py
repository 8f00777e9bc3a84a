"""MocoSFL, Table 8."""

from __future__ import annotations

from benchmarks.papers.describe import Column, Table
from benchmarks.papers.mocosfl.common import CIFAR10, NOTES, SMALL, line
from benchmarks.papers.rules import Claim, along, near

_OFTEN = (1, 2, 3, 5)
_NAMES = tuple(f"{each}/epoch" for each in _OFTEN)
TABLE = Table(
    place="Table 8",
    title="how often in an epoch the server averages, with many clients",
    data=(CIFAR10,),
    lines=(line(3),),
    columns=tuple(
        Column(
            name,
            # Of 1,000 clients 100 take part in each epoch.
            parties=1000,
            prepare={"deal": "classes:2"},
            phases={"mocosfl": {"averages_per_epoch": often}},
            at=("paper",),
        )
        for name, often in zip(_NAMES, _OFTEN, strict=True)
    )
    + tuple(
        Column(
            f"{name}, 50 clients",
            parties=50,
            prepare={"deal": "classes:2"},
            phases={"mocosfl": {"averages_per_epoch": often}},
            at=("small",),
        )
        for name, often in zip(_NAMES, _OFTEN, strict=True)
        if often in (1, 5)
    ),
    figures={"CIFAR-10": {"MocoSFL-3": (84.75, 87.47, 87.41, 87.38, None, None)}},
    source="appendix B.3, Table 8 (ResNet-18, non-IID)",
    claims=(
        Claim("twice an epoch is above once", along("MocoSFL-3", _NAMES[0], _NAMES[1])),
        Claim(
            "five times an epoch is no better than twice",
            near([(("MocoSFL-3", _NAMES[1]), ("MocoSFL-3", _NAMES[3]))], 0.5, one_sided=True),
        ),
        Claim(
            "with 50 clients, five times an epoch is as good as once",
            near(
                [(("MocoSFL-3", "1/epoch, 50 clients"), ("MocoSFL-3", "5/epoch, 50 clients"))], 2.0
            ),
            ours=True,
        ),
    ),
    small=SMALL + "; 50 clients in place of 1,000",
    notes=(
        *NOTES,
        "1,000 clients: the appendix says only that the number is large",
        "`auto_adjust` has one average an epoch with 1,000 clients, as the released code; A.1 has "
        "two: each column sets its own number",
    ),
    percent=True,
    digits=2,
)

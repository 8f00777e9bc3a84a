"""MocoSFL, Table 12."""

from __future__ import annotations

from benchmarks.papers.describe import At, Column, Line, Table, Tables
from benchmarks.papers.mocosfl.common import CIFAR10, NETWORKS, NOTES, SMALL, model, pretraining
from benchmarks.papers.rules import Claim, along, near

SHARES = {"1%": 0.01, "10%": 0.1}


def probe(share: float) -> Tables:
    """Returns an MLP head on frozen features of the rows with labels."""
    return {
        "kind": "probe",
        "splits": ["test"],
        "hidden": [512],
        "labelled": share,
        "epochs": At(100, 20),
        "least_steps": At(1, 500),
    }


def lines(networks: tuple[str, ...]) -> tuple[Line, ...]:
    """Returns MocoSFL-1 and -3 with each network; the columns say how many labels there are."""
    return tuple(
        Line(
            f"MocoSFL-{cut} ({network})",
            [pretraining(cut), probe(0.01)],
            changes={"model": model(network)},
            at=("paper", "small") if network == "ResNet-18" else ("paper",),
        )
        for network in networks
        for cut in (1, 3)
    )


_NAMES = tuple(f"MocoSFL-{cut} ({each})" for each in tuple(NETWORKS)[:2] for cut in (1, 3))
_ROWS = (
    (84.69, 87.05, 76.80, 84.46, 82.27, 86.84),
    (84.46, 86.50, 76.70, 84.20, 81.72, 85.91),
    (86.28, 89.55, 80.34, 86.09, 84.83, 88.78),
    (87.09, 90.33, 81.59, 87.21, 84.65, 88.81),
)
TABLE = Table(
    place="Table 12",
    title="1 and 10 % of the labels",
    data=(CIFAR10,),
    lines=lines(tuple(NETWORKS)[:2]),
    columns=tuple(
        Column(
            f"{n} clients, {name}",
            parties=n,
            prepare={"deal": "classes:2"},
            phases={"probe": {"labelled": share}},
            at=("paper", "small") if n == 5 else ("paper",),
        )
        for n in (5, 20, 100)
        for name, share in SHARES.items()
    ),
    figures={"CIFAR-10": dict(zip(_NAMES, _ROWS, strict=True))},
    source="appendix B.6, Table 12 (non-IID)",
    claims=(
        Claim(
            "10 % of the labels are better than 1 %",
            along(_NAMES[0], "5 clients, 1%", "5 clients, 10%"),
        ),
        Claim(
            "MocoSFL-3 is within a point of MocoSFL-1",
            near(
                [
                    ((_NAMES[1], f"5 clients, {each}"), (_NAMES[0], f"5 clients, {each}"))
                    for each in SHARES
                ],
                1.0,
            ),
        ),
    ),
    small=SMALL + "; 5 clients",
    notes=(*NOTES, "FL-BYOL is another paper's method, and is not run"),
    percent=True,
    digits=2,
)

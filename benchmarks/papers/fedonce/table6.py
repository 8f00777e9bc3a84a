"""FedOnce, Table 6 with the settings of Table 10 and the networks of Table 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.papers.describe import EVALUATE, Column, Data, Figures, Line, Table, Tables
from benchmarks.papers.fedonce.common import (
    COVTYPE,
    GISETTE,
    HOST,
    MNIST,
    PHISHING,
    SUPERCONDUCT,
    UJI,
)
from benchmarks.papers.rules import Claim, better, close

EPSILONS = (2, 4, 6, 8)
BASELINE, L1 = "Priv-Baseline", "FedOnce-L1"


@dataclass(frozen=True)
class Private:
    """A line of Table 10: learning rate, batch and epochs of guests and host, and the clipping
    norm Ω.
    """

    guest: tuple[float, int, int]
    host: tuple[float, int, int]
    norm: float


_PHISHING = {
    2: Private((0.3, 32, 10), (0.3, 32, 30), 1.0),
    4: Private((0.2, 32, 10), (0.2, 32, 30), 1.0),
    6: Private((0.3, 32, 10), (0.1, 32, 30), 1.0),
    8: Private((0.3, 128, 10), (0.3, 128, 40), 1.5),
}
_NUMBERS = {
    2: Private((0.4, 128, 10), (0.5, 128, 10), 1.5),
    4: Private((0.4, 128, 12), (0.5, 128, 20), 1.5),
    6: Private((0.4, 128, 12), (0.5, 128, 30), 1.5),
    8: Private((0.4, 128, 12), (0.3, 128, 60), 1.5),
}
_OF = {
    "gisette": {
        2: Private((0.3, 32, 10), (0.3, 32, 10), 1.0),
        4: Private((0.2, 32, 6), (0.2, 32, 30), 1.0),
        6: Private((0.3, 128, 10), (0.6, 128, 15), 1.5),
        8: Private((0.3, 128, 10), (0.6, 128, 40), 1.5),
    },
    # The paper has no line of covtype.
    "covtype": _PHISHING,
    "phishing": _PHISHING,
    "UJIIndoorLoc": _NUMBERS,
    "Superconduct": _NUMBERS,
    "MNIST": {
        2: Private((0.5, 256, 6), (0.8, 256, 15), 1.5),
        4: Private((0.5, 256, 6), (0.9, 256, 15), 1.5),
        6: Private((0.5, 256, 7), (0.9, 256, 15), 1.5),
        8: Private((0.5, 512, 10), (0.9, 512, 30), 1.5),
    },
}


def _with(data: Data, hidden: list[int], top: list[int], d: int) -> Data:
    encoder: Tables = {"kind": "mlp", "hidden": hidden}
    model = {"embedding_size": d, "encoder": encoder, "top": {"hidden": top}}
    delta = 1e-4 if data.name == "gisette" else 1e-5
    return replace(data, parties=4, model=model, settings={**data.settings, "delta": delta})


DATA = (
    _with(GISETTE, [30], [10], 3),
    _with(COVTYPE, [50], [30], 3),
    _with(PHISHING, [30], [10], 3),
    _with(UJI, [50, 50], [20, 20], 6),
    replace(
        MNIST,
        model={"embedding_size": 8, "encoder": {"kind": "cnn1"}, "top": {"hidden": [10]}},
        settings={**MNIST.settings, "delta": 1e-5},
    ),
    _with(SUPERCONDUCT, [50, 50], [20, 20], 6),
)


def _phases(epsilon: int | None, division: str) -> Callable[[Data], list[Tables]]:
    """Returns both phases in one run, which share the budget. None: without noise."""

    def of(data: Data) -> list[Tables]:
        chosen = _OF[data.name][epsilon or EPSILONS[-1]]
        dp: Tables = {"delta": data.settings["delta"], "max_grad_norm": chosen.norm}
        dp |= {"epsilon": float(epsilon)} if epsilon else {"noise_multiplier": 0.0}
        if division == "simple":
            dp["division"] = "simple"

        def phase(kind: str, of: tuple[float, int, int]) -> Tables:
            lr, batch, epochs = of
            optimizer = {"kind": "sgd", "lr": lr}
            return {
                "kind": kind,
                "epochs": epochs,
                "batch_size": batch,
                "optimizer": optimizer,
                "dp": dp,
            }

        head = phase("head", chosen.host) | {"own_encoder": "trained"}
        return [phase("fedonce", chosen.guest), head, EVALUATE]

    return of


def name(method: str, epsilon: int | None) -> str:
    return f"{method}, ε = {epsilon or '∞'}"


_LINES = (
    *(
        Line(
            name(BASELINE, each),
            _phases(each, "simple"),
            at=("paper", "small") if each in (2, 8) else ("paper",),
        )
        for each in EPSILONS
    ),
    *(
        Line(
            name(L1, each),
            _phases(each, "moments"),
            at=("paper", "small") if each in (2, 8) else ("paper",),
        )
        for each in EPSILONS
    ),
    Line(name(L1, None), _phases(None, "moments")),
)
_NUMBERS_OF = {
    "gisette": (
        (86.20, 86.09, 75.14, 73.00),
        (89.31, 88.10, 80.67, 80.57),
        (89.49, 88.46, 84.01, 82.08),
        (89.71, 88.42, 83.13, 82.55),
        (88.81, 88.05, 78.88, 79.51),
        (89.73, 88.54, 81.77, 82.88),
        (89.25, 88.67, 83.53, 82.77),
        (93.37, 93.01, 93.14, 93.64),
        (96.91, 97.11, 97.61, 96.42),
    ),
    "covtype": (
        (74.60, 65.88, 60.19, 66.53),
        (75.89, 69.14, 69.88, 68.70),
        (78.27, 73.75, 73.46, 73.87),
        (79.25, 73.96, 73.40, 74.04),
        (76.88, 70.74, 70.11, 71.56),
        (77.80, 73.33, 73.71, 72.15),
        (79.23, 74.18, 73.66, 73.98),
        (80.49, 75.04, 74.74, 74.80),
        (82.24, 74.48, 74.29, 74.06),
    ),
    "phishing": (
        (87.69, 87.22, 83.98, 83.64),
        (89.43, 87.49, 88.79, 87.92),
        (90.31, 89.51, 89.55, 89.29),
        (90.89, 90.76, 89.69, 90.51),
        (90.10, 89.36, 87.78, 88.95),
        (91.10, 90.24, 90.90, 91.16),
        (91.56, 90.65, 90.36, 90.16),
        (90.78, 91.12, 90.63, 91.30),
        (91.95, 91.28, 91.21, 90.90),
    ),
    "UJIIndoorLoc": (
        (0.2326, 0.2275, 0.2292, 0.2501),
        (0.1487, 0.1578, 0.2062, 0.1943),
        (0.1053, 0.1224, 0.1475, 0.1914),
        (0.1051, 0.1198, 0.1409, 0.1345),
        (0.1066, 0.1102, 0.1087, 0.1489),
        (0.0769, 0.0811, 0.0843, 0.1362),
        (0.0714, 0.0746, 0.0664, 0.1223),
        (0.0542, 0.0614, 0.0678, 0.0730),
        (0.0355, 0.0369, 0.0402, 0.0359),
    ),
    "MNIST": (
        (45.29, 39.98, 50.28, 44.49),
        (70.07, 76.70, 78.00, 75.23),
        (83.64, 82.92, 84.00, 82.60),
        (85.40, 86.33, 86.21, 85.28),
        (82.13, 82.57, 83.30, 81.43),
        (87.01, 87.51, 87.91, 87.02),
        (88.05, 89.03, 88.24, 87.91),
        (90.52, 90.63, 89.61, 89.32),
        (92.05, 92.97, 93.11, 91.74),
    ),
    "Superconduct": (
        (0.1668, 0.1667, 0.1783, 0.1373),
        (0.1253, 0.1387, 0.1348, 0.1246),
        (0.1173, 0.1256, 0.1299, 0.1230),
        (0.1125, 0.1140, 0.1308, 0.1148),
        (0.1080, 0.1043, 0.1059, 0.1110),
        (0.1071, 0.1003, 0.1009, 0.1052),
        (0.0985, 0.1001, 0.0984, 0.0973),
        (0.1020, 0.1075, 0.0985, 0.0956),
        (0.0832, 0.0833, 0.0841, 0.0801),
    ),
}
_FIGURES: Figures = {
    data: {line.name: row for line, row in zip(_LINES, rows, strict=True)}
    for data, rows in _NUMBERS_OF.items()
}
TABLE = Table(
    place="Table 6",
    title="FedOnce-L1 beside simple division of the privacy budget, by ε",
    data=DATA,
    lines=_LINES,
    columns=tuple(
        Column(f"P{host}", host=host, at=("paper", "small") if host == 1 else ("paper",))
        for host in range(1, 5)
    ),
    figures=_FIGURES,
    source="section 5.7, Table 6, with the settings of Table 10 and the networks of Table 3",
    claims=(
        Claim(
            "moments division is above simple division with ε = 2",
            better(name(L1, 2), name(BASELINE, 2)),
        ),
        Claim(
            "moments division is above simple division with ε = 8",
            better(name(L1, 8), name(BASELINE, 8)),
        ),
        Claim("a larger ε is better", better(name(L1, 8), name(L1, 2))),
        Claim(
            "ε = 8 is close to no noise",
            close(name(L1, 8), name(L1, None), 3.0),
            # "In most datasets": the paper's own numbers of gisette differ by 3.7.
            on=("covtype", "phishing", "MNIST"),
        ),
    ),
    small="3,000 rows, ε of 2 and 8, and P1 as the host; the fewer rows, the more noise",
    notes=(
        "targets are fixed and batches are Poisson samples, without which there is no guarantee",
        "Table 10 has no line of covtype: it has those of phishing",
        "d of gisette and covtype is 3, of MNIST 8",
        HOST,
    ),
    percent=True,
    digits=2,
)

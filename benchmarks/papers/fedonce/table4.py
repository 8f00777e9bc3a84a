"""FedOnce, Table 4."""

from __future__ import annotations

from benchmarks.papers.describe import EVALUATE, Column, Data, Line, Table, Tables
from benchmarks.papers.fedonce.common import ALL, L0, TABLES, UNSAID
from benchmarks.papers.measures import minutes_by_itself
from benchmarks.papers.rules import Claim, ratio


def _as_long(data: Data) -> list[Tables]:
    """Returns split training with as many epochs as the host's model has."""
    return [{**data.settings["split"], "epochs": data.settings["head"]["epochs"]}, EVALUATE]


_MINUTES = {
    "gisette": (0.62, 0.60),
    "covtype": (171.12, 52.33),
    "phishing": (4.07, 1.63),
    "UJIIndoorLoc": (23.15, 8.96),
    "Superconduct": (16.55, 7.54),
    "MNIST": (53.58, 24.17),
    "KMNIST": (56.47, 24.13),
    "Fashion-MNIST": (54.58, 23.00),
    "NUS-WIDE": (8.86, 5.17),
    "MovieLens": (39.88, 34.91),
}
TABLE = Table(
    place="Table 4",
    title="time of training",
    data=ALL,
    lines=(Line("SplitNN", _as_long), L0),
    columns=(Column("minutes", measure=minutes_by_itself, lower=True),),
    figures={
        data: {"SplitNN": (split,), "FedOnce-L0": (once,)}
        for data, (split, once) in _MINUTES.items()
    },
    source="section 5.2, Table 4",
    claims=(Claim("SplitNN takes longer", ratio("SplitNN", "FedOnce-L0", 1.0)),),
    small=TABLES,
    notes=(
        UNSAID,
        "each party's computing is counted as if it had a machine of its own: the slowest passive "
        "party beside the active one, one after the other in split training",
        "the paper does not say how many epochs SplitNN has in this table: here those of the host "
        "model; in a first run with half of them it took 0.5 to 0.8 times FedOnce's time",
    ),
    digits=3,
)

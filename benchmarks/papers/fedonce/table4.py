"""FedOnce, Table 4."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import EVALUATE, At, Column, Data, Line, Table, Tables
from benchmarks.papers.fedonce.common import ALL, HOST, L0, UNSAID
from benchmarks.papers.measures import minutes_by_itself, minutes_split_in_turn
from benchmarks.papers.rules import Claim, ratio


def _tenth(data: Data) -> Data:
    """Returns a data set with a tenth of the paper's epochs at the scale ``small``."""
    settings = dict(data.settings)
    for phase in ("local", "head"):
        epochs: int = settings[phase]["epochs"].paper
        settings[phase] = {**settings[phase], "epochs": At(epochs, epochs // 10)}
    return replace(data, settings=settings)


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
_APART, _IN_TURN = "minutes", "minutes, split training in turn"
TABLE = Table(
    place="Table 4",
    title="time of training",
    data=tuple(_tenth(each) for each in ALL),
    lines=(Line("SplitNN", _as_long), L0),
    columns=(
        Column(_APART, measure=minutes_by_itself, lower=True),
        Column(_IN_TURN, measure=minutes_split_in_turn, lower=True),
    ),
    figures={
        data: {"SplitNN": (split, split), "FedOnce-L0": (once, once)}
        for data, (split, once) in _MINUTES.items()
    },
    source="section 5.2, Table 4",
    claims=(
        Claim("SplitNN takes longer", ratio("SplitNN", "FedOnce-L0", 1.0, (_APART,))),
        Claim(
            "SplitNN takes longer if its parties compute in turn, and FedOnce's at the same time",
            ratio("SplitNN", "FedOnce-L0", 1.0, (_IN_TURN,)),
            ours=True,
        ),
    ),
    small="3,000 rows, and a tenth of the epochs, to which the time is proportional",
    notes=(
        UNSAID,
        HOST,
        "each party's computing is counted as if it had a machine of its own: the slowest passive "
        "party beside the active one, one after the other in split training",
        "the second claim is ours, and was written after the first results: the passive parties of "
        "split training are added up, those of FedOnce are not",
        "the paper measured on one machine, and says that FedOnce is faster because its local models "
        "are trained in parallel: the second column adds up all parties of split training",
        "the paper does not say how many epochs SplitNN has in this table: here those of the host "
        "model; in a first run with half of them it took 0.5 to 0.8 times FedOnce's time",
    ),
    digits=3,
)

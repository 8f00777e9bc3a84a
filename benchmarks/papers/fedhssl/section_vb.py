"""FedHSSL, section V-B: its main claim, where most rows are unaligned."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import At, Column, Line, Table
from benchmarks.papers.fedhssl.common import (
    DIGITS,
    LOCAL,
    NOTES,
    PAPER,
    RATES,
    SITES,
    fine,
    pretrained,
)
from benchmarks.papers.rules import Claim, better

_LOCAL = "FedLocalSimSiam"
_GAMMAS = (0.1, 0.5, 1.5)
_NAMES = {gamma: f"FedHSSL-SimSiam, γ = {gamma:g}" for gamma in _GAMMAS}
_SHARES = {"5%": 0.05, "20%": 0.2}


def _lines() -> tuple[Line, ...]:
    first = Line(_LOCAL, pretrain=pretrained("simsiam", **LOCAL), rates=RATES)
    others = [
        Line(name, pretrain=pretrained("simsiam", gamma=gamma), rates=RATES)
        for gamma, name in _NAMES.items()
    ]
    return first, *others


# All rows of those that are at hand.
_HERE = tuple(
    replace(each, rows=At(None, 10_000), settings=each.settings | {"rounds": 6})
    for each in (DIGITS, SITES)
)
TABLE = Table(
    place="Section V-B",
    title="FedHSSL beside FedLocal where most rows are unaligned, by γ",
    data=(*PAPER, *_HERE),
    lines=_lines(),
    columns=tuple(
        Column(f"{name} aligned", labels=200, changes={"rows.aligned": share})
        for name, share in _SHARES.items()
    ),
    finetune=fine,
    figures={},
    source="section V-B, in words; its Table IV has 40 % aligned rows and one γ",
    claims=tuple(
        Claim(f"{name} is above {_LOCAL}", better(name, _LOCAL), ours=True)
        for name in _NAMES.values()
    ),
    small="10,000 rows of the data sets at hand, a small network, 6 rounds, batches of 128, 150 "
    "steps of fine-tuning; one learning rate",
    notes=(
        *NOTES,
        "not in the paper: the question is whether FedHSSL is above FedLocal where it has many rows"
        " that FedSplitNN has not",
    ),
    seeds=(1, 2, 3),
    ours=True,
)

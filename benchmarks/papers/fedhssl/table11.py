"""FedHSSL, Table XI."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.fedhssl.attack import (
    HYBRID,
    LAMBDAS,
    LOCAL_NAME,
    NOTES,
    attacked,
    lambda_p,
)
from benchmarks.papers.fedhssl.common import DIGITS, PAPER, SMALL
from benchmarks.papers.rules import Claim, pair

_METHODS = (("FedLocal", LOCAL_NAME, 0.2), ("20 %", HYBRID, 0.2), ("40 %", HYBRID, 0.4))
_COLUMNS = tuple(f"{what}, {name}" for name, _, _ in _METHODS for what in ("A", "main"))


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for data in work.data(TABLE):
        for name, method, aligned in _METHODS:
            iso = lambda_p(data, aligned) if method == HYBRID else 0.0
            runs = [
                attacked(work, data, method, seed, aligned=aligned, iso=iso) for seed in work.seeds
            ]
            for strength in LAMBDAS:
                for what, key in (("A", "recovered"), ("main", "main")):
                    place = (data.name, f"λf = {strength:g}", f"{what}, {name}")
                    yield place, [each[f"{key} {strength:g}"] for each in runs]


def _of(*rows: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    return {f"λf = {x:g}": row for x, row in zip(LAMBDAS, rows, strict=True)}


TABLE = Table(
    place="Table XI",
    title="attack and main task with noise, 20 % beside 40 % aligned rows",
    data=(*PAPER, DIGITS),
    lines=tuple(Line(f"λf = {x:g}") for x in LAMBDAS),
    columns=tuple(Column(each, lower=each.startswith("A")) for each in _COLUMNS),
    figures={
        "NUSWIDE": _of(
            (0.471, 0.494, 0.471, 0.538, 0.474, 0.533),
            (0.465, 0.487, 0.449, 0.519, 0.471, 0.528),
            (0.449, 0.458, 0.443, 0.503, 0.458, 0.503),
        ),
        "Avazu": _of(
            (0.548, 0.582, 0.568, 0.614, 0.571, 0.616),
            (0.546, 0.577, 0.565, 0.602, 0.566, 0.610),
            (0.545, 0.576, 0.563, 0.594, 0.561, 0.603),
        ),
        "BHI": _of(
            (0.710, 0.756, 0.692, 0.783, 0.686, 0.788),
            (0.699, 0.732, 0.672, 0.764, 0.687, 0.773),
            (0.685, 0.710, 0.674, 0.758, 0.682, 0.764),
        ),
        "Modelnet": _of(
            (0.438, 0.597, 0.451, 0.652, 0.466, 0.658),
            (0.415, 0.573, 0.447, 0.613, 0.448, 0.631),
            (0.408, 0.564, 0.415, 0.594, 0.419, 0.598),
        ),
    },
    source="appendix C-D, Table XI; λp is 0.1, of NUSWIDE 0.4 (20 %) and 5 (40 %)",
    claims=(
        Claim(
            "the main task is better with 40 % aligned rows",
            pair([((line, "main, 40 %"), (line, "main, 20 %")) for line in _of((), (), ())]),
        ),
        Claim(
            "the main task of FedHSSL is above FedLocal's",
            pair([((line, "main, 20 %"), (line, "main, FedLocal")) for line in _of((), (), ())]),
        ),
        Claim(
            "stronger noise weakens the attack on FedHSSL",
            pair([(("λf = 25", "A, 20 %"), ("λf = 1", "A, 20 %"))]),
        ),
    ),
    small=SMALL,
    notes=NOTES,
    compute=compute,
)

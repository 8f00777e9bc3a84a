"""FedHSSL, Table VI."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.compute import Work
from benchmarks.papers.describe import Column, Line, Place, Table
from benchmarks.papers.fedhssl.attack import HYBRID, LOCAL_NAME, NOTES, attacked, lambda_p
from benchmarks.papers.fedhssl.common import DIGITS, PAPER, SMALL
from benchmarks.papers.rules import Claim, along, near

# The paper's three of four data sets on which noise suffices.
_GUARDED = ("Avazu", "BHI", "Modelnet", DIGITS.name)
_COLUMNS = ("A_SimSiam", "A_FedHSSL", "main", "A_FedHSSL, ISO", "main, ISO")


def compute(work: Work) -> Iterator[tuple[Place, list[float]]]:
    for data in work.data(TABLE):
        plain, noisy = (
            [attacked(work, data, HYBRID, seed, iso=iso) for seed in work.seeds]
            for iso in (0.0, lambda_p(data, 0.2))
        )
        # The paper's A_SimSiam attacks an encoder that the attacker pretrained by normal SimSiam.
        alone = [attacked(work, data, LOCAL_NAME, seed) for seed in work.seeds]
        cells = {
            "A_SimSiam": [each["recovered"] for each in alone],
            "A_FedHSSL": [each["recovered"] for each in plain],
            "main": [each["main 0"] for each in plain],
            "A_FedHSSL, ISO": [each["recovered"] for each in noisy],
            "main, ISO": [each["main 0"] for each in noisy],
        }
        for column, values in cells.items():
            yield (data.name, HYBRID, column), values


TABLE = Table(
    place="Table VI",
    title="labels that a passive party completes after pretraining, without and with noise",
    data=(*PAPER, DIGITS),
    lines=(Line(HYBRID),),
    columns=tuple(Column(each, lower=each.startswith("A_")) for each in _COLUMNS),
    figures={
        "NUSWIDE": {HYBRID: (0.439, 0.511, 0.574, 0.465, 0.539)},
        "Avazu": {HYBRID: (0.545, 0.547, 0.616, 0.524, 0.617)},
        "BHI": {HYBRID: (0.716, 0.726, 0.803, 0.682, 0.786)},
        "Modelnet": {HYBRID: (0.429, 0.441, 0.678, 0.426, 0.658)},
    },
    source="section VI-B, Table VI",
    claims=(
        Claim("noise makes the attack weaker", along(HYBRID, "A_FedHSSL", "A_FedHSSL, ISO")),
        Claim(
            "FedHSSL reveals more than local pretraining", along(HYBRID, "A_FedHSSL", "A_SimSiam")
        ),
        Claim(
            "with noise FedHSSL reveals less than local pretraining",
            along(HYBRID, "A_SimSiam", "A_FedHSSL, ISO"),
            on=_GUARDED,
        ),
        Claim(
            "that noise costs the main task at most 0.02",
            near([((HYBRID, "main, ISO"), (HYBRID, "main"))], 0.02, one_sided=True),
            on=_GUARDED,
        ),
    ),
    small=SMALL,
    notes=NOTES,
    compute=compute,
)

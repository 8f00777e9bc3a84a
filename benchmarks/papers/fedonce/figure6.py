"""FedOnce, Fig. 6."""

from __future__ import annotations

from benchmarks.papers.describe import At, Column, Line, Table
from benchmarks.papers.fedonce.common import (
    ALL,
    BY_ACCURACY,
    HOST,
    L0,
    TABLES,
    UNSAID,
    split_within,
)
from benchmarks.papers.measures import megabytes
from benchmarks.papers.rules import Claim, better, close

TIMES = (1, 5, 17)
FOLDS = At(5, 3)
SPLIT = tuple(Line(f"SplitNN, {times} ×", split_within(times, folds=FOLDS)) for times in TIMES)
MORE = tuple(
    Line(
        f"FedOnce-L0, {times} ×",
        split_within(times, after=True, folds=FOLDS),
        pretrain_of="FedOnce-L0",
    )
    for times in TIMES[1:]
)
ACCURACY = ("metric",)
COLUMNS = (Column("metric"), Column("MB", measure=megabytes, lower=True))
CLAIMS = (
    Claim(
        "with the bytes of one upload SplitNN is far below FedOnce-L0",
        better("FedOnce-L0", "SplitNN, 1 ×", ACCURACY),
    ),
    Claim(
        "with 17 times the bytes SplitNN is as good (KMNIST)",
        close("SplitNN, 17 ×", "FedOnce-L0", 0.5, ACCURACY),
        on=tuple(each.name for each in BY_ACCURACY),
    ),
    Claim(
        "FedOnce-L0 that goes on is above SplitNN for the same bytes",
        better("FedOnce-L0, 17 ×", "SplitNN, 17 ×", ACCURACY),
    ),
)
TABLE = Table(
    place="Fig. 6",
    title="one upload, and more rounds after it, by bytes of training",
    data=ALL,
    lines=(L0, *MORE, *SPLIT),
    columns=COLUMNS,
    figures={},
    source="section 5.3, Fig. 6, a chart; the text says 17 times the bytes on KMNIST",
    claims=CLAIMS,
    seeds=(1,),
    folds=FOLDS,
    small=TABLES + "; three folds",
    notes=(
        UNSAID,
        HOST,
        "the lines end at 1, 5 and 17 times the bytes of FedOnce's upload, in place of a curve",
        "a MB is 2^20 bytes",
        "SecureBoost's one tree takes more bytes than that, so it is left out",
    ),
    percent=True,
    digits=2,
)

"""FedOnce, Fig. 11."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.fedonce import figure6
from benchmarks.papers.fedonce.common import MNIST
from benchmarks.papers.rules import Claim, better

CIFAR = replace(MNIST, name="CIFAR-10", prepare="cifar10")
TABLE = replace(
    figure6.TABLE,
    place="Fig. 11",
    title="CIFAR-10 in quadrants: one upload, and more rounds, by bytes of training",
    data=(CIFAR,),
    source="appendix B, Fig. 11, a chart",
    claims=(
        figure6.CLAIMS[0],
        Claim(
            "FedOnce-L0 that goes on is above SplitNN for the same bytes",
            better("FedOnce-L0, 17 ×", "SplitNN, 17 ×", figure6.ACCURACY),
        ),
    ),
)

"""MocoSFL, appendix B.1: why MocoSFL-3 is below MocoSFL-1 with a small network, which the paper's
ResNets do not show.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import Column, Table, resolved
from benchmarks.papers.mocosfl.common import CIFAR10, NOTES, SMALL, line, pretraining
from benchmarks.papers.rules import Claim, better, near

_ALONE, _FIVE = "1 client", "5 clients"
_EVEN = {"deal": "even"}
_TWO = "MocoSFL-2"
_FASTER = "5 clients, bottoms 5 times as fast"
# Each client has the gradient of a fifth of the mean loss, so that averages move a fifth as far.
_PLAIN = resolved(pretraining(1)["optimizer"], "small")
_BOTTOMS = _PLAIN | {"lr": 5 * _PLAIN["lr"], "weight_decay": _PLAIN["weight_decay"] / 5}
TABLE = Table(
    place="Appendix B.1",
    title="how many of four convolutions the clients have, with one client and with five",
    data=(CIFAR10,),
    # ResNet-18 has no cut after two convolutions.
    lines=(line(1), replace(line(2), at=("small",)), line(3)),
    columns=(
        Column(_ALONE, parties=1, prepare=_EVEN),
        Column(_FIVE, parties=5, prepare=_EVEN),
        Column(
            _FASTER,
            parties=5,
            prepare=_EVEN,
            phases={"mocosfl": {"bottom_optimizer": _BOTTOMS}},
            at=("small",),
        ),
    ),
    figures={},
    source="appendix B.1, where MocoSFL-3 is within half a point of MocoSFL-1 in nearly all cells",
    claims=(
        Claim(
            "the cut alone does it: with one client, MocoSFL-3 is below MocoSFL-1",
            better("MocoSFL-1", "MocoSFL-3", (_ALONE,), floor=2.0),
            ours=True,
        ),
        Claim(
            "five clients whose bottoms are five times as fast lose at most a point beside one",
            near([((name, _FASTER), (name, _ALONE)) for name in ("MocoSFL-1", "MocoSFL-3")], 1.0),
            ours=True,
        ),
        Claim(
            "MocoSFL-2 is below MocoSFL-1",
            better("MocoSFL-1", _TWO, floor=0.5),
            ours=True,
        ),
        Claim(
            "MocoSFL-3 is below MocoSFL-2",
            better(_TWO, "MocoSFL-3", floor=0.5),
            ours=True,
        ),
    ),
    small=SMALL,
    ours=True,
    notes=(
        *NOTES,
        "not in the paper, whose networks are deep: it asks whether the cut or the clients make"
        " MocoSFL-3 worse here",
    ),
    seeds=(1, 2, 3),
    percent=True,
    digits=2,
)

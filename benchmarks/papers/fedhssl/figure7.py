"""FedHSSL, Fig. 7."""

from __future__ import annotations

from benchmarks.papers.describe import At, Column, Data, Line, Table, Tables, resolved
from benchmarks.papers.fedhssl.common import DATA, NOTES, RATES, SMALL, TWENTY, fine, pretrained
from benchmarks.papers.rules import Claim, along

_UPDATES = (1, 4, 8)
_ROUNDS = (At(2, 1), At(10, 2))


def _all_rounds(data: Data) -> list[Tables]:
    """Returns pretraining with as many rounds as in Table III: 10 of NUSWIDE, 40 of the others."""
    rounds = At(resolved(data.settings["rounds"], "paper"), 6)
    phases: list[Tables] = pretrained("simsiam", rounds=rounds)(data)
    return phases


_PRETRAINING = {
    "few": pretrained("simsiam", rounds=_ROUNDS[0]),
    "some": pretrained("simsiam", rounds=_ROUNDS[1]),
    "all": _all_rounds,
}
TABLE = Table(
    place="Fig. 7",
    title="several updates on one exchange (e) of the cross-party step",
    data=DATA,
    lines=tuple(
        Line(
            f"{name} rounds",
            pretrain=pretraining,
            rates=RATES,
            at=("paper",) if name == "all" else ("paper", "small"),
        )
        for name, pretraining in _PRETRAINING.items()
    ),
    columns=tuple(
        Column(f"e = {e}", labels=200, changes=TWENTY, phases={"fedhssl": {"local_updates": e}})
        for e in _UPDATES
    ),
    finetune=fine,
    figures={},
    source="section V-D, Fig. 7, a chart without numbers",
    claims=(
        Claim(
            "after the same few rounds, e = 4 is above e = 1", along("few rounds", "e = 1", "e = 4")
        ),
        Claim(
            "after the same rounds, e = 8 is above e = 1", along("some rounds", "e = 1", "e = 8")
        ),
    ),
    seeds=(1, 2, 3),
    small=SMALL + "; 1 and 2 rounds; one learning rate",
    notes=(
        *NOTES,
        "each number of rounds is a run of its own with its own schedule of the learning rate;"
        " 'few' is 2 rounds, 'some' 10, 'all' 40, of NUSWIDE 10 (10 and 40 are the paper's)",
    ),
)

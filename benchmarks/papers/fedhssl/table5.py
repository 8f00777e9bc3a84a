"""FedHSSL, Table V."""

from __future__ import annotations

from benchmarks.papers.describe import Column, Line, Scale, Table
from benchmarks.papers.fedhssl.common import (
    ALIGNED,
    DATA,
    NAMES,
    NOTES,
    RATES,
    SMALL,
    fine,
    guided,
    hybrid,
    local,
    pretrained,
    starred,
)
from benchmarks.papers.rules import Claim, better


def _lines() -> tuple[Line, ...]:
    """Returns FedLocal and FedGSSL*, each without and with aggregation. FedGSSL* with it is
    FedHSSL*.
    """
    found: list[Line] = []
    for ssl, name in NAMES.items():
        at: tuple[Scale, ...] = ("paper", "small") if ssl == "simsiam" else ("paper",)
        whole = Line(
            f"FedLocal{name} + PMA", pretrain=pretrained(ssl, cross=False), rates=RATES, at=at
        )
        found += [local(ssl, at=at), whole]
        for line in (guided(ssl, at=at), hybrid(ssl, at=at)):
            found += [line, starred(line)]
    return tuple(found)


def _figures(**of: tuple[float, ...]) -> dict[str, dict[str, tuple[float]]]:
    """Returns the figures, data set by data set. ``of``: by SSL method the numbers of FedLocal, of
    it with PMA, of FedGSSL* and of it with PMA, for the four data sets one after the other.
    """
    found: dict[str, dict[str, tuple[float]]] = {}
    for place, data in enumerate(("NUSWIDE", "Avazu", "BHI", "Modelnet")):
        for ssl, values in of.items():
            name = NAMES[ssl]
            lines = (
                f"FedLocal{name}",
                f"FedLocal{name} + PMA",
                f"FedGSSL-{name}*",
                f"FedHSSL-{name}*",
            )
            found.setdefault(data, {}).update(
                {line: (value,) for line, value in zip(lines, values[4 * place :][:4], strict=True)}
            )
    return found


TABLE = Table(
    place="Table V",
    title="guidance by cross-party encoders, and partial model aggregation (PMA)",
    data=DATA,
    lines=_lines(),
    columns=(Column("200 labels", labels=200, changes=ALIGNED),),
    finetune=fine,
    figures=_figures(
        simsiam=(
            0.505,
            0.537,
            0.543,
            0.553,
            0.580,
            0.582,
            0.606,
            0.609,
            0.760,
            0.743,
            0.783,
            0.789,
            0.622,
            0.599,
            0.679,
            0.688,
        ),
        byol=(
            0.514,
            0.512,
            0.543,
            0.544,
            0.560,
            0.575,
            0.591,
            0.606,
            0.760,
            0.756,
            0.778,
            0.785,
            0.635,
            0.629,
            0.640,
            0.656,
        ),
        moco=(
            0.566,
            0.563,
            0.613,
            0.612,
            0.573,
            0.587,
            0.603,
            0.611,
            0.763,
            0.760,
            0.787,
            0.795,
            0.659,
            0.639,
            0.664,
            0.674,
        ),
    ),
    source="section V-C, Table V; Avazu's FedLocalSimSiam is 0.580 there and 0.575 in Table IV",
    claims=(
        Claim("FedGSSL* is above FedLocal", better("FedGSSL-SimSiam*", "FedLocalSimSiam")),
        Claim(
            "aggregation helps where encoders are guided",
            better("FedHSSL-SimSiam*", "FedGSSL-SimSiam*"),
        ),
        Claim(
            "aggregation harms local pretraining by itself",
            better("FedLocalSimSiam", "FedLocalSimSiam + PMA"),
            on=("BHI", "Modelnet", "MNIST quadrants"),
        ),
    ),
    small=SMALL + "; SimSiam alone; one learning rate",
    notes=(*NOTES, "FedGSSL* with PMA is FedHSSL*; the lines without a star are beside the paper"),
)

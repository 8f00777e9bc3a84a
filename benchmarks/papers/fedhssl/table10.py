"""FedHSSL, Table X."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import Column, Table
from benchmarks.papers.fedhssl.common import (
    ALIGNED,
    AVAZU,
    DATA,
    GBDT,
    LABELS,
    LOGISTIC,
    NAMES,
    NOTES,
    NUSWIDE,
    SITES,
    SMALL,
    SPLITNN,
    TWENTY,
    fine,
    hybrid,
    local,
)
from benchmarks.papers.rules import Claim, along, better

_ON = tuple(each.name for each in (NUSWIDE, AVAZU, SITES))
_NAMES = {(labels, share): f"{labels}, {share}%" for labels in LABELS for share in (20, 40)}
_FORTY = tuple(_NAMES[labels, 40] for labels in LABELS)
_COLUMNS = tuple(
    Column(
        name,
        labels=labels,
        changes=TWENTY if share == 20 else ALIGNED,
        at=("paper", "small") if labels == 200 else ("paper",),
    )
    for (labels, share), name in _NAMES.items()
)


def _once(*values: float) -> tuple[float | None, ...]:
    """Returns the numbers of a method for which the share of aligned rows does not count."""
    return tuple(each for value in values for each in (None, value))


_SSL = tuple(
    make(
        ssl,
        **({"only": _FORTY} if make is local else {}),
        at=("paper", "small") if ssl == "simsiam" else ("paper",),
    )
    for make in (local, hybrid)
    for ssl in NAMES
)
TABLE = Table(
    place="Table X",
    title="20 % beside 40 % aligned rows",
    data=DATA,
    lines=(
        replace(LOGISTIC, on=_ON, only=_FORTY),
        replace(GBDT, on=_ON, only=_FORTY),
        replace(SPLITNN, only=_FORTY),
        *_SSL,
    ),
    columns=_COLUMNS,
    finetune=fine,
    figures={
        "NUSWIDE": {
            "LR": _once(0.530, 0.558, 0.580, 0.589, 0.606),
            "LGB": _once(0.425, 0.465, 0.526, 0.556, 0.587),
            "FedSplitNN": _once(0.495, 0.535, 0.560, 0.573, 0.591),
            "FedLocalSimSiam": _once(0.505, 0.536, 0.596, 0.603, 0.612),
            "FedLocalBYOL": _once(0.514, 0.527, 0.585, 0.599, 0.606),
            "FedLocalMoCo": _once(0.566, 0.596, 0.625, 0.634, 0.639),
            "FedHSSL-SimSiam": (
                0.574,
                0.607,
                0.624,
                0.641,
                0.636,
                0.651,
                0.643,
                0.662,
                0.654,
                0.670,
            ),
            "FedHSSL-BYOL": (0.551, 0.598, 0.592, 0.624, 0.617, 0.645, 0.633, 0.659, 0.640, 0.664),
            "FedHSSL-MoCo": (0.611, 0.615, 0.636, 0.642, 0.653, 0.658, 0.662, 0.668, 0.665, 0.670),
        },
        "Avazu": {
            "LR": _once(0.554, 0.574, 0.596, 0.602, 0.575),
            "LGB": _once(0.563, 0.568, 0.595, 0.621, 0.620),
            "FedSplitNN": _once(0.588, 0.581, 0.599, 0.595, 0.615),
            "FedLocalSimSiam": _once(0.575, 0.585, 0.591, 0.608, 0.629),
            "FedLocalBYOL": _once(0.560, 0.597, 0.600, 0.601, 0.605),
            "FedLocalMoCo": _once(0.573, 0.591, 0.584, 0.596, 0.601),
            "FedHSSL-SimSiam": (
                0.616,
                0.623,
                0.625,
                0.636,
                0.631,
                0.649,
                0.644,
                0.648,
                0.657,
                0.663,
            ),
            "FedHSSL-BYOL": (0.610, 0.615, 0.617, 0.634, 0.626, 0.631, 0.630, 0.630, 0.641, 0.648),
            "FedHSSL-MoCo": (0.614, 0.616, 0.623, 0.632, 0.635, 0.638, 0.637, 0.641, 0.646, 0.658),
        },
        "BHI": {
            "FedSplitNN": _once(0.731, 0.738, 0.754, 0.752, 0.760),
            "FedLocalSimSiam": _once(0.760, 0.764, 0.788, 0.785, 0.798),
            "FedLocalBYOL": _once(0.760, 0.769, 0.781, 0.786, 0.796),
            "FedLocalMoCo": _once(0.763, 0.771, 0.784, 0.793, 0.800),
            "FedHSSL-SimSiam": (
                0.803,
                0.805,
                0.799,
                0.816,
                0.816,
                0.822,
                0.824,
                0.823,
                0.823,
                0.830,
            ),
            "FedHSSL-BYOL": (0.788, 0.791, 0.793, 0.806, 0.808, 0.821, 0.811, 0.822, 0.817, 0.825),
            "FedHSSL-MoCo": (0.797, 0.806, 0.800, 0.817, 0.815, 0.822, 0.817, 0.829, 0.818, 0.831),
        },
        "Modelnet": {
            "FedSplitNN": _once(0.612, 0.684, 0.733, 0.765, 0.771),
            "FedLocalSimSiam": _once(0.622, 0.698, 0.761, 0.779, 0.797),
            "FedLocalBYOL": _once(0.635, 0.707, 0.760, 0.775, 0.794),
            "FedLocalMoCo": _once(0.659, 0.722, 0.784, 0.798, 0.815),
            "FedHSSL-SimSiam": (
                0.678,
                0.707,
                0.763,
                0.772,
                0.793,
                0.806,
                0.806,
                0.826,
                0.826,
                0.833,
            ),
            "FedHSSL-BYOL": (0.678, 0.681, 0.740, 0.752, 0.778, 0.800, 0.799, 0.807, 0.812, 0.825),
            "FedHSSL-MoCo": (0.696, 0.705, 0.760, 0.764, 0.787, 0.804, 0.809, 0.822, 0.826, 0.830),
        },
    },
    source="appendix C-C, Table X; the columns are labelled rows and the share of aligned rows",
    claims=(
        Claim(
            "40 % aligned is above 20 %, 200 labels",
            along("FedHSSL-SimSiam", "200, 20%", "200, 40%"),
        ),
        Claim(
            "40 % aligned is above 20 %, 1,000 labels",
            along("FedHSSL-SimSiam", "1000, 20%", "1000, 40%"),
        ),
        Claim("FedHSSL is above logistic regression", better("FedHSSL-SimSiam", "LR"), on=_ON),
    ),
    small=SMALL + "; SimSiam with 200 labels; one learning rate",
    notes=(
        *NOTES,
        "LR is split training of a linear encoder and a linear top, with all columns in one place",
    ),
)

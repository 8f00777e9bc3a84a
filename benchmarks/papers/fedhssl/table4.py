"""FedHSSL, Table IV."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.papers.describe import Table
from benchmarks.papers.fedhssl.common import (
    ALIGNED,
    AVAZU,
    BHI,
    CVT,
    DATA,
    GBDT,
    NOTES,
    NUSWIDE,
    SITES,
    SMALL,
    SPLITNN,
    fine,
    hybrid,
    local,
    of_labels,
)
from benchmarks.papers.rules import Claim, along, better

_TWO = tuple(each.name for each in (NUSWIDE, AVAZU, BHI, SITES))
_COLUMNS = tuple(each.name for each in (NUSWIDE, AVAZU, SITES))
TABLE = Table(
    place="Table IV",
    title="FedHSSL beside supervised, semi-supervised and local self-supervised training",
    data=DATA,
    lines=(
        replace(GBDT, on=_COLUMNS),
        SPLITNN,
        replace(CVT, on=_TWO),
        local("simsiam"),
        local("byol", at=("paper",)),
        local("moco", at=("paper",)),
        hybrid("simsiam"),
        hybrid("byol", at=("paper",)),
        hybrid("moco", at=("paper",)),
    ),
    columns=of_labels(ALIGNED),
    finetune=fine,
    figures={
        "NUSWIDE": {
            "LGB": (0.425, 0.465, 0.526, 0.556, 0.587),
            "FedSplitNN": (0.495, 0.535, 0.560, 0.573, 0.591),
            "FedCVT": (0.522, 0.555, 0.602, 0.621, 0.629),
            "FedLocalSimSiam": (0.505, 0.536, 0.596, 0.603, 0.612),
            "FedLocalBYOL": (0.514, 0.527, 0.585, 0.599, 0.606),
            "FedLocalMoCo": (0.566, 0.596, 0.625, 0.634, 0.639),
            "FedHSSL-SimSiam": (0.607, 0.641, 0.651, 0.662, 0.670),
            "FedHSSL-BYOL": (0.598, 0.624, 0.645, 0.659, 0.664),
            "FedHSSL-MoCo": (0.615, 0.642, 0.658, 0.668, 0.670),
        },
        "Avazu": {
            "LGB": (0.563, 0.568, 0.595, 0.621, 0.620),
            "FedSplitNN": (0.588, 0.581, 0.599, 0.595, 0.615),
            "FedCVT": (0.594, 0.606, 0.608, 0.637, 0.647),
            "FedLocalSimSiam": (0.575, 0.585, 0.591, 0.608, 0.629),
            "FedLocalBYOL": (0.560, 0.597, 0.600, 0.601, 0.605),
            "FedLocalMoCo": (0.573, 0.591, 0.584, 0.596, 0.601),
            "FedHSSL-SimSiam": (0.623, 0.636, 0.649, 0.648, 0.663),
            "FedHSSL-BYOL": (0.615, 0.634, 0.631, 0.630, 0.648),
            "FedHSSL-MoCo": (0.616, 0.632, 0.638, 0.641, 0.658),
        },
        "BHI": {
            "FedSplitNN": (0.731, 0.738, 0.754, 0.752, 0.760),
            "FedCVT": (0.742, 0.747, 0.755, 0.758, 0.782),
            "FedLocalSimSiam": (0.760, 0.764, 0.788, 0.785, 0.798),
            "FedLocalBYOL": (0.760, 0.769, 0.781, 0.786, 0.796),
            "FedLocalMoCo": (0.763, 0.771, 0.784, 0.793, 0.800),
            "FedHSSL-SimSiam": (0.805, 0.816, 0.822, 0.823, 0.830),
            "FedHSSL-BYOL": (0.791, 0.806, 0.821, 0.822, 0.825),
            "FedHSSL-MoCo": (0.806, 0.817, 0.822, 0.829, 0.831),
        },
        "Modelnet": {
            "FedSplitNN": (0.612, 0.684, 0.733, 0.765, 0.771),
            "FedLocalSimSiam": (0.622, 0.698, 0.761, 0.779, 0.797),
            "FedLocalBYOL": (0.635, 0.707, 0.760, 0.775, 0.794),
            "FedLocalMoCo": (0.659, 0.722, 0.784, 0.798, 0.815),
            "FedHSSL-SimSiam": (0.707, 0.772, 0.806, 0.826, 0.833),
            "FedHSSL-BYOL": (0.681, 0.752, 0.800, 0.807, 0.825),
            "FedHSSL-MoCo": (0.705, 0.764, 0.804, 0.822, 0.830),
        },
    },
    source="section V-B, Table IV (Fig. 5 draws the same numbers); the columns are labelled rows",
    claims=(
        Claim(
            "with 200 labels FedHSSL-SimSiam is far above FedLocalSimSiam",
            better("FedHSSL-SimSiam", "FedLocalSimSiam", ("200",)),
        ),
        Claim(
            "with 200 labels FedHSSL-MoCo is above FedLocalMoCo",
            better("FedHSSL-MoCo", "FedLocalMoCo", ("200",)),
        ),
        Claim(
            "with 1,000 labels FedHSSL-SimSiam is still above FedLocalSimSiam",
            better("FedHSSL-SimSiam", "FedLocalSimSiam", ("1000",)),
        ),
        Claim("FedHSSL-MoCo is above FedCVT", better("FedHSSL-MoCo", "FedCVT"), on=_TWO),
        Claim("FedHSSL-SimSiam is above FedSplitNN", better("FedHSSL-SimSiam", "FedSplitNN")),
        Claim("more labels help FedHSSL-SimSiam", along("FedHSSL-SimSiam", "200", "1000")),
    ),
    small=SMALL + "; SimSiam alone; 200 and 400 labels; one learning rate",
    notes=NOTES,
)

"""The measured leakage of training presets, for ``vfl new`` and the reports of runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PresetMeasurement:
    """The measurements of a preset on the tables ``TABLES`` of a kind of task, from
    ``benchmarks/results/defaults-protect.json``; a mean if there are several.

    ``lost``: the loss of utility compared with ``none``, in points of AUC or accuracy, or per cent
    of a regression's RMSE. ``labels``: the label inference by a passive party that knows no labels,
    as AUC or accuracy, or |ρ| for a regression; None if no attack applies. ``columns``: the active
    party's reconstruction of a passive party's numeric columns, as R².
    """

    lost: float
    labels: float | None
    columns: float

    def shows_more_labels(self, other: PresetMeasurement) -> bool:
        """Returns whether this preset leaks more of the labels than ``other``; False if one was not
        attacked.
        """
        return self.labels is not None and other.labels is not None and self.labels > other.labels


# The tables of each kind. Two classes have the table of README.md and docs/results/defaults.md.
TABLES: dict[str, tuple[str, ...]] = {
    "binary": ("credit",),
    "multiclass": ("five classes", "digits"),
    "regression": ("numbers", "diabetes"),
}
# Words for these tables.
WHERE: dict[str, str] = {
    "binary": "on credit (3,000 rows, two seeds)",
    "multiclass": "on five classes and digits, means",
    "regression": "on numbers and diabetes, means",
}
MEASURED: dict[str, dict[str, PresetMeasurement]] = {
    "binary": {
        "none": PresetMeasurement(0.0, 1.0, 0.842),
        "labels": PresetMeasurement(-1.26, None, 0.953),
        "columns": PresetMeasurement(-0.9, 1.0, 0.457),
        "both": PresetMeasurement(0.14, None, 0.563),
        "trees": PresetMeasurement(-1.52, 0.752, 0.624),
    },
    "multiclass": {
        "none": PresetMeasurement(0.0, 0.951, 0.846),
        "labels": PresetMeasurement(1.41, None, 0.853),
        "columns": PresetMeasurement(-0.39, 0.895, 0.674),
        "both": PresetMeasurement(2.0, None, 0.798),
        "trees": PresetMeasurement(2.75, 0.641, 0.558),
    },
    "regression": {
        "none": PresetMeasurement(0.0, 0.969, 0.976),
        "columns": PresetMeasurement(6.35, 0.888, 0.762),
        "trees": PresetMeasurement(18.71, None, 0.648),
    },
}
# R² with which the active party predicts the other columns from its own, without any message.
ALONE: dict[str, float] = {"binary": 0.277, "multiclass": 0.29, "regression": 0.407}

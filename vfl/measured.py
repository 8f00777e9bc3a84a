"""The measured leakage of training presets, for ``vfl new`` and the reports of runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PresetMeasurement:
    """The measurements of a preset on all tables of a kind of task in
    ``benchmarks/results/defaults-protect.json``.

    ``lost``: the mean loss of utility compared with ``none``, in points of AUC or accuracy, or per
    cent of a regression's RMSE. ``labels``: the highest label inference by a passive party that
    knows no labels, as AUC or accuracy, or |ρ| for a regression; None if no attack applies.
    ``columns``: the active party's highest reconstruction of a passive party's numeric columns, as
    R².
    """

    lost: float
    labels: float | None
    columns: float

    def shows_more_labels(self, other: PresetMeasurement) -> bool:
        """Returns whether this preset leaks more of the labels than ``other``; False if one was not
        attacked.
        """
        return self.labels is not None and other.labels is not None and self.labels > other.labels


# Words for the tables of each kind.
WHERE: dict[str, str] = {
    "binary": "four tables (3,000 rows or fewer, two seeds)",
    "multiclass": "two tables (3,000 rows or fewer, two seeds)",
    "regression": "two tables (3,000 rows or fewer, two seeds)",
}
MEASURED: dict[str, dict[str, PresetMeasurement]] = {
    "binary": {
        "none": PresetMeasurement(0.0, 1.0, 0.873),
        "labels": PresetMeasurement(-0.05, None, 0.996),
        "columns": PresetMeasurement(-0.16, 1.0, 0.769),
        "both": PresetMeasurement(0.8, None, 0.816),
        "trees": PresetMeasurement(0.1, 0.999, 0.624),
    },
    "multiclass": {
        "none": PresetMeasurement(0.0, 0.993, 0.96),
        "labels": PresetMeasurement(1.41, None, 0.997),
        "columns": PresetMeasurement(-0.39, 0.987, 0.89),
        "both": PresetMeasurement(2.0, None, 0.983),
        "trees": PresetMeasurement(2.75, 0.881, 0.734),
    },
    "regression": {
        "none": PresetMeasurement(0.0, 0.971, 0.998),
        "columns": PresetMeasurement(6.35, 0.905, 0.857),
        "trees": PresetMeasurement(18.71, None, 0.801),
    },
}
# The highest R² with which the active party predicts the other columns from its own, without any
# message.
ALONE: dict[str, float] = {"binary": 0.736, "multiclass": 0.342, "regression": 0.411}

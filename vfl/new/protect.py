"""The presets of ``vfl new recipe --protect``: their training settings and measured leakage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from vfl.new.files import make_split_training
from vfl.new.rules import Kind, ModelSizes

Protect = Literal["none", "labels", "columns", "both"]
# The choice of a training: a preset of split training, or trees.
Chosen = Literal[Protect, "trees"]
# Presets with which no message of the active party depends on labels.
LABEL_FREE = frozenset({"labels", "both"})
# The number of values per row in a passive party's upload, and the widths of narrow embeddings.
UPLOAD = 8
WIDTHS: dict[Kind, int] = {"binary": 2, "multiclass": 4, "regression": 2}
# The weight λ of MID's regularizer.
MID = 1e-3
TREES: dict[str, Any] = {"kind": "gbdt", "trees": 400, "early_stopping": 30}


def make_preset_training(sizes: ModelSizes, kind: Kind, protect: Protect) -> dict[str, Any]:
    """Returns the tables of a recipe about its training: ``model`` and ``phases``.

    Args:
        sizes: the sizes of split training.
        kind: the kind of the task.
        protect: ``none`` is split training. ``columns`` is split training with narrow, randomised
            embeddings (MID, arXiv 2301.01142). With ``labels``, each passive party uploads
            principal components of its columns once, and the active party grows trees on them.
            ``both`` is ``labels`` with fewer components.
    """
    if protect in LABEL_FREE:
        width = UPLOAD if protect == "labels" else WIDTHS[kind]
        return {
            "model": {"embedding_size": width, "top": dict(TREES)},
            "phases": [
                {"kind": "fedonce", "objective": "pca"},
                {"kind": "head"},
                {"kind": "evaluate"},
            ],
        }
    training = make_split_training(sizes, kind)
    if protect == "columns":
        model, (split, *others) = training["model"], training["phases"]
        narrow = {**model, "embedding_size": min(model["embedding_size"], WIDTHS[kind])}
        training = {"model": narrow, "phases": [{**split, "mid": MID}, *others]}
    return training


@dataclass(frozen=True)
class PresetMeasurement:
    """The measurements of a preset, as means over the tables in
    ``benchmarks/results/defaults-protect.json``.

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


MEASURED: dict[Kind, dict[str, PresetMeasurement]] = {
    "binary": {
        "none": PresetMeasurement(0.0, 1.0, 0.817),
        "labels": PresetMeasurement(-0.05, None, 0.961),
        "columns": PresetMeasurement(-0.16, 1.0, 0.395),
        "both": PresetMeasurement(0.8, None, 0.697),
        "trees": PresetMeasurement(0.1, 0.9, 0.502),
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
ALONE: dict[Kind, float] = {"binary": 0.528, "multiclass": 0.29, "regression": 0.407}
# The default presets. In a regression, trees on uploads lose too much accuracy.
DEFAULTS: dict[Kind, Protect] = {"binary": "labels", "multiclass": "labels", "regression": "none"}
_LOST = {"binary": "points of AUC", "multiclass": "points of AUC", "regression": "% of RMSE"}
_READ = {"binary": "AUC", "multiclass": "accuracy", "regression": "|ρ|"}


def make_comments(kind: Kind, chosen: Chosen) -> list[str]:
    """Returns comment lines for a recipe with the measured leakage of each preset. The chosen
    preset is marked.
    """
    heads = f"labels ({_READ[kind]}) by the others, columns (R²) by the active party"
    return [
        "Leakage in rehearsed attacks on public and synthetic tables, and cost. Each figure is a",
        "lower bound: another attack may read more.",
        f"{heads}.",
        f"From its own columns, without any message, it predicts columns to {ALONE[kind]:.2f}.",
        "Your own columns, and a changed recipe, differ: rehearse them with vfl leaks.",
        *(
            f"{'>' if name == chosen else ' '} {_option(name)}: {describe_leakage(kind, name)}"
            for name in (*get_args(Protect), "trees")
        ),
    ]


def describe_leakage_with_units(kind: Kind, preset: str) -> str:
    """Returns the leakage and cost of a preset as text with units."""
    return describe_leakage(kind, preset, f" ({_READ[kind]})", " (R²)")


def describe_leakage(kind: Kind, preset: str, label_unit: str = "", column_unit: str = "") -> str:
    """Returns the leakage and cost of a preset, or of ``trees``, as text. ``label_unit``,
    ``column_unit``: texts after the figures.
    """
    measured = MEASURED[kind].get(preset)
    if preset in LABEL_FREE:
        labels = ": none sent (by structure, tested)"
    elif measured is None or measured.labels is None:
        labels = " not measured"
    else:
        labels = f" at least {measured.labels:.2f}{label_unit}"
    if measured is None:
        return f"labels{labels}, columns not measured; cost not measured"
    text = f"labels{labels}, columns at least {measured.columns:.2f}{column_unit}"
    if preset == "none":
        return text
    # A gain is within the noise of two seeds, so it is not reported.
    costs = (
        f"{measured.lost:.1f} {_LOST[kind]}"
        if measured.lost >= 0.05
        else "nothing in the mean of the tables"
    )
    return f"{text}; costs {costs}"


def _option(name: str) -> str:
    return "--method secureboost" if name == "trees" else f"--protect {name}"

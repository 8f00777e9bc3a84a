"""The presets of ``vfl new recipe --protect``: their training, and their measured leakage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from vfl.new.files import split_training
from vfl.new.rules import Kind, ModelSizes

Protect = Literal["none", "labels", "columns", "both"]
# Trees have no presets.
Chosen = Literal[Protect, "trees"]
# Presets with which no message of the active party depends on labels.
LABEL_FREE = frozenset({"labels", "both"})
# The number of values that a passive party uploads for a row, and the widths of a narrower
# embedding; several classes need a wider one.
UPLOAD = 8
WIDTHS: dict[Kind, int] = {"binary": 2, "multiclass": 4, "regression": 2}
# The weight λ of MID's regularizer.
MID = 1e-3
TREES: dict[str, Any] = {"kind": "gbdt", "trees": 400, "early_stopping": 30}


def training_of(sizes: ModelSizes, kind: Kind, protect: Protect) -> dict[str, Any]:
    """Returns the tables of a recipe about its training: ``model`` and ``phases``.

    Args:
        sizes: the sizes of split training.
        kind: the task's kind.
        protect: ``none`` is split training. ``columns`` is split training with narrower, randomised
            embeddings (MID, arXiv 2301.01142). With ``labels`` each passive party uploads principal
            components of its columns once, and the active party grows trees on them; ``both``
            uploads fewer.
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
    training = split_training(sizes, kind)
    if protect == "columns":
        model, (split, *others) = training["model"], training["phases"]
        narrow = {**model, "embedding_size": min(model["embedding_size"], WIDTHS[kind])}
        training = {"model": narrow, "phases": [{**split, "mid": MID}, *others]}
    return training


@dataclass(frozen=True)
class PresetMeasurement:
    """The results of a preset in ``benchmarks/results/defaults-protect.json``, means over tables.

    ``lost``: the loss against ``none``, in points of AUC or accuracy, or per cent of a regression's
    RMSE. ``labels``: the label inference of a passive party that knows none, as AUC, or |ρ| of a
    regression; None if no attack applies. ``columns``: the active party's reconstruction of a
    passive party's numbers, R².
    """

    lost: float
    labels: float | None
    columns: float

    def shows_more_labels(self, other: PresetMeasurement) -> bool:
        """Returns whether it leaks more of the labels, as far as they were attacked."""
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
# R² of the columns that the active party predicts from its own columns, without any message.
ALONE: dict[Kind, float] = {"binary": 0.528, "multiclass": 0.29, "regression": 0.407}
# The defaults. A regression loses too much with trees on uploads.
DEFAULTS: dict[Kind, Protect] = {"binary": "labels", "multiclass": "labels", "regression": "none"}
_LOST = {"binary": "points of AUC", "multiclass": "points of AUC", "regression": "% of RMSE"}
_READ = {"binary": "AUC", "multiclass": "accuracy", "regression": "|ρ|"}


def comments(kind: Kind, chosen: Chosen) -> list[str]:
    """Returns lines for a recipe: the measured leakage of each preset; the chosen one is marked."""
    heads = f"labels ({_READ[kind]}) by the others, columns (R²) by the active party"
    return [
        "Leakage in rehearsed attacks on public and synthetic tables, and cost. Each figure is a",
        "lower bound: another attack may read more.",
        f"{heads}.",
        f"From its own columns, without any message, it predicts columns to {ALONE[kind]:.2f}.",
        "Your own columns, and a changed recipe, differ: rehearse them with vfl leaks.",
        *(
            f"{'>' if name == chosen else ' '} {_option(name)}: {words(kind, name)}"
            for name in (*get_args(Protect), "trees")
        ),
    ]


def in_units(kind: Kind, preset: str) -> str:
    """Returns ``words`` with the units of the figures, for a line without a heading."""
    return words(kind, preset, f" ({_READ[kind]})", " (R²)")


def words(kind: Kind, preset: str, of_labels: str = "", of_columns: str = "") -> str:
    """Returns the leakage and cost of a preset, or of ``trees``, as text. ``of_labels``,
    ``of_columns``: the units of the figures.
    """
    of = MEASURED[kind].get(preset)
    if preset in LABEL_FREE:
        labels = ": none sent (by structure, tested)"
    elif of is None or of.labels is None:
        labels = " not measured"
    else:
        labels = f" at least {of.labels:.2f}{of_labels}"
    if of is None:
        return f"labels{labels}, columns not measured; cost not measured"
    text = f"labels{labels}, columns at least {of.columns:.2f}{of_columns}"
    if preset == "none":
        return text
    # A gain is within the noise of two seeds, so it is not reported.
    costs = (
        f"{of.lost:.1f} {_LOST[kind]}" if of.lost >= 0.05 else "nothing in the mean of the tables"
    )
    return f"{text}; costs {costs}"


def _option(name: str) -> str:
    return "--method secureboost" if name == "trees" else f"--protect {name}"

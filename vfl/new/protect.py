"""The presets of ``vfl new recipe --protect``: what they add to split training, and what they were
measured to give away.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vfl.new.rules import Kind

Protect = Literal["none", "labels", "columns", "both"]
# Trees have no presets.
Chosen = Literal[Protect, "trees"]
# Numbers of an embedding, which several classes need more of, and MID's λ.
WIDTHS: dict[Kind, int] = {"binary": 2, "multiclass": 4, "regression": 2}
MID = 1e-3
_BY_KIND: dict[Kind, dict[str, Any]] = {
    "binary": {"kind": "marvell", "scale": 25.0},
    "multiclass": {"kind": "label_dp", "epsilon": 1.0},
    "regression": {"kind": "iso", "amplifier": 4.0},
}


def protected(training: Mapping[str, Any], kind: Kind, protect: Protect) -> dict[str, Any]:
    """Returns the tables of split training with what a preset adds.

    Args:
        training: the tables ``model`` and ``phases``, split training first.
        kind: of the task.
        protect: ``labels`` adds noise to the gradients that the active party sends, which attacks
            over all epochs read through (``WARNINGS``), ``columns``
            takes narrower embeddings, which are drawn (MID, arXiv 2301.01142), ``both`` does both.
    """
    model, (split, *others) = dict(training["model"]), training["phases"]
    split = dict(split)
    if protect in ("columns", "both"):
        model["embedding_size"] = min(model["embedding_size"], WIDTHS[kind])
        split["mid"] = MID
    if protect in ("labels", "both"):
        noise = {"exchange": "embedding", "sent_by": "active", **_BY_KIND[kind]}
        split["transforms"] = [noise]
    return {**training, "model": model, "phases": [split, *others]}


@dataclass(frozen=True)
class Measured:
    """What a preset shows in ``benchmarks/results/defaults-protect.json``, a mean over its tables.

    ``lost``: against ``none``, points of AUC or accuracy, or per cent of a regression's RMSE.
    ``labels``: what a passive party reads of labels that knows none, as AUC, or |ρ| of a
    regression; None if no attack reads them so. ``columns``: what the active party reads of a
    passive party's numbers, R².
    """

    lost: float
    labels: float | None
    columns: float

    def shows_more_labels(self, other: Measured) -> bool:
        """Whether it gives away more of the labels, as far as they were attacked."""
        return self.labels is not None and other.labels is not None and self.labels > other.labels


MEASURED: dict[Kind, dict[str, Measured]] = {
    "binary": {
        "none": Measured(0.0, 1.0, 0.765),
        "labels": Measured(0.21, 1.0, 0.823),
        "columns": Measured(-0.01, 1.0, 0.291),
        "both": Measured(0.21, 0.931, 0.361),
        "trees": Measured(0.1, 0.9, 0.502),
    },
    "multiclass": {
        "none": Measured(0.0, 0.951, 0.846),
        "labels": Measured(2.02, 0.716, 0.817),
        "columns": Measured(-0.28, 0.811, 0.578),
        "both": Measured(1.85, None, 0.542),
        "trees": Measured(2.75, 0.641, 0.558),
    },
    "regression": {
        "none": Measured(0.0, 0.972, 0.968),
        "labels": Measured(5.41, 0.191, 0.975),
        "columns": Measured(5.68, 0.795, 0.658),
        "both": Measured(23.36, 0.142, 0.627),
        "trees": Measured(18.73, None, 0.648),
    },
}
# R² of the columns that the active party reads by its own columns alone, without any message.
ALONE: dict[Kind, float] = {"binary": 0.458, "multiclass": 0.16, "regression": 0.174}
# What is taken if nobody says otherwise: no preset hides labels from the attacks of ``vfl leaks``.
DEFAULTS: dict[Kind, Protect] = {"binary": "none", "multiclass": "none", "regression": "none"}
# What a recipe says of the noise of ``labels`` and ``both``.
WARNINGS: dict[Kind, tuple[str, ...]] = {
    "binary": (
        "Marvell noise (labels, both) does not hide labels: an attack that knows nothing but the",
        "received gradients read all labels of three tables, and all positives of a rare class.",
    ),
    "multiclass": (
        "label_dp noise (labels, both) adds up to little over the epochs: with 50 labels known",
        "an attack read 55 to 59 % of the labels of five classes, where a guess reads 20 %.",
    ),
    "regression": (),
}
_LOST = {"binary": "points of AUC", "multiclass": "points of AUC", "regression": "% of RMSE"}
_READ = {"binary": "AUC", "multiclass": "accuracy", "regression": "|ρ|"}


def comments(kind: Kind, chosen: Chosen) -> list[str]:
    """Returns lines for a recipe: what each preset gives away by measurement; the chosen one is
    marked.
    """
    heads = f"labels ({_READ[kind]}) by the others, columns (R²) by the active party"
    return [
        "What attacks read in rehearsals of such recipes on public and made tables, and what it",
        "costs. Each figure is a lower bound: another attack may read more.",
        f"{heads}.",
        f"By its own columns alone, without any message, it reads columns to {ALONE[kind]:.2f}.",
        *WARNINGS[kind],
        "Your own columns, and a recipe that you change, differ: rehearse them with vfl leaks.",
        *(
            f"{'>' if name == chosen else ' '} {_called(name)}: {words(kind, name)}"
            for name in MEASURED[kind]
        ),
    ]


def in_units(kind: Kind, preset: str) -> str:
    """Words it with the units of the figures, for a line of its own."""
    return words(kind, preset, f" ({_READ[kind]})", " (R²)")


def words(kind: Kind, preset: str, of_labels: str = "", of_columns: str = "") -> str:
    """Words what a preset, or ``trees``, gives away and costs. ``of_labels``, ``of_columns``: what
    the figures are.
    """
    of = MEASURED[kind][preset]
    labels = "not measured" if of.labels is None else f"at least {of.labels:.2f}{of_labels}"
    text = f"labels {labels}, columns at least {of.columns:.2f}{of_columns}"
    if preset == "none":
        return text
    # A gain is within the noise of two seeds.
    costs = (
        f"{of.lost:.1f} {_LOST[kind]}" if of.lost >= 0.05 else "nothing in the mean of the tables"
    )
    return f"{text}; costs {costs}"


def _called(name: str) -> str:
    return "--method secureboost" if name == "trees" else f"--protect {name}"

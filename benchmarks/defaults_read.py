"""What the figures of ``benchmarks.defaults`` and ``benchmarks.defaults_protect`` say: their means,
and the tables of docs/results/defaults.md, which ``python -m scripts.reference`` writes.

Only JSON is read, so that a page is made without training anything.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

RESULTS = Path(__file__).parent / "results"
GAPS, PROTECT = RESULTS / "defaults.json", RESULTS / "defaults-protect.json"
# The first is in this table of its own: its figures are what the others are compared with.
PRESETS = ("none", "labels", "columns", "both", "trees")
UNITS = {"binary": "AUC", "multiclass": "accuracy", "regression": "|ρ|"}
# Those that were named beforehand, and two more; then those by which defaults were chosen.
NAMED = (
    "breast cancer",
    "wine",
    "digits",
    "diabetes",
    "credit",
    "phishing",
    "prices",
    "claims",
)
SHOWN = (*NAMED, "latitude", "place")
CHOSEN = ("two classes", "five classes", "numbers", "mixed")
# With these no message of the active party depends on labels, as tests show.
NONE_SENT = ("labels", "both", "fedonce")
# What the table of methods calls each, in its order.
METHODS = {
    "alone": "the active party alone (local-only baseline)",
    "none": "split training, `--protect none`",
    "labels": "`--protect labels`, the default of `vfl new` for classes",
    "columns": "`--protect columns`",
    "both": "`--protect both`",
    "trees": "trees (SecureBoost)",
    "fedonce": "one upload, a network on it (FedOnce, PCA)",
    "combined": "all columns in one place (centralized baseline)",
}
Tables = dict[str, Any]


# --- beside LightGBM
# ------------------------------------------------------------


def gap(line: Tables) -> float:
    """Returns how far a run is behind LightGBM, as the docstring of ``benchmarks.defaults`` has it."""
    mine, theirs = float(line["test"]), float(line["lightgbm"])
    return mine / theirs - 1 if line["task"] == "regression" else theirs - mine


def spread(values: Sequence[float]) -> str:
    """Words a mean, with its standard deviation if there are several values."""
    sd = f" ± {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{fmean(values):.4f}{sd}"


def gaps() -> str:
    """Returns the table of the ten tables, and that of their means."""
    names = ("after", "trees")
    headings = ("table", "LightGBM", "split training", "gap", "trees, gap")
    ours = table(headings, _rows(SHOWN, names))
    means = []
    for count, tables in (("ten", SHOWN), ("eight that were named beforehand", NAMED)):
        found = [[fmean(each) for each in _gaps(name, tables)] for name in names]
        # Trees have only the eight.
        whole = [each if len(each) == len(tables) else [] for each in found]
        means.append((f"gap, of the {count}", *(_mean(each, "+.2f") for each in whole)))
        behind = [[max(0.0, one) for one in each] for each in whole]
        means.append(("a gap below 0 counted as 0", *(_mean(each, ".2f") for each in behind)))
    return f"{ours}\n{table(('mean', 'split training', 'trees'), means)}"


def chosen() -> str:
    """Returns the table of the four by which defaults were chosen."""
    headings = ("table", "LightGBM", "split training", "gap")
    return table(headings, _rows(CHOSEN, ("after",)))


def _rows(tables: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Returns a row for each table: LightGBM, then ours and its gap of each name. Of trees only the
    gap stands.
    """
    kept = json.loads(GAPS.read_text())
    rows = []
    for each in tables:
        after = [line for line in kept["after"] if line["table"] == each]
        is_error = after[0]["task"] == "regression"
        row = [f"{each} (RMSE)" if is_error else each, _plain(after, "lightgbm")]
        for name in names:
            of = [line for line in kept[name] if line["table"] == each]
            points = [100 * gap(line) for line in of]
            row += [] if name == "trees" else [_plain(of, "test")]
            row.append(f"{fmean(points):+.1f} ± {stdev(points):.1f}" if points else "–")
        rows.append(row)
    return rows


def _gaps(name: str, tables: Sequence[str]) -> list[list[float]]:
    """Returns the gaps of all seeds, in points or per cent, of each table that has them."""
    kept = json.loads(GAPS.read_text())[name]
    found = [[100 * gap(line) for line in kept if line["table"] == each] for each in tables]
    return [each for each in found if each]


def _plain(lines: Sequence[Tables], key: str) -> str:
    mean = fmean(each[key] for each in lines)
    if lines[0]["task"] != "regression":
        return f"{mean:.3f}"
    return f"{mean:.1f}" if mean >= 20 else f"{mean:.2f}"


def _mean(values: Sequence[float], form: str) -> str:
    return format(fmean(values), form) if values else "–"


def default_of_classes() -> str:
    """Returns the table of the default of classes and split training, each with LightGBM on the
    same rows: means of the metric and megabytes, medians of seconds.
    """
    lines = json.loads(GAPS.read_text())
    headings = (
        "table",
        "`labels`",
        "gap",
        "`none`",
        "gap",
        "MB, `labels` and `none`",
        "seconds",
    )
    rows = []
    for name in dict.fromkeys(line["table"] for line in lines["labels, five seeds"]):
        row, sizes, seconds = [name], [], []
        for preset in ("labels", "none"):
            runs = [line for line in lines[f"{preset}, five seeds"] if line["table"] == name]
            points = [100 * gap(line) for line in runs]
            row += [_plain(runs, "test"), f"{fmean(points):+.1f} ± {stdev(points):.1f}"]
            sizes.append(f"{fmean(line['bytes'] for line in runs) / 1e6:.2f}")
            seconds.append(f"{median(line['seconds'] for line in runs):.1f}")
        rows.append([*row, " and ".join(sizes), " and ".join(seconds)])
    return table(headings, rows)


# --- what presets give away
# ------------------------------------------------------------


def labels_line(found: Tables) -> Tables | None:
    """Returns the line of the attack that reads most of the labels, which no oracle tells it; None
    if no attack reads those of such a task.
    """
    of = [
        each
        for each in found["lines"]
        if each["of"] == "labels"
        and each["unit"] == UNITS[found["kind"]]
        and "oracle" not in each["knows"]
    ]
    return max(of, key=_strength, default=None)


def columns_line(found: Tables) -> Tables | None:
    """Returns the line of the attack that reads most of the columns of numbers, by mean R²."""
    of = [
        each for each in found["lines"] if "mean of columns" in each["of"] and each["unit"] == "R²"
    ]
    return max(of, key=_strength, default=None)


def _strength(line: Tables) -> tuple[float, bool]:
    """Orders lines by what they read; of equals, one that knows nothing reads more."""
    return round(fmean(line["value"]), 2), line["knows"].startswith("nothing")


def labels_read(found: Tables) -> float | None:
    """Returns the most that is read of labels; None if no attack reads those of such a task."""
    line = labels_line(found)
    return None if line is None else fmean(line["value"])


def columns_read(found: Tables) -> float | None:
    """Returns the most that is read of the columns of numbers, as their mean R²."""
    line = columns_line(found)
    return None if line is None else fmean(line["value"])


def labels_guessed(of: Tables) -> float:
    """Returns the AUC with which labels are inferred without any message, on a table of two classes."""
    return max(
        float(value)
        for found in of.values()
        for each in found["lines"]
        if each["of"] == "labels" and each["unit"] == "AUC" and "oracle" not in each["knows"]
        for value in each["without"].values()
    )


def named(line: Tables | None, none: str) -> str:
    """Words what a line reads, and names its attack; ``none`` if there is no line."""
    if line is None:
        return none
    return f"{fmean(line['value']):.2f} (`{line['attack']}`: {line['knows']})"


def lost(kept: dict[str, Tables], preset: str) -> float:
    """Returns what a preset costs against none: points, or per cent of a regression's RMSE."""
    none, mine = (fmean(kept[name]["test"]) for name in ("none", preset))
    is_error = kept["none"]["kind"] == "regression"
    return 100 * (mine / none - 1) if is_error else 100 * (none - mine)


def means(kept: dict[str, Tables]) -> dict[str, dict[str, tuple[float, float | None, float]]]:
    """Returns {kind: {preset: (mean cost, highest label inference, highest reconstruction)}} over the
    tables of a kind for which that was measured, as ``vfl.measured`` has them; a preset that was
    measured on no table of a kind is missing there.
    """
    by_kind: dict[str, list[Tables]] = {}
    for of in kept.values():
        by_kind.setdefault(of["none"]["kind"], []).append(of)
    found: dict[str, dict[str, tuple[float, float | None, float]]] = {}
    for kind, tables in by_kind.items():
        found[kind] = {}
        for preset in PRESETS:
            measured = [of for of in tables if preset in of]
            if not measured:
                continue
            labels = [labels_read(of[preset]) for of in measured]
            columns = [columns_read(of[preset]) or 0.0 for of in measured]
            known = [each for each in labels if each is not None]
            found[kind][preset] = (
                round(fmean(lost(of, preset) for of in measured), 2),
                round(max(known), 3) if known else None,
                round(max(columns), 3),
            )
    return found


def floors(kept: dict[str, Tables]) -> dict[str, float]:
    """Returns {kind: the highest R² of the columns by the active party's own columns, without any
    message}.
    """
    by_kind: dict[str, list[float]] = {}
    for of in kept.values():
        known = [
            value
            for found in of.values()
            for each in found["lines"]
            if "mean of columns" in each["of"] and each["unit"] == "R²"
            for value in each["without"].values()
        ]
        (task,) = {found["kind"] for found in of.values()}
        by_kind.setdefault(task, []).append(max(known))
    return {kind: round(max(values), 3) for kind, values in by_kind.items()}


def markdown(kept: dict[str, Tables]) -> str:
    """Returns a table: what each preset reaches, gives away and sends, on each table."""
    headings = ("table", "preset", "test", "labels inferred, at least")
    rows = []
    for name, of in kept.items():
        (alone,) = floors({name: of}).values()
        for preset, each in of.items():
            labels, columns = labels_read(each), columns_read(each)
            row = (
                name if preset == "none" else "",
                preset,
                f"{each['metric'].removeprefix('test ')} {spread(each['test'])}",
                _labels(preset, labels, UNITS[each["kind"]].strip("|")),
                "–" if columns is None else f"{columns:.2f} ({alone:.2f})",
                f"{(each['bytes'] or 0) / 1e6:.1f}",
            )
            rows.append(row)
    return table((*headings, "columns reconstructed, at least, R² (without a message)", "MB"), rows)


def _labels(preset: str, read: float | None, unit: str) -> str:
    if preset in NONE_SENT:
        return "none sent"
    return "–" if read is None else f"{unit} {read:.2f}"


def presets() -> str:
    """Returns the table of presets on all tables, as far as they were measured."""
    kept = json.loads(PROTECT.read_text())
    return markdown(
        {name: {each: of[each] for each in PRESETS if each in of} for name, of in kept.items()}
    )


def methods() -> str:
    """Returns the table of methods on credit: what each reaches, gives away and sends."""
    kept = json.loads(PROTECT.read_text())
    rows = []
    for name, words in METHODS.items():
        of = kept["credit"].get(name)
        if of is None:
            rows.append([words, "not measured", *["–"] * 3])
            continue
        if name == "alone":
            leaks = ["–", "–", str(of["bytes"])]
        elif name == "combined":
            leaks = ["all", "all", "–"]
        else:
            no_label = "none sent (by structure, tested)" if name in NONE_SENT else "not measured"
            read = [named(labels_line(of), no_label), named(columns_line(of), "–")]
            leaks = [*read, f"{of['bytes'] / 1e6:.1f}"]
        rows.append([words, f"{fmean(of['test']):.3f}", *leaks])
    (alone,) = floors({"credit": kept["credit"]}).values()
    chance = f"{labels_guessed(kept['credit']):.2f} (own columns and some labels)"
    rows.append(["what is known without a message", "", chance, f"{alone:.2f}", ""])
    return table(
        (
            "method",
            "test AUC",
            "label inference, at least, AUC",
            "feature reconstruction, at least, R²",
            "MB sent",
        ),
        rows,
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

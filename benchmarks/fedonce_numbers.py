"""Evaluates FedOnce's studies beyond ``vfl study``'s table: curves and bytes to an accuracy,
privacy, memory.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from rich.console import Console
from rich.table import Table

from benchmarks.studies import Done, curve, message_bytes, step_bytes
from vfl_lab.studies.report import FineTuned, compute_mean_and_sd, format_cell

L0, MULTI, PCA, SPLIT, COMM = (
    "FedOnce-L0",
    "FedOnce-L0-multi",
    "FedOnce-PCA",
    "SplitNN",
    "SplitNN-Comm",
)
ALONE = ("Combine", "LightGBM-Combine", "Linear-Combine", "LightGBM", "Solo")


@dataclass(frozen=True)
class Curve:
    """Means and standard deviations over the seeds of the study's metric on validation rows.

    ``bytes_``: message bytes of training up to each point, all parties together, without
    validation's.
    """

    bytes_: list[float]
    means: list[float]
    sds: list[float]


def upload_bytes(done: Done, result: FineTuned) -> int:
    return message_bytes(done.summary(result), "head", "embedding")


def validation(done: Done, method: str) -> list[float]:
    """Returns the metric of the validation rows at the end, by seed."""
    return [result.metrics["validation"][done.study.metric] for result in done.of(method)]


def split_curve(done: Done, method: str) -> Curve:
    """Returns the curve of ``SPLIT`` or ``COMM``, after each epoch; that of ``MULTI`` begins after
    the one upload.
    """
    metric, runs = done.study.metric, done.of(method)
    points: list[list[tuple[float, float]]] = []
    for result in runs:
        folder, summary = done.folder / result.finetune.run, done.summary(result)
        a_step = step_bytes(folder, summary, "splitnn", metric)
        before = upload_bytes(done, result) if method == MULTI else 0
        first = (
            [(float(before), curve(folder, "one-shot", metric)[0][1])] if method == MULTI else []
        )
        later = [
            (before + a_step * steps, value) for steps, value in curve(folder, "splitnn", metric)
        ]
        points.append(first + later)
    # The same rounds for every seed.
    along = list(zip(*points, strict=True))
    spread = [compute_mean_and_sd([value for _, value in at]) for at in along]
    return Curve(
        [mean(size for size, _ in at) for at in along],
        [middle for middle, _ in spread],
        [sd or 0.0 for _, sd in spread],
    )


def print_reach(done: Done) -> None:
    """Prints the bytes after which split training is as good as FedOnce-L0: means over the seeds,
    validation rows.
    """
    if not done.of(L0) or not done.of(SPLIT):
        return
    as_good, uploaded = (
        mean(validation(done, L0)),
        mean(upload_bytes(done, result) for result in done.of(L0)),
    )
    found, lower = split_curve(done, SPLIT), done.study.metric.startswith("rmse")
    reached = [
        (epoch, size)
        for epoch, (size, value) in enumerate(zip(found.bytes_, found.means, strict=True), 1)
        if (value <= as_good if lower else value >= as_good)
    ]
    best = min(found.means) if lower else max(found.means)
    print(
        f"validation {done.study.metric}: {L0} {as_good:.4f} with {uploaded / 1e6:.3f} MB; "
        f"{SPLIT} at best {best:.4f}"
    )
    if reached:
        epoch, size = reached[0]
        print(
            f"{SPLIT} is as good after {epoch} epochs and {size / 1e6:.2f} MB: "
            f"{size / uploaded:.1f} times the bytes"
        )
    else:
        print(
            f"{SPLIT} is never as good, in {len(found.means)} epochs and "
            f"{found.bytes_[-1] / 1e6:.1f} MB"
        )


def write_curves(done: Done, path: Path) -> None:
    """Writes the drawn curves, so that they can be drawn again."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "bytes", f"validation_{done.study.metric}", "sd"])
        for method in (SPLIT, MULTI):
            if done.of(method):
                found = split_curve(done, method)
                for row in zip(found.bytes_, found.means, found.sds, strict=True):
                    writer.writerow([method, round(row[0]), f"{row[1]:.6g}", f"{row[2]:.6g}"])


def print_privacy(done: Done, variants: Sequence[str], epsilons: Sequence[float]) -> None:
    """Prints a line for each epsilon: the metric of the test rows, and the noise."""
    shown = Table(
        title=f"test {done.study.metric}; the noise multiplier below it", title_justify="left"
    )
    for heading in ("epsilon", *variants):
        shown.add_column(heading)
    for epsilon in [*map("{:g}".format, epsilons), "inf"]:
        cells = []
        for variant in variants:
            runs = done.of(f"{variant}-{epsilon}")
            values = [result.value(done.study.metric) for result in runs]
            noise = [
                found.privacy.noise_multiplier
                for found in map(done.summary, runs)
                if found.privacy is not None
            ]
            cells.append(
                f"{format_cell(values, done.study.metric)}\n{mean(noise):.3f}" if runs else "–"
            )
        shown.add_row(epsilon, *cells)
    Console(width=160).print(shown)


@dataclass(frozen=True)
class Scaled:
    """The results for one number of passive parties.

    Seconds of training; of the passive processes the median of the largest PSS (RSS) that each had,
    in MiB, or None if the run was not watched; ``accuracy`` of the test rows.
    """

    passives: int
    seconds: float
    accuracy: float
    pss_mib: float | None
    rss_mib: float | None


def scaled(done: Done) -> list[Scaled]:
    path = done.folder / "memory.json"
    seen = json.loads(path.read_text()) if path.exists() else {}
    found = []
    for result in done.results:
        summary = done.summary(result)
        watched = [
            seen[str(party.pid)]
            for party in summary.parties
            if party.role == "passive" and str(party.pid) in seen
        ]
        pss, rss = (
            median(each[key] for each in watched) if watched else None
            for key in ("pss_mib", "rss_mib")
        )
        passives = sum(party.role == "passive" for party in summary.parties)
        found.append(Scaled(passives, summary.wall_s, result.value(done.study.metric), pss, rss))
    return sorted(found, key=lambda each: each.passives)


def print_scale(done: Done) -> None:
    shown = Table("passive parties", "seconds", "accuracy", "PSS of one (median, MiB)", "RSS (MiB)")
    for each in scaled(done):
        memory = [
            "–" if value is None else f"{value:.0f}" for value in (each.pss_mib, each.rss_mib)
        ]
        shown.add_row(str(each.passives), f"{each.seconds:.1f}", f"{each.accuracy:.4f}", *memory)
    Console(width=160).print(shown)

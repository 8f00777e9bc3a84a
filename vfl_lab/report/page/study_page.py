"""The page of a study, from its results.csv and differences.csv."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from vfl.summary.table import format_size
from vfl_common.errors import Code, InputError
from vfl_lab.report.page.draw import draw_intervals
from vfl_lab.report.page.render import ReportPage
from vfl_lab.report.page.svg import BLUE, GREEN, GREY, ORANGE
from vfl_lab.report.page.tables import (
    PageSection,
    PageTable,
    Tile,
    format_mean_and_sd,
    get_metric_name,
)
from vfl_party.base.statistics import MAIN_METRICS

RESULTS, DIFFERENCES = "results.csv", "differences.csv"
_COLORS = {"federated": BLUE, "pooled": GREY, "alone": ORANGE}
_MAX_LINES = 40
Line = Mapping[str, str]


def is_study(folder: Path) -> bool:
    """Whether a folder contains the results of a study."""
    return (folder / RESULTS).is_file() and not (folder / "summary.json").is_file()


def make_study_page(folder: Path) -> ReportPage:
    """Returns the page of a study. Raises InputError if its results cannot be read."""
    lines = _read_csv(folder / RESULTS)
    metrics = list(
        dict.fromkeys(
            key.removeprefix("test_") for line in lines for key in line if key.startswith("test_")
        )
    )
    if not lines or not metrics:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder / RESULTS}: contains no test metrics yet. Wait until vfl study has finished "
            "a "
            "run.",
        )
    decides = [name for name in ("auc", *MAIN_METRICS.values()) if name in metrics]
    metric = decides[0] if decides else metrics[0]
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["method"], line.get("labels", "")), []).append(line)
    seeds = {line["seed"] for line in lines}
    name = lines[0]["study"]
    page = ReportPage(
        f"{name}: methods compared",
        f"Study {name}: {len(lines)} runs, {len(seeds)} seeds.",
        lead=["This page shows mean ± standard deviation of each method's runs on the test rows."],
        tiles=[
            _make_tile(key, _collect_values(own, metric), metric)
            for key, own in list(groups.items())[:8]
        ],
        made=f"Made by vfl report from the study {name}.",
    )
    page.parts = [_make_methods_section(groups, metrics, metric), _make_differences_section(folder)]
    return page


def _make_tile(key: tuple[str, str], values: Sequence[float], metric: str) -> Tile:
    middle, _, sd = format_mean_and_sd(values).partition(" ± ")
    of = f"{get_metric_name(metric)} of {len(values)} runs"
    return Tile(_format_label(key), middle, f"± {sd}, {of}" if sd else of)


def _make_methods_section(
    groups: Mapping[tuple[str, str], Sequence[Line]], metrics: Sequence[str], metric: str
) -> PageSection:
    part = PageSection("methods", "Methods")
    points, rows = [], []
    for key, own in groups.items():
        values = _collect_values(own, metric)
        if values:
            spread = stdev(values) if len(values) > 1 else 0.0
            middle = mean(values)
            color = _COLORS.get(own[0].get("group", ""), BLUE)
            points.append((_format_label(key), middle, middle - spread, middle + spread, color))
        bytes_, seconds = (
            [
                sum(_parse_numbers(line, [f"{stage}_{what}" for stage in ("pretrain", "finetune")]))
                for line in own
            ]
            for what in ("bytes", "s")
        )
        cells = [format_mean_and_sd(_collect_values(own, metric)) for metric in metrics]
        rows.append(
            [
                _format_label(key),
                own[0].get("group", ""),
                f"{len(own)}",
                *cells,
                format_size(round(mean(bytes_))),
                f"{mean(seconds):.1f}",
            ]
        )
    what = f"Test {get_metric_name(metric)}: mean and standard deviation"
    part.pictures.append(
        draw_intervals("methods", what, what, points[:_MAX_LINES], get_metric_name(metric))
    )
    heads = ["method", "columns", "runs", *map(get_metric_name, metrics), "bytes", "seconds"]
    note = "Bytes and seconds of training are means over the runs of a method."
    part.tables.append(
        PageTable("Test metrics: mean ± standard deviation", heads, rows, frozenset({0, 1}), note)
    )
    return part


def _make_differences_section(folder: Path) -> PageSection:
    part = PageSection("differences", "Is a method better than the first?")
    lines = _read_csv(folder / DIFFERENCES) if (folder / DIFFERENCES).is_file() else []
    colors = {"better": GREEN, "worse": ORANGE}
    rows, points = [], []
    for line in lines:
        low, high, middle, p = (
            (_parse_numbers(line, [key]) or [math.nan])[0]
            for key in ("low", "high", "difference", "p")
        )
        called = _format_label((line["method"], line.get("labels", "")))
        rows.append(
            [
                called,
                f"{middle:+.4f}",
                f"{low:+.4f} to {high:+.4f}",
                f"{p:.2g}",
                line.get("pairs", ""),
                line.get("verdict", ""),
            ]
        )
        points.append((called, middle, low, high, colors.get(line.get("verdict", ""), GREY)))
    if lines:
        what = f"{get_metric_name(lines[0]['metric'])} minus that of {lines[0]['against']}"
        part.pictures.append(
            draw_intervals(
                "differences",
                what,
                what,
                points[:_MAX_LINES],
                get_metric_name(lines[0]["metric"]),
                zero=True,
            )
        )
        heads = ["method", "difference", "95 % interval", "p", "pairs", "is it better?"]
        note = "Pairs have the same seed and fold. p is corrected for all comparisons (Holm)."
        part.tables.append(PageTable(what, heads, rows, frozenset({0, 5}), note))
    return part


def _read_csv(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file))
        if any(key not in line for line in lines for key in ("study", "method")):
            raise ValueError
    except (OSError, ValueError, csv.Error):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot be read as the results of a study. Run vfl study again.",
        ) from None
    return lines


def _format_label(key: tuple[str, str]) -> str:
    return f"{key[0]}, {key[1]} labels" if key[1] else key[0]


def _collect_values(lines: Sequence[Line], metric: str) -> list[float]:
    return [number for line in lines for number in _parse_numbers(line, [f"test_{metric}"])]


def _parse_numbers(line: Line, keys: Sequence[str]) -> list[float]:
    numbers = []
    for key in keys:
        try:
            numbers.append(float(line.get(key) or ""))
        except ValueError:
            continue
    return numbers

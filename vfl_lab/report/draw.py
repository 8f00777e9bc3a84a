"""Draws the quality of a run with matplotlib: curves, distributions, decisions, errors."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from vfl_common.text import clean
from vfl_lab.report.quality import (
    Calibration,
    SplitPredictions,
    compute_calibration,
    compute_precision_recall,
    compute_roc,
    count_confusions,
    divide_into_tenths,
    thin_out,
)
from vfl_party.base.statistics import Floats

# Colours that colour-blind readers can distinguish; the stylesheet lists them.
BLUE, ORANGE, GREEN, PINK, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"


YELLOW, GREY, INK = "#e69f00", "#767676", "#1a1a1a"


COLORS = (BLUE, ORANGE, GREEN, PINK, SKY, YELLOW, GREY)


_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"


_MAX_CHARACTERS = 22


_RC: dict[Any, Any] = {
    # Text stays text: it is small, and screen readers read it.
    "svg.fonttype": "none",
    "svg.hashsalt": "vfl",
    # A name with two dollar signs is not a formula.
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GREY,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "path.simplify": True,
}


# without styles, which a strict content policy blocks, and with colours that the stylesheet of the
# page changes for dark screens.
@dataclass(frozen=True)
class SvgPicture:
    """A picture for the page. ``alt``: its description for screen readers."""

    title: str
    alt: str
    svg: Markup
    note: str = ""
    wide: bool = False


@contextmanager
def open_panel(width: float = 4.1, height: float = 3.0) -> Iterator[tuple[Figure, Axes]]:
    """Yields a figure with one panel, in inches; it must be finished inside the block."""
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure, figure.subplots()


def render_inline(figure: Figure, key: str) -> Markup:
    """Returns a figure as an SVG element. ``key``: the prefix of its ids, unique in the page."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    # The XML is trusted: matplotlib has written it.
    root = ElementTree.fromstring(file.getvalue())  # noqa: S314
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    used = set(re.findall(r"#([\w-]+)", ElementTree.tostring(root, encoding="unicode")))
    for element in root.iter():
        _remove_style(element, key, used)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("aria-hidden", "true")
    root.set("focusable", "false")
    # The two libraries that wrote it have escaped it.
    return Markup(ElementTree.tostring(root, encoding="unicode"))  # noqa: S704


def _remove_style(element: ElementTree.Element, key: str, used: set[str]) -> None:
    """Turns the style of an element into attributes, and prefixes its ids and links with
    ``key``.
    """
    for declaration in element.attrib.pop("style", "").split(";"):
        name, _, value = declaration.partition(":")
        name, value = name.strip(), value.strip()
        if name == "font":
            size = re.search(r"([\d.]+)px", value)
            element.set("font-size", size[1] if size else "9")
        elif name and name not in ("white-space", "font-family"):
            element.set(name, value)
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{key}-{own}")
    link = element.attrib.get(f"{{{_XLINK}}}href")
    if link is not None:
        element.set(f"{{{_XLINK}}}href", link.replace("#", f"#{key}-", 1))
    clip = element.attrib.get("clip-path")
    if clip is not None:
        element.set("clip-path", clip.replace("#", f"#{key}-", 1))


def shorten_label(name: str, max_characters: int = _MAX_CHARACTERS) -> str:
    """Returns a name, shortened for a picture."""
    name = clean(name)
    return name if len(name) <= max_characters else f"{name[: max_characters - 1]}…"


# Limits of points in a scatter plot and of classes in a picture, and bins of a histogram.
_MAX_POINTS, _MAX_CLASSES, _BINS = 1_200, 8, 30
_FEW_CLASSES = 30
Draw = Callable[[Axes], None]


def draw_quality(predictions: SplitPredictions, threshold: float | None) -> list[SvgPicture]:
    """Returns the pictures of one split by its kind of task; none if there are too few rows."""
    if len(predictions) < 2:
        return []
    if predictions.kind == "binary":
        both = 0 < predictions.truth_N.sum() < len(predictions)
        return _draw_binary(predictions, threshold) if both else []
    if predictions.kind == "multiclass":
        return _draw_multiclass(predictions)
    if predictions.kind == "multilabel":
        return _draw_multilabel(predictions)
    if predictions.kind == "regression":
        return _draw_regression(predictions)
    return _draw_by_score(predictions)


def draw_picture(
    key: str,
    title: str,
    alt: str,
    draw: Draw,
    *,
    size: tuple[float, float] = (4.1, 3.0),
    **more: str,
) -> SvgPicture:
    """Draws one panel. ``size``: in inches; a width above 5 takes the whole width of a page."""
    with open_panel(*size) as (figure, axes):
        draw(axes)
        return SvgPicture(title, alt, render_inline(figure, key), wide=size[0] > 5, **more)


def _draw_binary(predictions: SplitPredictions, threshold: float | None) -> list[SvgPicture]:
    y_N, s_N = predictions.is_positive_N, predictions.scores_N
    positive, share = shorten_label(predictions.classes[1]), float(y_N.mean())
    false_T, true_T = compute_roc(y_N, s_N)
    precision_T, recall_T = compute_precision_recall(y_N, s_N)
    calibrated, parts = compute_calibration(y_N, s_N), divide_into_tenths(y_N, s_N)
    at = int(np.argmax(true_T - false_T))

    def draw_roc(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="guessing")
        axes.plot(*thin_out(false_T, true_T), color=BLUE, label="this model")
        axes.plot([false_T[at]] * 2, [false_T[at], true_T[at]], ":", color=ORANGE, label="KS")
        set_unit_square(axes, "false positive rate", "true positive rate")
        axes.legend(loc="lower right")

    def draw_precision(axes: Axes) -> None:
        axes.axhline(share, linestyle="--", color=GREY, linewidth=1, label="guessing")
        axes.plot(*thin_out(recall_T, precision_T), color=BLUE, label="this model")
        set_unit_square(axes, "recall", "precision")
        axes.legend(loc="lower left")

    def draw_calibration(axes: Axes) -> None:
        _draw_calibration(axes, calibrated)
        set_unit_square(axes, "mean score", f"share that is {positive}")
        axes.legend(loc="upper left")

    def draw_gain(axes: Axes) -> None:
        share_T = np.concatenate(
            [[0.0], np.cumsum([part.rows for part in parts]) / len(predictions)]
        )
        gain_T = np.array([0.0, *(part.gain for part in parts)])
        axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="at random")
        axes.plot([0, share, 1], [0, 1, 1], ":", color=GREEN, label="perfect")
        axes.plot(share_T, gain_T, "o-", color=BLUE, markersize=4, label="this model")
        set_unit_square(
            axes, "share of rows, highest scores first", f"share of all {positive} found"
        )
        axes.legend(loc="lower right")

    def draw_lift(axes: Axes) -> None:
        lifts = [part.rate / share for part in parts]
        axes.bar(range(1, len(lifts) + 1), lifts, color=BLUE)
        axes.axhline(1, linestyle="--", color=GREY, linewidth=1)
        axes.set_xticks(range(1, len(lifts) + 1))
        axes.set_xlabel("tenth of the rows, highest scores first")
        axes.set_ylabel("lift")
        axes.grid(axis="x", visible=False)

    best = f"{100 * parts[0].gain:.0f} % of all {positive} are in the tenth with the highest scores"
    return [
        draw_picture(
            "roc",
            "ROC curve",
            f"ROC curve; the largest distance (KS) is {true_T[at] - false_T[at]:.3f}, where "
            f"{100 * true_T[at]:.0f} % of {positive} are found",
            draw_roc,
        ),
        draw_picture(
            "pr",
            "Precision and recall",
            f"Precision against recall; guessing has a precision of {share:.3f}",
            draw_precision,
        ),
        draw_picture(
            "cal",
            "Calibration",
            "Mean score against the true share, by tenths of the rows",
            draw_calibration,
            note="On the dashed line, 30 % of the rows with a score of 30 % are positive.",
        ),
        draw_picture(
            "dist",
            "Scores",
            "Distribution of the scores of both classes",
            lambda axes: _draw_two_distributions(axes, predictions, threshold),
        ),
        draw_picture("gain", "Gain", best, draw_gain, note=f"{best}."),
        draw_picture(
            "lift",
            "Lift",
            f"The first tenth has {parts[0].lift:.2f} times as many {positive} as random rows",
            draw_lift,
        ),
    ]


def _draw_two_distributions(
    axes: Axes, predictions: SplitPredictions, threshold: float | None
) -> None:
    edges = np.linspace(0, 1, _BINS + 1)
    for is_positive, color in ((False, GREY), (True, BLUE)):
        own_N = predictions.scores_N[predictions.is_positive_N == is_positive]
        share_B = np.histogram(own_N, edges)[0] / max(1, len(own_N))
        label = shorten_label(predictions.classes[int(is_positive)])
        axes.stairs(share_B, edges, color=color, fill=True, alpha=0.35)
        axes.stairs(share_B, edges, color=color, label=label)
    axes.axvline(
        0.5 if threshold is None else threshold, linestyle=":", color=ORANGE, label="threshold"
    )
    axes.set_xlim(0, 1)
    axes.set_xlabel("score")
    axes.set_ylabel("share of the class")
    axes.legend()


def _draw_multiclass(predictions: SplitPredictions) -> list[SvgPicture]:
    pictures = []
    count = len(predictions.classes)
    if count <= _FEW_CLASSES:
        size = min(7.0, max(4.1, 1.6 + 0.4 * count))
        pictures.append(
            draw_picture(
                "conf",
                "Confusion",
                "Confusion matrix; the table below has its numbers",
                lambda axes: _draw_matrix(axes, predictions),
                size=(size, 0.85 * size),
            )
        )
    there = [k for k in range(count) if 0 < (predictions.truth_N == k).sum() < len(predictions)]
    there.sort(key=lambda k: -int((predictions.truth_N == k).sum()))
    curves = {
        predictions.classes[k]: compute_roc(predictions.truth_N == k, predictions.scores_NO[:, k])
        for k in there[:_MAX_CLASSES]
    }
    if curves:
        pictures.append(_draw_rocs(curves, "Each class against all others"))
    top_N = predictions.scores_NO.max(axis=1)
    right_N = predictions.truth_N == predictions.decided_N
    if 0 < right_N.sum() < len(predictions):
        cal = compute_calibration(right_N, top_N)

        def draw(axes: Axes) -> None:
            _draw_calibration(axes, cal)
            set_unit_square(axes, "probability of the decided class", "share that is right")
            axes.legend(loc="upper left")

        pictures.append(
            draw_picture(
                "cal",
                "Calibration",
                "Probability of the decided class against the "
                "share that is right, by tenths of the rows",
                draw,
            )
        )
    return pictures


def _draw_matrix(axes: Axes, predictions: SplitPredictions) -> None:
    cells = count_confusions(predictions)
    shares = cells / np.maximum(1, cells.sum(axis=1, keepdims=True))
    count = len(cells)
    for true in range(count):
        for decided in range(count):
            share = float(shares[true, decided])
            if share:
                color = BLUE if true == decided else ORANGE
                axes.add_patch(_make_cell(decided, true, color, 0.12 + 0.5 * share))
            if cells[true, decided] and count <= 12:
                axes.text(
                    decided, true, f"{cells[true, decided]:,}", ha="center", va="center", fontsize=8
                )
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylim(count - 0.5, -0.5)
    names = [shorten_label(class_, 12) for class_ in predictions.classes]
    turned = 90 if max(map(len, names)) > 3 and count > 4 else 0
    axes.set_xticks(range(count), names, rotation=turned)
    axes.set_yticks(range(count), names)
    axes.set_xlabel("decided")
    axes.set_ylabel("true")
    axes.grid(visible=False)


def _make_cell(x: int, y: int, color: str, alpha: float) -> Rectangle:
    return Rectangle((x - 0.5, y - 0.5), 1, 1, color=color, alpha=alpha, linewidth=0)


def _draw_rocs(curves: Mapping[str, tuple[Floats, Floats]], title: str) -> SvgPicture:
    def draw(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1)
        for at, (name, curve) in enumerate(curves.items()):
            style = "-" if at < len(COLORS) else "-."
            axes.plot(
                *thin_out(*curve),
                style,
                color=COLORS[at % len(COLORS)],
                label=shorten_label(name, 14),
            )
        set_unit_square(axes, "false positive rate", "true positive rate")
        axes.legend(loc="lower right", fontsize=8)

    return draw_picture("rocs", "ROC curves", title, draw, note=f"{title}.")


def _draw_multilabel(predictions: SplitPredictions) -> list[SvgPicture]:
    both = [
        k
        for k in range(len(predictions.classes))
        if 0 < predictions.truth_N[:, k].sum() < len(predictions)
    ]
    curves = {
        predictions.classes[k]: compute_roc(
            predictions.truth_N[:, k] == 1, predictions.scores_NO[:, k]
        )
        for k in both[:_MAX_CLASSES]
    }
    return [_draw_rocs(curves, "Each label")] if curves else []


def _draw_regression(predictions: SplitPredictions) -> list[SvgPicture]:
    step = max(1, -(-len(predictions) // _MAX_POINTS))
    true_N, predicted_N = predictions.truth_N[::step], predictions.scores_N[::step]
    note = f"{len(true_N):,} of {len(predictions):,} rows." if step > 1 else ""
    error_N = predictions.scores_N - predictions.truth_N
    ends = [
        float(min(true_N.min(), predicted_N.min())),
        float(max(true_N.max(), predicted_N.max())),
    ]

    def draw_pairs(axes: Axes) -> None:
        axes.scatter(true_N, predicted_N, s=8, color=BLUE, alpha=0.45, linewidths=0)
        axes.plot(ends, ends, "--", color=GREY, linewidth=1)
        axes.set_xlabel("true")
        axes.set_ylabel("predicted")

    def draw_errors(axes: Axes) -> None:
        axes.scatter(predicted_N, predicted_N - true_N, s=8, color=BLUE, alpha=0.45, linewidths=0)
        axes.axhline(0, linestyle="--", color=GREY, linewidth=1)
        axes.set_xlabel("predicted")
        axes.set_ylabel("predicted minus true")

    def draw_spread(axes: Axes) -> None:
        axes.hist(error_N, bins=_BINS, color=BLUE, alpha=0.6)
        axes.axvline(0, linestyle="--", color=GREY, linewidth=1)
        axes.set_xlabel("predicted minus true")
        axes.set_ylabel("rows")

    middle = float(np.median(np.abs(error_N)))
    return [
        draw_picture(
            "pairs",
            "Predicted against true",
            "Predicted values against true ones; on the dashed line they are equal",
            draw_pairs,
            note=note,
        ),
        draw_picture(
            "residuals", "Residuals", "Errors against predicted values", draw_errors, note=note
        ),
        draw_picture(
            "errors",
            "Errors",
            f"Distribution of the errors; half of the rows are off by at most {middle:.4g}",
            draw_spread,
            note=f"Half of the rows are off by at most {middle:.4g}.",
        ),
    ]


def _draw_by_score(predictions: SplitPredictions) -> list[SvgPicture]:
    """Returns the pictures of survival and ranking, whose scores have only relative meaning."""

    def draw(axes: Axes) -> None:
        axes.hist(predictions.scores_N, bins=_BINS, color=BLUE, alpha=0.6)
        axes.set_xlabel("score")
        axes.set_ylabel("rows")

    pictures = [draw_picture("scores", "Scores", "Distribution of the scores", draw)]
    if predictions.kind == "survival" and predictions.more_N is not None:
        pictures.insert(0, _draw_survival(predictions))
    return pictures


def _draw_survival(predictions: SplitPredictions) -> SvgPicture:
    """Returns Kaplan-Meier curves of the thirds of the rows by risk."""
    order = np.argsort(-predictions.scores_N, kind="stable")
    events_N = predictions.more_N
    assert events_N is not None  # noqa: S101 - of survival

    def draw(axes: Axes) -> None:
        names = ("highest risk", "middle", "lowest risk")
        for part, name, color in zip(
            np.array_split(order, 3), names, (ORANGE, GREY, BLUE), strict=True
        ):
            if len(part):
                times, alive = compute_kaplan_meier(predictions.truth_N[part], events_N[part])
                axes.step(*thin_out(times, alive), where="post", color=color, label=name)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("time")
        axes.set_ylabel("without the event")
        axes.legend()

    return draw_picture(
        "km",
        "By predicted risk",
        "Kaplan-Meier curves of the thirds of the rows "
        "with the highest, middle and lowest predicted risk",
        draw,
    )


def compute_kaplan_meier(times_N: Floats, events_N: Floats) -> tuple[Floats, Floats]:
    """Returns times from 0, and the share without the event after each (Kaplan and Meier 1958).

    Args:
        times_N: the time at which each row ended, [N].
        events_N: 1 if the row ended by the event, 0 if it was censored, [N].
    """
    moments, at = np.unique(times_N, return_inverse=True)
    ended = np.bincount(at, events_N == 1, len(moments))
    gone = np.bincount(at, minlength=len(moments))
    there = len(times_N) - np.concatenate([[0], np.cumsum(gone)[:-1]])
    return np.concatenate([[0.0], moments]), np.concatenate([[1.0], np.cumprod(1 - ended / there)])


def draw_intervals(
    key: str,
    title: str,
    alt: str,
    lines: Sequence[tuple[str, float, float, float, str]],
    label: str,
    zero: bool = False,
) -> SvgPicture:
    """Draws a value with its interval for each line: (name, value, low, high, colour)."""

    def draw(axes: Axes) -> None:
        for row, (_, value, low, high, color) in enumerate(lines):
            bars = [[max(0.0, value - low)], [max(0.0, high - value)]] if low == low else None
            axes.errorbar([value], [row], xerr=bars, fmt="o", color=color, capsize=4, markersize=6)
            axes.annotate(
                f"{value:.3g}" if zero else f"{value:.4g}",
                (value, row),
                (0, 7),
                textcoords="offset points",
                ha="center",
                fontsize=8.5,
            )
        if zero:
            axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(lines)), [shorten_label(line[0], 32) for line in lines])
        axes.set_ylim(len(lines) - 0.5, -0.7)
        axes.margins(x=0.12)
        axes.set_xlabel(label)
        axes.grid(axis="y", visible=False)

    return draw_picture(key, title, alt, draw, size=(4.6, 1.0 + 0.42 * len(lines)))


def draw_bars(
    key: str, title: str, alt: str, lines: Sequence[tuple[str, float, float]], label: str
) -> SvgPicture:
    """Draws a bar with its error for each line: (name, value, error)."""

    def draw(axes: Axes) -> None:
        places = range(len(lines))
        errors = [0.0 if line[2] != line[2] else line[2] for line in lines]
        axes.barh(
            places, [line[1] for line in lines], xerr=errors, color=BLUE, ecolor=INK, height=0.6
        )
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(places, [shorten_label(line[0]) for line in lines])
        axes.set_ylim(len(lines) - 0.4, -0.6)
        axes.set_xlabel(label)
        axes.grid(axis="y", visible=False)

    return draw_picture(key, title, alt, draw, size=(4.6, 0.9 + 0.32 * len(lines)))


def set_unit_square(axes: Axes, x: str, y: str) -> None:
    """Sets both axes to the range from 0 to 1, with labels."""
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _draw_calibration(axes: Axes, result: Calibration) -> None:
    """Draws the true shares of the tenths of the rows with intervals, and the diagonal."""
    axes.plot([0, 1], [0, 1], "--", color=GREY, linewidth=1, label="perfect")
    errors = [result.true_B - result.low_B, result.high_B - result.true_B]
    axes.errorbar(
        result.predicted_B,
        result.true_B,
        np.maximum(errors, 0),
        fmt="o-",
        color=BLUE,
        markersize=4,
        linewidth=1,
        capsize=2,
        label="tenths of the rows",
    )

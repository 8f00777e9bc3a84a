"""Draws the leaks of each attack and their chance levels, and private images above their
reconstructions.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from torch import Tensor
from torch.nn import functional

from vfl.summary.picture import NotebookFigure, style
from vfl.summary.table import format_size
from vfl_common.text import list_names
from vfl_leaks.result import AttackLine, Rehearsed, rank_assets

# Minimum and maximum area of a marker, in points squared.
_MIN_AREA, _MAX_AREA = 14.0, 110.0
# Maximum number of panels in the picture, and in one row.
_PANELS, _ACROSS = 9, 3
# Maximum number of bars.
_BARS = 24
_LEGEND = "chance, or without\nany message"


def draw(results: Sequence[Rehearsed]) -> Figure:
    """Draws the leak of each attack: the 95 % quantile over batches, or the value without batches.

    For each attack, only the attacker's knowledge with the largest leak is drawn. The picture of
    one recipe has a panel for each unit and a bar for each asset, the worst leak first. The picture
    of several recipes has a panel for each asset: leak over metric, with a colour for each recipe
    and an area that grows with the bytes. The dashed line is the mean over the recipes of chance,
    or of the best baseline without any message if that is higher. A text below lists the assets
    that are not drawn.
    """
    all_assets = _select_assets(results)
    if len(results) == 1 and all_assets:
        return _draw_bars(results[0], all_assets)
    keys, left_out = all_assets[:_PANELS], all_assets[_PANELS:]
    columns = min(_ACROSS, max(1, len(keys)))
    rows = max(1, -(-len(keys) // columns))
    figure = NotebookFigure(3.0 * columns + 1.8, 2.6 * rows + 0.7)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    for axes in grid[len(keys) :]:
        axes.set_visible(False)
    largest = max((result.payload_bytes for result in results), default=1) or 1
    for key, axes in zip(keys, grid, strict=False):
        _draw_panel(axes, key, results, largest)
    if not keys:
        figure.text(0.5, 0.5, "No attack was played.", ha="center")
    metric = next((result.metric for result in results if result.metric), "metric")
    figure.supxlabel(f"{metric}\n{_describe_left_out(left_out, columns)}", fontsize=8)
    handles = [
        Line2D(
            [],
            [],
            ls="",
            marker="o",
            color=_colour(number),
            label=f"{result.name}, {format_size(result.payload_bytes)}",
        )
        for number, result in enumerate(results)
    ]
    handles.append(Line2D([], [], color="0.5", ls="--", lw=0.8, label=_LEGEND))
    figure.legend(handles=handles, loc="outside right upper", fontsize=7, frameon=False)
    return figure


def _draw_bars(result: Rehearsed, all_assets: Sequence[tuple[str, ...]]) -> Figure:
    """Draws the result of one recipe: a bar for each asset, with a mark at the level of chance."""
    keys, left_out = all_assets[:_BARS], all_assets[_BARS:]
    panels: dict[str, list[AttackLine]] = {}
    for line in result.worst:
        if line.asset in keys:
            panels.setdefault(_unit(line), []).append(line)
    for lines in panels.values():
        lines.sort(key=lambda line: keys.index(line.asset))
    heights = [0.36 * len(lines) + 0.6 for lines in panels.values()]
    figure = NotebookFigure(8.6, sum(heights) + 1.1)
    grid = figure.subplots(
        len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
    ).flatten()
    for axes, (unit, lines) in zip(grid, panels.items(), strict=True):
        spreads = [line.high or line.value for line in lines]
        places = range(len(lines))
        errors = [spread.sd for spread in spreads] if len(result.seeds) > 1 else None
        axes.barh(
            places,
            [spread.mean for spread in spreads],
            xerr=errors,
            color=_colour(0),
            height=0.62,
            capsize=2,
        )
        for place, line in zip(places, lines, strict=True):
            axes.plot(
                [_get_chance(line)] * 2, [place - 0.45, place + 0.45], color="0.2", ls="--", lw=1.2
            )
        axes.set_yticks(places, ["\n".join(_describe_asset([line])) for line in lines], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel(unit, fontsize=8)
        axes.set_xlim(left=0.0, right=None if lines[0].is_error else 1.0)
        axes.tick_params(axis="x", labelsize=7)
        style(axes, "x")
    utility = f", {result.metric} {result.utility}" if result.utility is not None else ""
    figure.set_heading(f"{result.name}{utility}, {format_size(result.payload_bytes)}")
    figure.supxlabel(_describe_left_out(left_out, 2), fontsize=8)
    handles = [Line2D([], [], color="0.2", ls="--", lw=1.2, label=_LEGEND.replace("\n", " "))]
    figure.legend(handles=handles, loc="outside upper right", fontsize=7, frameon=False)
    return figure


def _describe_asset(lines: Sequence[AttackLine]) -> tuple[str, str]:
    """Returns two texts about the lines of one asset: the attack with attacker and target, and the
    attacker's knowledge or the exchanges.
    """
    attack, attacker, of, knows, _ = lines[0].asset
    places = list_names(list(dict.fromkeys(line.place for line in lines)))
    return f"{attack} by {attacker}: {of}", f"known: {knows}" if knows else f"from {places}"


def _unit(line: AttackLine) -> str:
    return f"{line.unit}, 95 % of batches" if line.high is not None else line.unit


def _get_chance(line: AttackLine) -> float:
    return line.chance_high.mean if line.chance_high is not None else line.floor


def draw_images(results: Sequence[Rehearsed]) -> dict[str, bytes]:
    """Returns {file name: PNG with private images above their reconstructions}."""

    drawn: dict[str, bytes] = {}
    for result in results:
        for drawing in result.drawings:
            images = drawing.shown
            stem_parts = [drawing.attack, result.name, images.party]
            stem = "-".join(re.sub(r"[^\w.-]+", "-", word).strip("-.") for word in stem_parts)
            name = f"{stem}.png"
            # Names may differ only in characters that file names do not have.
            while name in drawn:
                name = f"{name.removesuffix('.png')}-2.png"
            title = (
                f"{result.name}: images of {images.party}, from {drawing.place} by "
                f"{drawing.attacker}\n{images.says}"
            )
            drawn[name] = draw_pairs(images.rows, title)
    return drawn


def _select_assets(results: Sequence[Rehearsed]) -> list[tuple[str, ...]]:
    """Returns one asset for each attack, attacker and target, the worst leak first."""
    worst: dict[tuple[str, ...], tuple[str, ...]] = {}
    for asset in rank_assets(results):
        worst.setdefault(asset[:3], asset)
    return list(worst.values())


def _describe_left_out(left_out: Sequence[tuple[str, ...]], across: int) -> str:
    texts = [f"{attack} by {attacker}: {of}" for attack, attacker, of, *_ in left_out]
    names = f"; {list_names(texts)}" if texts else ""
    return fill(
        f"Not drawn: single columns, and the same attack with other knowledge{names}",
        46 * across,
    )


def _colour(number: int) -> Any:
    colours = colormaps["tab10"].colors  # type: ignore[attr-defined]
    return colours[number % len(colours)]


def _draw_panel(
    axes: Any, key: tuple[str, ...], results: Sequence[Rehearsed], largest: int
) -> None:
    lines: list[AttackLine] = []
    for number, result in enumerate(results):
        line = next((line for line in result.worst if line.asset == key), None)
        if line is None:
            continue
        lines.append(line)
        x = result.utility.mean if result.utility is not None else 0.0
        area = _MIN_AREA + (_MAX_AREA - _MIN_AREA) * result.payload_bytes / largest
        spread = line.high or line.value
        axes.errorbar([x], [spread.mean], yerr=[spread.sd], color=_colour(number), lw=1, capsize=2)
        axes.scatter([x], [spread.mean], s=area, color=_colour(number))
    floors = [_get_chance(line) for line in lines]
    axes.axhline(sum(floors) / len(floors), color="0.5", ls="--", lw=0.8)
    axes.set_title("\n".join(_describe_asset(lines)), fontsize=8, loc="left")
    axes.set_ylabel(_unit(lines[0]), fontsize=8)
    axes.tick_params(labelsize=7, labelbottom=True)
    axes.grid(alpha=0.25)
    axes.margins(0.12)
    style(axes)


# Maximum number of images in one row.
MAX_IMAGES = 16


_DPI = 130


# Size of the larger side of an image in inches.
_INCHES = 0.72


# Width of the labels left of the images in inches.
_LABELS = 1.45


# Approximate number of pixels of the larger side of an image.
_PIXELS = 96


def draw_pairs(rows: Sequence[tuple[str, Tensor]], title: str) -> bytes:
    """Returns a PNG with rows of images and a title.

    The picture shows the first images of each row. Images with 3 channels are in colour. Other
    images are grey, the mean of their channels.

    Args:
        rows: (name, images [N, C, H, W] with pixels from 0 to 1) of each row.
        title: the title.
    """
    count = min(MAX_IMAGES, min(len(images) for _, images in rows))
    height, width = rows[0][1].shape[2:]
    size = (
        max(_LABELS + _INCHES * width / max(height, width) * count, 6.0),
        0.75 + _INCHES * len(rows),
    )
    figure = Figure(
        figsize=size,
        layout=ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.02, wspace=0.02, hspace=0.02),
    )
    for axes, (name, images) in zip(
        figure.subplots(len(rows), squeeze=False)[:, 0], rows, strict=True
    ):
        axes.imshow(_join_images(images[:count]), interpolation="nearest")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_visible(False)
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=9, labelpad=8)
    figure.suptitle(title, fontsize="medium", x=0.01, ha="left")
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def _join_images(images: Tensor) -> np.ndarray:
    """Joins images to one wide image, [H, W, 3], because one plot per image is slow."""
    grey = (
        images if images.shape[1] == 3 else images.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)
    )
    factor = max(1, round(_PIXELS / max(images.shape[2:])))
    large = grey.clamp(0, 1).repeat_interleave(factor, dim=2).repeat_interleave(factor, dim=3)
    padded = functional.pad(large, (0, _PIXELS // 16), value=1.0)
    strip: np.ndarray = padded.permute(2, 0, 3, 1).flatten(1, 2)[:, : -(_PIXELS // 16)].numpy()
    return strip

"""The page of a search, from the file in its folder, and its pictures: the importance of each key,
and the trials as lines over keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from math import log10
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize

from vfl_common.errors import Code, InputError
from vfl_common.run_folder import SEARCH
from vfl_common.text import count
from vfl_lab.report.page.draw import draw_picture
from vfl_lab.report.page.render import ReportPage
from vfl_lab.report.page.svg import BLUE, GREY, ORANGE, shorten_label
from vfl_lab.report.page.tables import PageSection, PageTable, Tile, format_metric, get_metric_name

_MAX_KEYS = 8
_BY = {
    "tpe": "a tree-structured Parzen estimator",
    "random": "random search",
    "grid": "grid search",
}
# Finished trials: ({key: value}, objective).
Tried = Sequence[tuple[Mapping[str, Any], float]]
# Colours from the lowest to the highest value, visible on white and black and to colour-blind
# readers.
_COLORS = LinearSegmentedColormap.from_list("objective", [BLUE, GREY, ORANGE])
_LONGEST = 40


def is_search(folder: Path) -> bool:
    """Whether a folder contains the result of a search."""
    return (folder / SEARCH).is_file()


def make_search_page(folder: Path) -> ReportPage:
    """Returns the page of a search. Raises InputError if its file cannot be read."""
    path = folder / SEARCH
    try:
        noted = json.loads(path.read_bytes())
        return _make_page(noted)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is damaged. Make the same search again, which writes the file without "
            "repeating a run.",
        ) from None


def _make_page(noted: Mapping[str, Any]) -> ReportPage:
    trials, name, objective = noted["trials"], noted["name"], noted["objective"]
    metric = objective.partition(" ")[2]
    counts = {s: sum(t["state"] == s for t in trials) for s in ("finished", "pruned", "failed")}
    best = ", ".join(f"{key} = {_format(setting)}" for key, setting in noted["best"].items())
    page = ReportPage(
        f"{name}: hyperparameter search",
        f"Search of {count(len(noted['spaces']), 'setting')} by {_BY[noted['by']]}: "
        f"{count(len(trials), 'run')}.",
        lead=[
            f"The best {objective} is {format_metric(noted['value'])}, with {best}.",
            "It is the best of many runs, so its objective is optimistic. Judge it by the test "
            "rows, and compare it with your own settings over seeds that the search did not use.",
        ],
        tiles=[
            Tile(
                f"validation {get_metric_name(metric)}",
                format_metric(noted["value"]),
                "of the best run",
            ),
            *(
                Tile(f"test {get_metric_name(key)}", format_metric(score), "of the best run")
                for key, score in noted["test"].items()
                if key == metric
            ),
            *(
                Tile(state, *count(number, "run").split())
                for state, number in counts.items()
                if number
            ),
        ],
        made=f"Made by vfl report from a search of {name}. The best run is {noted['run']}.",
    )
    page.parts = [_make_keys_section(noted), _make_trials_section(noted, metric)]
    return page


def _make_keys_section(noted: Mapping[str, Any]) -> PageSection:
    """Returns the pictures of the effect of the settings."""
    part = PageSection("keys", "Effect of the settings")
    tried = [(t["values"], t["value"]) for t in noted["trials"] if t["value"] is not None]
    spaces = dict(list(noted["spaces"].items())[:_MAX_KEYS])
    if tried:
        alt = f"A line for each finished run over {', '.join(spaces)}, by {noted['objective']}"
        drawn = partial(draw_parallel, spaces=spaces, tried=tried, objective=noted["objective"])
        size = (compute_width(spaces), 4.2)
        part.pictures.append(draw_picture("parallel", "The finished runs", alt, drawn, size=size))
    shares = noted["importance"]
    if shares:
        words = ", ".join(f"{key} {share:.2f}" for key, share in shares.items())
        drawn, size = partial(draw_importance, shares=shares), (4.6, 1.1 + 0.32 * len(shares))
        title = "Importance of each setting"
        part.pictures.append(
            draw_picture("importance", title, f"{title}: {words}", drawn, size=size)
        )
        part.text.append(
            "The importance of a setting is its share in the variance of the objective (fANOVA). "
            "It describes differences of these runs, not their causes."
        )
    return part


def _make_trials_section(noted: Mapping[str, Any], metric: str) -> PageSection:
    """Returns the table of all runs, in the order of the search."""
    part, keys = PageSection("runs", "Runs"), list(noted["spaces"])
    rows = [
        [
            f"{number}",
            *(_format(trial["values"].get(key)) for key in keys),
            trial["state"] + (f": {trial['error']}" if trial["error"] else ""),
            "–" if trial["value"] is None else format_metric(trial["value"]),
        ]
        for number, trial in enumerate(noted["trials"], start=1)
    ]
    heads = ["run", *keys, "end", f"validation {get_metric_name(metric)}"]
    words = frozenset({0, *range(1, len(keys) + 2)})
    part.tables.append(PageTable("All runs, in the order of the search", heads, rows, words))
    return part


def _format(setting: Any) -> str:
    return (
        f"{setting:.4g}" if isinstance(setting, float) else "–" if setting is None else str(setting)
    )


def compute_width(spaces: Mapping[str, Any]) -> float:
    """Returns the width of the picture of trials, in inches."""
    return 2.2 * max(2, len(spaces)) + 1.5


def draw_importance(axes: Axes, shares: Mapping[str, float]) -> None:
    """Draws the share of each key in the variance of the objective."""
    keys = sorted(shares, key=lambda key: shares[key])
    axes.barh(
        [shorten_label(key, _LONGEST) for key in keys], [shares[key] for key in keys], color=BLUE
    )
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the variance (fANOVA)")
    axes.grid(axis="y", visible=False)


def draw_parallel(axes: Axes, spaces: Mapping[str, Any], tried: Tried, objective: str) -> None:
    """Draws a line for each finished trial over the keys, coloured by the objective.

    ``spaces``: {key: its values, or a dict with ``from``, ``to`` and ``log``}.
    """
    scores = [score for _, score in tried]
    scale = Normalize(min(scores), max(scores))
    for values, score in tried:
        heights = [_compute_height(space, values[key]) for key, space in spaces.items()]
        color = _COLORS(scale(score))
        axes.plot(range(len(spaces)), heights, color=color, marker="o", alpha=0.8)
    for place, space in enumerate(spaces.values()):
        for height, text in _list_ticks(space):
            axes.annotate(
                text, (place, height), (5, 4), textcoords="offset points", fontsize="small"
            )
        axes.axvline(place, color=GREY, zorder=0, linewidth=0.8)
    names = [shorten_label(key, _LONGEST) for key in spaces]
    axes.set_xticks(range(len(spaces)), names, rotation=15, ha="right")
    axes.set_yticks([])
    axes.set_xlim(-0.3, len(spaces) - 0.5)
    axes.grid(visible=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure = axes.get_figure()
    assert figure is not None  # noqa: S101 - axes of a figure
    figure.colorbar(ScalarMappable(scale, _COLORS), ax=axes, label=objective)


def _compute_height(space: Any, value: Any) -> float:
    """Returns the position of a value on its axis, from 0 to 1."""
    if isinstance(space, Mapping):
        low, high = space["from"], space["to"]
        if space.get("log"):
            low, high, value = log10(low), log10(high), log10(value)
        return float((value - low) / (high - low))
    return list(space).index(value) / max(1, len(space) - 1)


def _list_ticks(space: Any) -> list[tuple[float, str]]:
    values = [space["from"], space["to"]] if isinstance(space, Mapping) else list(space)
    return [
        (
            _compute_height(space, value),
            shorten_label(f"{value:g}" if isinstance(value, float) else str(value)),
        )
        for value in values
    ]

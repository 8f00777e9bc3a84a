"""Makes the tables of canonical figures from ``docs/results/figures.toml``, and the short table of leaks."""

from __future__ import annotations

import json
import tomllib
from functools import partial
from statistics import fmean

from benchmarks import defaults_read as read
from scripts.reference.pages import DOCS, table

FILE = DOCS / "results" / "figures.toml"
# The recipes that ``vfl new`` writes, as the short table names them.
RECIPES = {
    "none": "split training, `--protect none`",
    "columns": "split training, `--protect columns`",
    "labels": "one upload and trees, `--protect labels` (the default for classes)",
    "both": "a narrower upload and trees, `--protect both`",
    "trees": "SecureBoost, `--method secureboost`",
}


def load() -> list[dict[str, str]]:
    """Returns the figures, each with id, group, text, value, setting, command and page."""
    figures: list[dict[str, str]] = tomllib.loads(FILE.read_text())["figures"]
    return figures


def of_group(group: str) -> str:
    """Returns a table of one group, for docs/results/index.md."""
    rows = [
        [f"[{f['text']}]({f['page']})", f["value"], f["setting"], f"`{f['command']}`"]
        for f in load()
        if f["group"] == group
    ]
    return table(["claim", "figure", "data and setting", "command"], rows)


def front(folder: str) -> str:
    """Returns a table of the main figures, for a page from which docs/results is ``folder``."""
    rows = [
        [f"[{f['text']}]({folder}/{f['page']})", f["value"], f["setting"]]
        for f in load()
        if "front" in f
    ]
    return table(["claim", "figure", "data and setting"], rows)


cost, quality, inference = (partial(of_group, each) for each in ("cost", "quality", "inference"))
home = partial(front, "results")


def leaks() -> str:
    """Returns what each recipe of ``vfl new`` reaches, and what attacks infer from it at least: on
    credit, and in brackets the highest of all tables of two classes.
    """
    measured = json.loads(read.PROTECT.read_text())
    kept, highest = measured["credit"], read.means(measured)["binary"]
    rows = []
    for name, words in RECIPES.items():
        of, hidden = kept[name], name in read.NONE_SENT
        _, most_labels, most_columns = highest[name]
        labels = "none sent" if hidden else f"{read.labels_read(of):.2f} ({most_labels:.2f})"
        columns = f"{read.columns_read(of):.2f} ({most_columns:.2f})"
        size = f"{of['bytes'] / 1e6:.1f}"
        rows.append([words, f"{fmean(of['test']):.3f}", labels, columns, size])
    (floor,) = read.floors({"credit": kept}).values()
    rows.append(["no message at all", "", f"{read.labels_guessed(kept):.2f}", f"{floor:.2f}", ""])
    headings = "recipe", "test AUC", "label inference, AUC", "feature reconstruction, R²", "MB sent"
    return table(headings, rows)

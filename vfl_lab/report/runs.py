"""Shows the runs in a folder as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from vfl.summary.reading import ListedRun
from vfl.summary.table import PIPE_WIDTH, format_size, new_table, wide_console
from vfl_common.process.logs import utc
from vfl_common.text import clean

_MAIN_METRICS = ("accuracy", "auc", "rmse")
# Maximum number of characters in a line of the table.
_MAX_WIDTH = 400
# Maximum number of characters of a name that another party or person chose.
_MAX_CHARACTERS = 60


def show_runs(runs: list[ListedRun], others: list[Path], console: Console | None = None) -> None:
    """Prints a table of the runs, with their metrics on the test rows."""
    table = new_table("Runs, with metrics of the test rows")
    metric_names = [
        name for name in _MAIN_METRICS if any(name in _get_test_metrics(run) for run in runs)
    ]
    for heading in ("run", "began (UTC)", "method", "seed", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in (*metric_names, "bytes", "seconds"):
        table.add_column(heading, no_wrap=True, justify="right")
    for run in runs:
        table.add_row(*_make_row(run, metric_names))
    parts: list[Any] = [table] if runs else [Text("no runs")]
    if any(run.state == "unfinished" for run in runs):
        parts += [Text("unfinished: running, killed, or pruned or failed in a search", "dim")]
    if others:
        names = ", ".join(clean(path.name, _MAX_CHARACTERS) for path in others)
        parts += [Text(f"folders without a run: {names}", "dim")]
    console = console or wide_console()
    table_width = console.measure(
        table, options=console.options.update(max_width=_MAX_WIDTH)
    ).maximum
    # A narrow terminal wraps long lines, so names and numbers are never cut off.
    console.width = max(console.width, PIPE_WIDTH, table_width)
    console.print(Group(*parts))


def _get_test_metrics(run: ListedRun) -> dict[str, float]:
    return run.summary.metrics.get("test", {}) if run.summary is not None else {}


def _make_row(run: ListedRun, metric_names: list[str]) -> tuple[str, ...]:
    began = utc(run.began_s)[:16].replace("T", " ")
    name = clean(run.folder.name, _MAX_CHARACTERS)
    if run.state == "study":
        return (f"{name}/", began, "", "", f"{run.runs} runs")
    method = clean(run.method, _MAX_CHARACTERS)
    if run.job == "predict":
        method = (
            f"prediction with {clean(run.model, _MAX_CHARACTERS)}" if run.model else "prediction"
        )
    start = (name, began, method, "" if run.seed is None else str(run.seed), run.state)
    if run.summary is None:
        return start
    metrics = [
        f"{_get_test_metrics(run)[name]:.4g}" if name in _get_test_metrics(run) else ""
        for name in metric_names
    ]
    return (
        *start,
        *metrics,
        format_size(run.summary.bytes.total.message_bytes),
        f"{run.summary.wall_s:.1f}",
    )

"""Compares forecast and ledger: runs recipes in full and sets `vfl forecast`'s numbers beside the
counted ones.

    python -m benchmarks.forecast [RECIPE …] [--json FILE]

Ends with exit code 1 if a link, in a phase and direction, is off by more than 3 %; if the forecast
says that it is an upper bound, then only if more has crossed.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.processes import ROOT
from vfl.forecasting.show import sum_links
from vfl.launcher.forks import run_launcher
from vfl.simulation.live import View
from vfl.simulation.run import run_federation
from vfl_common.bundle import CONTROL
from vfl_common.config.base import parse, read_toml
from vfl_common.config.recipe import Recipe
from vfl_common.files import read_lines
from vfl_common.summary import load_summary
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger

EXAMPLES = ROOT / "examples"
MOST = 0.03


def recipes() -> list[Path]:
    """Returns every example that ``vfl simulate`` can run."""
    return sorted(path for path in EXAMPLES.glob("**/*.toml") if "[simulate" in path.read_text())


def compare(path: Path, folder: Path) -> dict[str, Any]:
    """Forecasts, runs and compares one recipe; with early stopping, also with a forecast that knows
    its rounds.
    """
    tables, base = read_toml(path), path.resolve().parent
    recipe = parse(Recipe, tables, str(path))
    outlook = outlook_of(recipe, base)
    said = forecast(outlook)
    run = folder / recipe.name
    with run_launcher(1) as launcher:
        run_federation(tables, recipe, base, run, View(recipe), launcher)
    summary = load_summary(run / "summary.json")
    lines = map(json.loads, read_lines(run / recipe.active.name / "metrics.jsonl"))
    rounds = {line["phase"]: line["round"] for line in lines}
    shutil.rmtree(run)
    ended = {phase.name: rounds[phase.name] for phase in said.phases if phase.at_most}
    known = forecast(outlook, ended=ended)
    # An upper bound may be above what was counted.
    bounded = {phase.name for phase in known.phases if phase.bound}
    links = compare_with_ledger(known, summary.bytes)
    worst = max(
        -min(0.0, link.ratio) if link.phase in bounded else abs(link.ratio) for link in links
    )
    control = summary.bytes.by_phase[CONTROL].message_bytes
    return {
        "recipe": str(path.resolve().relative_to(ROOT)),
        "forecast": sum_links(said.links).model_dump(),
        "ended_early": ended,
        "forecast_for_these_rounds": sum_links(known.links).model_dump(),
        "counted": sum_links(
            link for link in summary.bytes.by_link if link.phase != CONTROL
        ).model_dump(),
        "control_message_bytes": control,
        "worst_link": worst,
        "wall_s": summary.wall_s,
    }


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "out", type=click.Path(path_type=Path), help="Where to write everything.")
def main(paths: tuple[Path, ...], out: Path | None) -> None:
    """Compares RECIPE …, or all of examples/ if none is given."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for path in paths or recipes():
            found.append(compare(path, Path(folder)))
            click.echo(f"{found[-1]['recipe']}: worst link {found[-1]['worst_link']:.2%}", err=True)
    table = Table(
        title="Message bytes, forecast and counted, without control", title_justify="left"
    )
    table.add_column("recipe", no_wrap=True)
    for heading in ("forecast", "rounds known", "counted", "worst link", "control", "seconds"):
        table.add_column(heading, justify="right")
    for each in found:
        counts = (
            each[key]["message_bytes"]
            for key in ("forecast", "forecast_for_these_rounds", "counted")
        )
        last = (
            f"{each['worst_link']:.2%}",
            f"{each['control_message_bytes']:,}",
            f"{each['wall_s']:.1f}",
        )
        table.add_row(each["recipe"], *(f"{count:,}" for count in counts), *last)
    Console(width=140).print(table)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
    sys.exit(any(each["worst_link"] > MOST for each in found))


if __name__ == "__main__":
    main()

"""The argument RUN of commands: the folder of a run; the newest finished run if it is left out."""

from __future__ import annotations

from pathlib import Path

import click

RUNS = Path("runs")  # where the commands put runs if they are not told otherwise


def _or_newest(_context: click.Context, _parameter: click.Parameter, given: Path | None) -> Path:
    if given is not None:
        return given
    from vfl.report.runs import newest

    found = newest(RUNS)
    click.echo(f"taking the newest finished run: {found}", err=True)
    return found


run_argument = click.argument("run", required=False, type=click.Path(path_type=Path), callback=_or_newest)

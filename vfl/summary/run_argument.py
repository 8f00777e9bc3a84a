"""Defines the argument RUN of commands, and the option --out of commands that make runs.

RUN is the folder of a run. It may also be a run's id, ``latest`` or ``production``, which are
looked up in the folder runs. By default it is the newest finished run of a federation.
"""

from __future__ import annotations

from pathlib import Path

import click

# The default folder of runs.
RUNS = Path("runs")


def _locate_or_newest(
    _context: click.Context, _parameter: click.Parameter, path: Path | None
) -> Path:
    return locate_or_newest(path)


def locate_or_newest(path: Path | None) -> Path:
    """Returns the folder of the run that ``path`` names. Without ``path``, returns the folder of
    the newest run, and prints it.

    Raises InputError.
    """
    if path is not None:
        return locate_run(path)
    from vfl.summary.reading import find_newest_run

    run = find_newest_run(RUNS)
    what = "finished run (of one party)" if run.alone else "finished run of a federation"
    click.echo(f"using the newest {what}: {run.folder}", err=True)
    return run.folder


def locate_run(path: Path) -> Path:
    """Returns the folder of a run. Raises InputError.

    ``path``: The path of a folder, or an id, ``latest`` or ``production`` to look up in the folder
    runs.
    """
    from vfl_common.registry import ModelRegistry

    return ModelRegistry(RUNS).folder(str(path))


run_argument = click.argument(
    "run", required=False, type=click.Path(path_type=Path), callback=_locate_or_newest
)
out_option = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Write each run to a folder in OUT.",
)

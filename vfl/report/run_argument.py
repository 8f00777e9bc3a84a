"""The argument RUN of commands: the folder of a run; the newest finished run of a federation if it
is left out; an id, ``latest`` and ``production`` are those of the folder runs. The option --out of
commands that make runs.
"""

from __future__ import annotations

from pathlib import Path

import click

# Where the commands put runs if they are not told otherwise.
RUNS = Path("runs")


def _or_newest(_context: click.Context, _parameter: click.Parameter, given: Path | None) -> Path:
    return or_newest(given)


def or_newest(given: Path | None) -> Path:
    """Returns the folder of the run that a person names, see ``meant``, or of the newest one, which
    it names. Raises InputError.
    """
    if given is not None:
        return meant(given)
    from vfl.report.runs import newest

    found = newest(RUNS)
    what = "finished run, which is of one party" if found.alone else "finished run of a federation"
    click.echo(f"taking the newest {what}: {found.folder}", err=True)
    return found.folder


def meant(given: Path) -> Path:
    """Returns the folder of a run that a person names: a path, or an id, ``latest`` or
    ``production`` in the folder runs. Raises InputError.
    """
    from vfl_common.production.registry import ModelRegistry

    return ModelRegistry(RUNS).folder(str(given))


run_argument = click.argument(
    "run", required=False, type=click.Path(path_type=Path), callback=_or_newest
)
out_option = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Folder of runs; each run gets its own folder in it.",
)

"""``vfl study``: methods, seeds and label counts, compared."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.report.run_argument import out_option
from vfl_common.process.program import EXIT_CODES


@click.command(epilog=EXIT_CODES)
@click.argument("study", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Federations to run at once.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Let a backend of joblib make the runs, each with all parties in one process: loky, or "
    "dask with the address of its scheduler in DASK_SCHEDULER_ADDRESS.",
)
@click.option(
    "--folds",
    type=click.IntRange(2, 1000),
    help="Cross-validate: each of so many parts of the rows is for testing once. Replaces the "
    "file's folds.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines instead of progress and table."
)
def study(
    study: Path, out: Path, jobs: int, backend: str | None, folds: int | None, as_json: bool
) -> None:
    """Run methods x seeds x label counts, and compare them.

    STUDY is a TOML file that names a recipe, seeds, label counts, and methods with their phases
    (docs/how-to/results/study.md). Each run is a federation like those of `vfl simulate`. One
    pretraining serves all label counts. If the study is stopped or killed, the same command resumes
    it: finished runs are not repeated. A run that fails does not stop the others. With three seeds
    or folds, every method is compared with the first one, seed by seed and fold by fold.

    \b
    In OUT/<study>/: a folder for each run; results and differences, as .csv and as .png

    \b
    Example:
      vfl study examples/study/digits.toml
    """
    from vfl.studies.show import show_study

    show_study(study, out, jobs=jobs, folds=folds, backend=backend, as_json=as_json)

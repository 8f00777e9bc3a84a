"""``vfl study``: methods, seeds and label counts, compared; or a search of settings."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.report.run_argument import out_option
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES


@click.command(epilog=EXIT_CODES)
@click.argument("study", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Run this many federations at once.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Make the runs with a joblib backend: loky, ray, spark or dask.",
)
@click.option(
    "--folds",
    type=click.IntRange(2, 1000),
    help="Cross-validate with this many folds, instead of the file's.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines instead of progress and table."
)
def study(
    study: Path, out: Path, jobs: int, backend: str | None, folds: int | None, as_json: bool
) -> None:
    """Compare methods by many runs, or search settings.

    STUDY is a TOML file that names a recipe, seeds, label counts, and methods with their phases
    (docs/how-to/results/study.md); or a recipe and a table [search] with what its keys may be
    (docs/how-to/python/search.md). Each run is a federation like those of `vfl simulate`. One
    pretraining serves all label counts. The same command resumes a study that was stopped or
    killed: finished runs are not repeated. A run that fails does not stop the others. With three
    seeds or folds, every method is compared with the first one, seed by seed and fold by fold.

    A search chooses by the validation rows. Several commands, also on several machines that share
    OUT, work on one search together. The backend dask needs the address of its scheduler in
    DASK_SCHEDULER_ADDRESS.

    \b
    In OUT/<study>/: a folder for each run; results and differences, as .csv and as .png;
    of a search: trials.csv, parallel.png and importance.png. `vfl report OUT/<study>` makes a page.

    \b
    Examples:
      vfl study examples/study/digits.toml
      vfl study examples/study/search.toml --jobs 2
    """
    from vfl.searching.file import is_search
    from vfl.searching.show import show_search
    from vfl.studies.show import show_study

    if is_search(study):
        if folds is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{study}: --folds is for a study of methods, and this is a search. Set "
                "rows.folds and rows.fold in the recipe.",
            )
        show_search(study, out, jobs=jobs, backend=backend, as_json=as_json)
        return
    show_study(study, out, jobs=jobs, folds=folds, backend=backend, as_json=as_json)

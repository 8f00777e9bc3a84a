"""The command ``vfl study``, which compares methods or searches settings."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.summary.run_argument import out_option
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
    help="Run federations with a joblib backend: loky, ray, spark or dask.",
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

    STUDY is a TOML file. For a comparison, it names a recipe, seeds, label counts, and methods with
    their phases (docs/how-to/results/study.md). For a search, it names a recipe, and in the table
    [search] the values to try (docs/how-to/python/search.md). Each run is a federation like those
    of `vfl simulate`. One pretraining is used for all label counts. The same command resumes a
    study that was stopped or killed; it does not repeat finished runs. A failed run does not stop
    the other runs. With at least three seeds or folds, every method is compared with the first
    method, over runs with the same seed and fold.

    A search chooses settings by a metric on the validation rows. Several commands can work on the
    same search, even on several machines that share OUT. The backend dask needs the address of its
    scheduler in DASK_SCHEDULER_ADDRESS.

    \b
    The folder OUT/<study>/ gets a folder for each run, and results and differences as .csv and
    .png. For a search, it gets trials.csv, parallel.png and importance.png. `vfl report
    OUT/<study>` makes a page.

    \b
    Examples:
      vfl study examples/study/digits.toml
      vfl study examples/study/search.toml --jobs 2
    """
    from vfl_lab.searching.show import is_search, show_search
    from vfl_lab.studies.show import show_study

    if is_search(study):
        if folds is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{study}: --folds cannot be used for a search. Set rows.folds and rows.fold in "
                "the recipe.",
            )
        show_search(study, out, jobs=jobs, backend=backend, as_json=as_json)
        return
    show_study(study, out, jobs=jobs, folds=folds, backend=backend, as_json=as_json)

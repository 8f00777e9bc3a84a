"""``vfl models``, ``compare``, ``drift`` and ``prune``: commands for models in production."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from vfl.summary.run_argument import RUNS
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import to_json

out_option = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Use this folder of runs, such as `out` of a party file.",
)

_PICTURE = click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the result as .png, .svg or .pdf.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")

# The exit code if the new model is or may be worse, or if a column has drifted.
_NEGATIVE_RESULT = 5


@click.group(invoke_without_command=True, epilog=EXIT_CODES)
@out_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON line for each model instead of the table."
)
@click.pass_context
def models(context: click.Context, out: Path, as_json: bool) -> None:
    """List trained runs with their stages, or change a stage.

    A trained run is a candidate. Promoting a run puts it into production, and retires the run that
    was in production before. For each recipe name, at most one run is in production. A run of only
    one party, such as a baseline, is marked in the list, because it has the same recipe name.
    OUT/models.json lists all changes, with time and user. Each party keeps its own list, and should
    promote the same run. A joint prediction with --run production fails if two parties have
    different runs in production.

    \b
    Examples:
      vfl models
      vfl models promote latest
      vfl models rollback
    """
    context.obj = out
    if context.invoked_subcommand is not None:
        return
    from vfl_lab.production.upkeep import models as list_models
    from vfl_lab.production.upkeep import show_models

    runs = list_models(out)
    if as_json:
        for run in runs:
            click.echo(to_json(run.as_json(), compact=True))
    else:
        show_models(runs)


@models.command(epilog=EXIT_CODES)
@click.argument("run")
@click.pass_obj
def promote(out: Path, run: str) -> None:
    """Put RUN into production, and retire the previous run.

    RUN is an id, a folder, or latest. If RUN is already in production, nothing changes. Use `vfl
    models --out OUT promote RUN` for another folder of runs.
    """
    from vfl_common.registry import ModelRegistry

    out, run_id = _locate(out, run)
    before = ModelRegistry(out).promote(run_id)
    if before == run_id:
        click.echo(f"{run_id} is already in production")
    else:
        click.echo(f"{run_id} is in production{f'; {before} is retired' if before else ''}")


@models.command(epilog=EXIT_CODES)
@click.option("--recipe", default="", metavar="NAME", help="Roll back the model of this recipe.")
@click.pass_obj
def rollback(out: Path, recipe: str) -> None:
    """Put the previous run back into production.

    The run that is in production now is retired.
    """
    from vfl_common.registry import ModelRegistry

    back, retired = ModelRegistry(out).rollback(recipe)
    click.echo(f"{back} is in production{f'; {retired} is retired' if retired else ''}")


@models.command(epilog=EXIT_CODES)
@click.argument("run")
@click.pass_obj
def retire(out: Path, run: str) -> None:
    """Retire RUN, so that it is no longer a candidate.

    If RUN is in production, no run of its recipe is in production afterwards.
    """
    from vfl_common.registry import ModelRegistry

    out, run_id = _locate(out, run)
    before = ModelRegistry(out).retire(run_id)
    click.echo(
        f"{run_id} is retired"
        f"{'; no run of its recipe is in production' if before == 'production' else ''}"
    )


@click.command(epilog=EXIT_CODES)
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--data",
    multiple=True,
    metavar="NAME=SOURCE",
    help="Score new rows of party NAME with both runs.",
)
@click.option(
    "--truth",
    metavar="SOURCE",
    help="Read the labels for two score files from this table.",
)
@click.option("--label", metavar="COLUMN", help="Read the label from this column of --truth.")
@click.option(
    "--margin",
    type=click.FloatRange(0.0, 1.0),
    default=0.01,
    show_default=True,
    help="Set the largest acceptable loss (AUC, accuracy, share of RMSE).",
)
@_PICTURE
@_JSON
def compare(
    old: Path,
    new: Path,
    data: tuple[str, ...],
    truth: str | None,
    label: str | None,
    margin: float,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Compare the model NEW with OLD on the same rows.

    OLD and NEW are two runs: folders, or latest and production in the folder runs. They are
    compared on the test rows that both runs have. With --data, both runs score new rows instead,
    and the active party's new rows need the label. Between organisations, score the new rows with
    `vfl-party predict` and each model, and give the two score files as OLD and NEW. Rows without a
    label are left out and counted.

    The verdict depends on the AUC for two classes, the accuracy for several classes, and the RMSE
    for regression. NEW is better or worse only if the 95 % interval of the difference does not
    contain 0. The interval is DeLong's for AUC, and otherwise from a paired bootstrap over rows.
    The comparison is valid only on rows that neither model was trained on.

    The exit code is 0 if the interval excludes that NEW is worse by more than --margin (in AUC or
    accuracy, or as a share of the old RMSE). Otherwise it is 5: NEW is worse, or there are too few
    rows to decide.

    \b
    Examples:
      vfl compare production latest && vfl models promote latest
      vfl compare old.csv new.csv --truth churn-june.csv --label churned
    """
    from vfl.commands import parse_data_options
    from vfl.summary.picture import save
    from vfl.summary.run_argument import locate_run
    from vfl_lab.production.compare import compare as compare_models
    from vfl_lab.production.compare import show_comparison

    comparison = compare_models(
        locate_run(old), locate_run(new), parse_data_options(data) or None, truth=truth, label=label
    )
    too_few = comparison.too_few(margin)
    if as_json:
        click.echo(to_json(comparison.as_json(), compact=True))
    else:
        show_comparison(comparison, too_few)
    if picture is not None:
        save(comparison.plot(), picture)
    return _NEGATIVE_RESULT if too_few or comparison.outcome == "worse" else 0


@click.command(epilog=EXIT_CODES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--data", metavar="SOURCE", help="Read the party's new rows from this file or other source."
)
@click.option("--query", metavar="SELECT", help="Select the new rows of a database.")
@click.option(
    "--party",
    metavar="NAME",
    help="Compare the columns of this party. [default: the only party here, or the active one]",
)
@click.option(
    "--read-as",
    metavar="PARTY-FILE",
    type=click.Path(path_type=Path),
    help="Read the new rows with the [data] of this party file.",
)
@click.option(
    "--scores",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Compare the scores in this file with those of the test rows.",
)
@_PICTURE
@_JSON
def drift(
    run: Path,
    data: str | None,
    query: str | None,
    party: str | None,
    read_as: Path | None,
    scores: Path | None,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Measure the drift of a party's new rows since training.

    The command compares new rows with the rows that RUN was trained on. For each column it prints
    the population stability index (PSI index; not private set intersection) over ten bins, or over
    the categories in training. By convention, a column with less than 0.1 is stable, and one with
    0.25 or more has drifted. With few rows the index varies by chance, so a column counts as moved
    or drifted only if its index is larger than chance explains. No data are sent to other parties.

    --read-as is not needed if all parties of RUN were on this machine. Without --data, it reads the
    rows that the party file names. --scores is a file that the active party wrote with `vfl-party
    predict`.

    \b
    Examples:
      vfl drift production --read-as bank.toml --data churn-june.csv
      vfl drift production --read-as bank.toml --scores scores.csv --picture drift.png
    """
    from vfl.summary.picture import save
    from vfl.summary.run_argument import locate_run
    from vfl_lab.production.upkeep import compute_drift, show_drift
    from vfl_lab.report.charts import draw_drift

    shifts = compute_drift(locate_run(run), data, query, party, read_as, scores)
    if as_json:
        for shift in shifts:
            facts = {"name": shift.name, "index": shift.index, "chance": shift.chance}
            click.echo(to_json({**facts, "verdict": shift.verdict}, compact=True))
    else:
        show_drift(shifts)
    if picture is not None:
        save(draw_drift(shifts), picture)
    return _NEGATIVE_RESULT if any(shift.verdict == "drifted" for shift in shifts) else 0


class _Days(click.FloatRange):
    """Accepts a finite number of days. ``click.FloatRange`` alone accepts NaN."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        days: float = super().convert(value, param, ctx)
        if not math.isfinite(days):
            self.fail(f"{value!r} is not a number of days.", param, ctx)
        return days


@click.command(epilog=EXIT_CODES)
@out_option
@click.option(
    "--older-than",
    "runs_days",
    type=_Days(min=0),
    metavar="DAYS",
    help="Remove training and prediction runs that began more than DAYS ago.",
)
@click.option(
    "--log-older-than",
    "log_days",
    type=_Days(min=0),
    metavar="DAYS",
    help="Remove lines of OUT/predictions.jsonl older than DAYS.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
def prune(out: Path, runs_days: float | None, log_days: float | None, dry_run: bool) -> None:
    """Remove old runs, and old lines of the prediction log.

    The command keeps a run that is in production, or that a rollback would restore. It keeps the
    newest trained run of each recipe name, and a run whose weights or alignment a newer run uses.
    It keeps runs that can be resumed: unfinished and stopped runs, and failed training runs.
    Failed predictions are removed. Folders of studies and searches are kept. Try --dry-run first: a
    removed run cannot be restored.

    \b
    Examples:
      vfl prune --older-than 90 --dry-run
      vfl prune --older-than 90 --log-older-than 730
    """
    from vfl.summary.table import format_size
    from vfl_lab.production.upkeep import find_old_runs, old_scorings, remove_run, remove_scorings

    if runs_days is None and log_days is None:
        raise InputError(
            Code.CONFIG_INVALID,
            "prune: needs an age. Give --older-than or --log-older-than.",
        )
    action = "to remove" if dry_run else "removed"
    for run in [] if runs_days is None else find_old_runs(out, runs_days):
        name = f"{run.folder.name} ({format_size(run.bytes)})"
        if run.why:
            click.echo(f"{name}: kept, because {run.why}")
            continue
        if not dry_run:
            remove_run(run)
        click.echo(f"{name}: {action}")
    if log_days is not None:
        count = len(old_scorings(out, log_days)) if dry_run else remove_scorings(out, log_days)
        click.echo(f"predictions.jsonl: {count:,} {'line' if count == 1 else 'lines'} {action}")


def _locate(out: Path, run: str) -> tuple[Path, str]:
    """Returns the folder of runs and the id of a run, from its id, its folder, or ``latest``.

    Raises InputError.
    """
    from vfl_common.registry import WORDS, ModelRegistry

    if run in WORDS:
        return out, ModelRegistry(out).find(run)
    path = Path(run)
    if len(path.parts) > 1 and path.is_dir():
        folder = path.resolve()
        # The path may be a party's folder in the folder of the run.
        folder = folder.parent if (folder / "run.json").is_file() else folder
        return folder.parent, folder.name
    return out, run

"""``vfl models``, ``compare``, ``drift`` and ``prune``: what keeps models in production."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from vfl.report.run_argument import RUNS
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import to_json

out_option = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Folder of runs: a party's own, which its file names as `out`.",
)

_PICTURE = click.option(
    "--picture",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw it, as .png, .svg or .pdf.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")

# The answer is no: the new model is worse or may be, or something has drifted.
_ANSWER_NO = 5


@click.group(invoke_without_command=True, epilog=EXIT_CODES)
@out_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON line for each model instead of the table."
)
@click.pass_context
def models(context: click.Context, out: Path, as_json: bool) -> None:
    """List the trained runs in OUT with their stages, or change a stage.

    A trained run is a candidate. A run that is promoted is in production, and the one that was is
    retired: one run of each recipe's name is in production. A run of one party, such as a baseline,
    is marked, because it has the recipe's name, too. OUT/models.json has all changes, with time and
    user. Each party keeps its own and promotes the same run; a joint prediction with --run
    production ends with one sentence if two parties mean different runs.

    \b
    Examples:
      vfl models
      vfl models promote latest
      vfl models rollback
    """
    context.obj = out
    if context.invoked_subcommand is not None:
        return
    from vfl.production.models import models as trained
    from vfl.production.models import show_models

    found = trained(out)
    if as_json:
        for each in found:
            click.echo(to_json(each.as_json(), compact=True))
    else:
        show_models(found)


@models.command(epilog=EXIT_CODES)
@click.argument("run")
@click.pass_obj
def promote(out: Path, run: str) -> None:
    """Put RUN into production: its id, its folder, or latest. The run that was is retired.

    If it is in production already, nothing changes. `vfl models --out OUT promote RUN` is for
    another folder of runs.
    """
    from vfl_common.production.registry import ModelRegistry

    out, run_id = _meant(out, run)
    before = ModelRegistry(out).promote(run_id)
    if before == run_id:
        click.echo(f"{run_id} is in production already")
    else:
        click.echo(f"{run_id} is in production{f'; {before} is retired' if before else ''}")


@models.command(epilog=EXIT_CODES)
@click.option("--recipe", default="", metavar="NAME", help="Of several recipes: whose model.")
@click.pass_obj
def rollback(out: Path, recipe: str) -> None:
    """Put the run back into production that was before; the one that is now is retired."""
    from vfl_common.production.registry import ModelRegistry

    back, retired = ModelRegistry(out).rollback(recipe)
    click.echo(f"{back} is in production{f'; {retired} is retired' if retired else ''}")


@models.command(epilog=EXIT_CODES)
@click.argument("run")
@click.pass_obj
def retire(out: Path, run: str) -> None:
    """Retire RUN, so that it is no candidate; if it is in production, no run is then."""
    from vfl_common.production.registry import ModelRegistry

    out, run_id = _meant(out, run)
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
    help="New rows of the party NAME, which both runs score on this machine; the active party's "
    "have the label.",
)
@click.option(
    "--truth",
    metavar="SOURCE",
    help="Of two files of scores: a table with the ids and the label.",
)
@click.option("--label", metavar="COLUMN", help="The column of --truth that has the label.")
@click.option(
    "--margin",
    type=click.FloatRange(0.0, 1.0),
    default=0.01,
    show_default=True,
    help="The largest loss that the rows must rule out: points of AUC or accuracy, or a share of "
    "the old RMSE.",
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
    """Say whether the model NEW is better than OLD, on the same rows.

    Two runs (folders, or latest and production of the folder runs) are compared on the test rows
    that both have. With --data they score new rows first. Between organisations each model scores
    the new rows with `vfl-party predict`, and OLD and NEW are the two files. Rows whose label is
    missing are left out and counted.

    AUC decides, accuracy of several classes, or RMSE. NEW is better or worse only if the whole 95 %
    interval of the difference is: DeLong's for AUC, else that of a paired bootstrap over rows. Give
    rows with which neither model was trained.

    The exit code is 0 if the interval rules out that NEW is worse by more than --margin. Otherwise
    it is 5: NEW is worse, or the rows are too few to say.

    \b
    Examples:
      vfl compare production latest && vfl models promote latest
      vfl compare old.csv new.csv --truth churn-june.csv --label churned
    """
    from vfl.library.commands import by_party
    from vfl.production.compare import compare as compared
    from vfl.production.pictures import save
    from vfl.production.show import show_comparison
    from vfl.report.run_argument import meant

    found = compared(meant(old), meant(new), by_party(data) or None, truth=truth, label=label)
    too_few = found.too_few(margin)
    if as_json:
        click.echo(to_json(found.as_json(), compact=True))
    else:
        show_comparison(found, too_few)
    if picture is not None:
        save(found.plot(), picture)
    return _ANSWER_NO if too_few or found.outcome == "worse" else 0


@click.command(epilog=EXIT_CODES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", metavar="SOURCE", help="The party's new rows: a file, or any other source.")
@click.option("--query", metavar="SELECT", help="Of a database: the new rows.")
@click.option(
    "--party",
    metavar="NAME",
    help="Whose columns. [default: the only one whose folder is there, or the active one]",
)
@click.option(
    "--read-as",
    metavar="PARTY-FILE",
    type=click.Path(path_type=Path),
    help="Read the rows as the [data] of this party file says; without --data, those that it "
    "names. Not needed for a run of this machine alone.",
)
@click.option(
    "--scores",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Active party: a file that vfl-party predict wrote; its scores are compared with those of "
    "the test rows.",
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
    """Measure input drift: how far a party's new rows are from those that RUN was trained on.

    For each column it prints the population stability index (PSI index; not private set
    intersection) over ten bins or the categories of training. By convention less than 0.1 is
    stable, and 0.25 or more has drifted. A column counts as moved or drifted only if chance alone
    would not explain it: few rows move by themselves. Nothing leaves this party.

    \b
    Examples:
      vfl drift production --read-as bank.toml --data churn-june.csv
      vfl drift runs/20260101-120000-churn-1f2e --read-as bank.toml --scores scores.csv --picture drift.png
    """  # noqa: E501
    from vfl.production.drift import drifts
    from vfl.production.pictures import drifted, save
    from vfl.production.show import show_drift
    from vfl.report.run_argument import meant

    found = drifts(meant(run), data, query, party, read_as, scores)
    if as_json:
        for each in found:
            facts = {"name": each.name, "index": each.index, "chance": each.chance}
            click.echo(to_json({**facts, "verdict": each.verdict}, compact=True))
    else:
        show_drift(found)
    if picture is not None:
        save(drifted(found), picture)
    return _ANSWER_NO if any(each.verdict == "drifted" for each in found) else 0


class _Days(click.FloatRange):
    """A finite number of days; the range alone lets NaN through."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} is not a number of days.", param, ctx)
        return found


@click.command(epilog=EXIT_CODES)
@out_option
@click.option(
    "--older-than",
    "runs_days",
    type=_Days(min=0),
    metavar="DAYS",
    help="Remove runs, of training and prediction, that began longer ago.",
)
@click.option(
    "--log-older-than",
    "log_days",
    type=_Days(min=0),
    metavar="DAYS",
    help="Remove lines of OUT/predictions.jsonl that are older.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
def prune(out: Path, runs_days: float | None, log_days: float | None, dry_run: bool) -> None:
    """Remove old runs, and old lines of the log of predictions.

    A run stays if it is in production or was before that, so that it can come back; if it is the
    newest trained run of its recipe's name; if a younger run has started from it; or if it is not
    over: unfinished, stopped, or a training that has failed. A prediction that has failed may go.
    The folder of a study or search stays. Try it with --dry-run first: a run that was removed
    cannot be restored.

    \b
    Examples:
      vfl prune --older-than 90 --dry-run
      vfl prune --older-than 90 --log-older-than 730
    """
    from vfl.production.prune import old_runs, old_scorings, remove_run, remove_scorings
    from vfl.report.table import size

    if runs_days is None and log_days is None:
        raise InputError(Code.CONFIG_INVALID, "prune: give --older-than or --log-older-than")
    done = "would be removed" if dry_run else "removed"
    for each in [] if runs_days is None else old_runs(out, runs_days):
        name = f"{each.folder.name} ({size(each.bytes)})"
        if each.why:
            click.echo(f"{name}: kept, because {each.why}")
            continue
        if not dry_run:
            remove_run(each)
        click.echo(f"{name}: {done}")
    if log_days is not None:
        count = len(old_scorings(out, log_days)) if dry_run else remove_scorings(out, log_days)
        click.echo(f"predictions.jsonl: {count:,} lines {done}")


def _meant(out: Path, run: str) -> tuple[Path, str]:
    """Returns the folder of runs and the run's id: from an id, a folder, or a word. Raises
    InputError.
    """
    from vfl_common.production.registry import WORDS, ModelRegistry

    if run in WORDS:
        return out, ModelRegistry(out).find(run)
    path = Path(run)
    if len(path.parts) > 1 and path.is_dir():
        whole = path.resolve()
        whole = whole.parent if (whole / "run.json").is_file() else whole
        return whole.parent, whole.name
    return out, run

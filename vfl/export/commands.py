"""``vfl export``: the rounds of a run in TensorBoard or MLflow, after the run or during it; a
party's models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from vfl.report.rounds import History, RoundLine, Source, find_sources
from vfl.report.run_argument import run_argument
from vfl_common.process.program import EXIT_CODES

if TYPE_CHECKING:
    from vfl_common.production.registry import Stage

_POLL_S = 1.0
_FOLLOW = click.option(
    "--follow", is_flag=True, help="Keep exporting until the run is finished, or Ctrl-C."
)


class Sink(Protocol):
    """Takes the rounds of one party."""

    def update(self, rounds: Sequence[RoundLine]) -> None:
        """Takes all rounds so far; rounds that were written before are not written again."""

    def close(self, *, finished: bool) -> None:
        """Ends the export; ``finished``: the run is finished."""


@click.group(epilog=EXIT_CODES)
def export() -> None:
    """Give the metrics of a run to TensorBoard or MLflow, or a party's trained models to a file.

    Metrics are those in metrics.jsonl of each party. Steps on the axis are training steps since the
    run began. A round that was repeated after a rollback counts once. Only the content of
    metrics.jsonl is sent and, to MLflow, the recipe. Without RUN, a command takes the newest
    finished run of a federation in the folder runs.
    """


@export.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--out",
    default="tensorboard",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of logs; files go to DIR/<run id>/<party> and replace those of an earlier export.",
    metavar="DIR",
)
@_FOLLOW
def tensorboard(run: Path, out: Path, follow: bool) -> None:
    """Write event files for TensorBoard. RUN is a run's folder, or one party's in it.

    \b
    Example:
      vfl export tensorboard runs/20260101-120000-digits-1f2e
      tensorboard --logdir tensorboard
    """
    from vfl.export.to_tensorboard import TensorBoard

    for source in copy(run, lambda source: TensorBoard(source, out), follow=follow):
        click.echo(out / source.run_id / source.party)


@export.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--tracking-uri",
    envvar="MLFLOW_TRACKING_URI",
    required=True,
    help="MLflow's server, http://HOST:PORT. [default: the variable MLFLOW_TRACKING_URI]",
)
@click.option(
    "--experiment", default="vfl", show_default=True, help="Created if it does not exist."
)
@click.option(
    "--register",
    metavar="NAME",
    help="Register the run as a version of MLflow's model NAME, too. The version has the alias "
    "production if the run is in production (vfl models), else not.",
)
@click.option(
    "--under",
    metavar="NAME",
    help="Nest the runs in a run of MLflow with this name, such as a study's or a search's. It is "
    "made if there is none.",
)
@_FOLLOW
def mlflow(
    run: Path,
    tracking_uri: str,
    experiment: str,
    register: str | None,
    under: str | None,
    follow: bool,
) -> None:
    """Log one MLflow run for each party. RUN is a run's folder, or one party's in it.

    A later export appends the new rounds. With --register, it moves the alias to the run's present
    stage. If several parties' folders are here, the version is of the active party.

    \b
    Examples:
      vfl export mlflow runs/20260101-120000-digits-1f2e --tracking-uri http://localhost:5000
      vfl export mlflow production --register churn --tracking-uri http://localhost:5000
    """
    from vfl.export.to_mlflow import Mlflow

    def opened(source: Source) -> Mlflow:
        return Mlflow(source, tracking_uri, experiment, under)

    sources = copy(run, opened, follow=follow)
    for source in sources:
        click.echo(f"{experiment}: {source.run_id}/{source.party}")
    if register is not None:
        source, stage = _staged(sources)
        version = opened(source).register(register, stage)
        click.echo(f"{register}: version {version} is {source.run_id}/{source.party}, {stage}")


def _staged(sources: Sequence[Source]) -> tuple[Source, Stage]:
    """Returns the active party, or else the first that is here, and the run's stage. Raises
    InputError if the run was not trained to its end.
    """
    from vfl_common.production.registry import ModelRegistry
    from vfl_common.run_folder import RunFolder

    run = sources[0].folder.resolve().parent
    stage = ModelRegistry(run.parent).stage(run.name)
    active = RunFolder(sources[0].folder, run.name).recipe().active.name
    return next((each for each in sources if each.party == active), sources[0]), stage


@export.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--party",
    metavar="NAME",
    help="Whose. [default: the only one whose folder is there, or the active one]",
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="A new file, whose name ends in .safetensors, or in .onnx. [default: NAME.safetensors, or "
    "NAME.onnx]",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "onnx"]),
    default="safetensors",
    show_default=True,
    help="safetensors: weights, for Python with vfl. onnx: what computes them, for any program "
    "with an ONNX runtime.",
)
def model(run: Path, party: str | None, out: Path | None, kind: str) -> None:
    """Write a party's encoder, and the active party's top model, to files. RUN is as for the
    others.

    Of safetensors, tensors have their names in the modules, after encoder. or top.;
    `vfl.Model.load(FILE)` makes the modules again, and prepares rows for them. Of ONNX, NAME.onnx
    takes the party's own columns and gives the embedding, NAME-top.onnx takes the embeddings of all
    parties, and NAME.json says what inputs and outputs are. The files hold column names, categories
    and statistics too: private, only you may read them.

    \b
    Examples:
      vfl export model runs/20260101-120000-churn-1f2e --party shop
      vfl export model runs/20260101-120000-churn-1f2e --party shop --format onnx
    """
    from vfl.library.model import Model

    found = Model.load(run, party)
    out = out or Path(f"{found.party}.{kind}")
    paths = [out]
    if kind == "onnx":
        paths = found.to_onnx(out)
    else:
        found.save(out)
    for path in paths:
        click.echo(path)


def copy(run: Path, open_sink: Callable[[Source], Sink], *, follow: bool) -> list[Source]:
    """Gives each party's rounds to its own sink; returns the parties. Raises InputError."""
    histories = [History(source) for source in find_sources(run)]
    # Unreadable files must fail before an earlier export is replaced.
    for history in histories:
        history.update()
    sinks = [open_sink(history.source) for history in histories]
    finished = [False] * len(sinks)
    try:
        while True:
            # Before the last lines are read.
            finished = [history.source.finished for history in histories]
            for history, sink in zip(histories, sinks, strict=True):
                history.update()
                sink.update(history.rounds)
            if not follow or all(finished):
                return [history.source for history in histories]
            time.sleep(_POLL_S)
    finally:
        for sink, done in zip(sinks, finished, strict=True):
            sink.close(finished=done)

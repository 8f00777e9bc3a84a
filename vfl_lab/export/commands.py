"""The commands of ``vfl export``: rounds to TensorBoard or MLflow, and models to files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from vfl.summary.rounds import History, PartyFolder, RoundLine, find_sources
from vfl.summary.run_argument import run_argument
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES

if TYPE_CHECKING:
    from vfl_common.registry import Stage

_POLL_S = 1.0
# The suffix of the event files of vfl. Event files of other programs are never replaced.
_SUFFIX = ".vfl"
_FOLLOW = click.option(
    "--follow", is_flag=True, help="Keep exporting until the run finishes, or until Ctrl-C."
)


class Sink(Protocol):
    """An export target for the rounds of one party."""

    def update(self, rounds: Sequence[RoundLine]) -> None:
        """Writes the rounds that are new. ``rounds``: All rounds so far."""

    def close(self, *, finished: bool) -> None:
        """Ends the export. ``finished``: Whether the run is finished."""


class TensorBoard:
    """Writes the rounds of one party as TensorBoard event files, without TensorFlow or torch.

    Raises InputError if the package tensorboard is missing or the folder cannot be written.
    """

    def __init__(self, source: PartyFolder, out: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer import event_file_writer
        except ImportError as error:
            raise InputError(
                Code.CONFIG_INVALID,
                "vfl export tensorboard: TensorBoard cannot be imported "
                f"({str(error).splitlines()[0]}). Install it with `pip install tensorboard`.",
            ) from None
        self._events, self._summaries, self._writers = event_pb2, summary_pb2, event_file_writer
        self._folder = out / source.run_id / source.party
        self._written: list[RoundLine] = []
        self._writer = self._open()

    def _open(self) -> Any:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for older in self._folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
                older.unlink()
            return self._writers.EventFileWriter(str(self._folder), filename_suffix=_SUFFIX)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID,
                f"{self._folder}: cannot be written ({error.strerror}). Give another folder with "
                "--out.",
            ) from None

    def update(self, rounds: Sequence[RoundLine]) -> None:
        """Writes the rounds that are new. After a rollback, writes all rounds again."""
        # After a rollback, rounds that were already written have changed.
        if list(rounds[: len(self._written)]) != self._written:
            self._writer.close()
            self._writer, self._written = self._open(), []
        for line in rounds[len(self._written) :]:
            values = [
                self._summaries.Summary.Value(tag=tag, simple_value=value)
                for tag, value in line.values.items()
            ]
            summary = self._summaries.Summary(value=values)
            self._writer.add_event(
                self._events.Event(wall_time=line.time_s, step=line.steps, summary=summary)
            )
        self._written = list(rounds)
        self._writer.flush()

    def close(self, *, finished: bool) -> None:
        """Closes the event file."""
        _ = finished
        self._writer.close()


@click.group(epilog=EXIT_CODES)
def export() -> None:
    """Export the metrics or the models of a run.

    Metrics are exported to TensorBoard or MLflow, and a party's trained models to files. The
    metrics of a party are read from its metrics.jsonl. The x axis shows training steps since the
    run began. A round that was repeated after a rollback is exported once. MLflow also gets the
    recipe, but no other data. Without RUN, the commands take the newest finished run of a
    federation in the folder runs.
    """


@export.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--out",
    default="tensorboard",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Write to DIR/<run id>/<party>, replacing an earlier export.",
    metavar="DIR",
)
@_FOLLOW
def tensorboard(run: Path, out: Path, follow: bool) -> None:
    """Write event files for TensorBoard.

    RUN is the folder of a run, or a party's folder in it.

    \b
    Example:
      vfl export tensorboard runs/20260101-120000-digits-1f2e
      tensorboard --logdir tensorboard
    """
    for source in copy(run, lambda source: TensorBoard(source, out), follow=follow):
        click.echo(out / source.run_id / source.party)


@export.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--tracking-uri",
    envvar="MLFLOW_TRACKING_URI",
    required=True,
    help="Send to this MLflow server, http://HOST:PORT. [default: $MLFLOW_TRACKING_URI]",
)
@click.option(
    "--experiment",
    default="vfl",
    show_default=True,
    help="Log the run to this MLflow experiment.",
)
@click.option(
    "--register",
    metavar="NAME",
    help="Register the run as a version of MLflow model NAME.",
)
@click.option(
    "--under",
    metavar="NAME",
    help="Nest the runs in the MLflow run NAME, created if needed.",
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
    """Log one MLflow run for each party.

    RUN is the folder of a run, or a party's folder in it. A later export appends the new rounds.
    With --register, the version gets the alias production if the run is in production (see vfl
    models); a later export updates the alias. If RUN has the folders of several parties, the
    active party's MLflow run is registered. Use --under to group the runs of a study or a search.

    \b
    Examples:
      vfl export mlflow runs/20260101-120000-digits-1f2e --tracking-uri http://localhost:5000
      vfl export mlflow production --register churn --tracking-uri http://localhost:5000
    """
    from vfl_lab.export.to_mlflow import Mlflow

    def open_sink(source: PartyFolder) -> Mlflow:
        return Mlflow(source, tracking_uri, experiment, under)

    sources = copy(run, open_sink, follow=follow)
    for source in sources:
        click.echo(f"{experiment}: {source.run_id}/{source.party}")
    if register is not None:
        source, stage = _choose_source(sources)
        version = open_sink(source).register(register, stage)
        click.echo(f"{register}: version {version} is {source.run_id}/{source.party}, {stage}")


def _choose_source(sources: Sequence[PartyFolder]) -> tuple[PartyFolder, Stage]:
    """Returns the folder of the active party, or otherwise the first folder, and the run's stage.

    Raises InputError if the run was not trained to its end.
    """
    from vfl_common.registry import ModelRegistry
    from vfl_common.run_folder import RunFolder

    run = sources[0].folder.resolve().parent
    stage = ModelRegistry(run.parent).stage(run.name)
    active = RunFolder(sources[0].folder, run.name).recipe().active.name
    return next((source for source in sources if source.party == active), sources[0]), stage


@export.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--party",
    metavar="NAME",
    help="Export this party's models. [default: the only local party, or the active party]",
)
@click.option(
    "--out",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write to this new file. [default: NAME.safetensors, or NAME.onnx]",
)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "onnx"]),
    default="safetensors",
    show_default=True,
    help="Write weights for vfl.Model, or models for an ONNX runtime.",
)
def model(run: Path, party: str | None, out: Path | None, kind: str) -> None:
    """Write a party's bottom and top models to files.

    RUN is the folder of a run, or a party's folder in it. Every party with columns has a bottom
    model (its encoder), and the active party also has the top model. In a .safetensors file, the
    names of tensors are those in the modules, with the prefix encoder. or top. Use
    `vfl.Model.load(FILE)` to build the modules and to prepare rows for them. With --format onnx,
    NAME.onnx maps the party's columns to the embedding, NAME-top.onnx takes the embeddings of all
    parties, and NAME.json describes inputs and outputs. The files also contain column names,
    categories and statistics. They are private, and only you can read them.

    \b
    Examples:
      vfl export model runs/20260101-120000-churn-1f2e --party shop
      vfl export model runs/20260101-120000-churn-1f2e --party shop --format onnx
    """
    from vfl.library.model import Model

    trained = Model.load(run, party)
    out = out or Path(f"{trained.party}.{kind}")
    paths = [out]
    if kind == "onnx":
        paths = trained.to_onnx(out)
    else:
        trained.save(out)
    for path in paths:
        click.echo(path)


def copy(run: Path, open_sink: Callable[[PartyFolder], Sink], *, follow: bool) -> list[PartyFolder]:
    """Writes the rounds of each party to its own sink. Returns the parties' folders. Raises
    InputError.
    """
    histories = [History(source) for source in find_sources(run)]
    # Unreadable files must fail before an earlier export is replaced.
    for history in histories:
        history.update()
    sinks = [open_sink(history.source) for history in histories]
    finished = [False] * len(sinks)
    try:
        while True:
            # This is read before the last lines, so that no line is missed.
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

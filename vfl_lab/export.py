"""The commands of ``vfl export``: rounds to TensorBoard or MLflow, and models to files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from vfl.summary.rounds import History, PartyFolder, RoundLine, find_sources
from vfl.summary.run_argument import run_argument
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES
from vfl_common.registry import PRODUCTION, Stage

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
                f"({str(error).splitlines()[0]}). Install it with `pip install '.[tensorboard]'` "
                "in the clone of vfl.",
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


INSTALL = "pip install mlflow-skinny"


# MLflow's limits for one request.
MAX_METRICS, MAX_PARAMS = 1000, 100


MAX_CHARACTERS = 500


# The tags that vfl sets on MLflow runs.
RUN, PARTY, ROUNDS, GENERATION = "vfl.run_id", "vfl.party", "vfl.rounds", "vfl.generation"


# The tag of a parent run that groups other runs, and MLflow's own tag of its child runs.
UNDER, PARENT = "vfl.under", "mlflow.parentRunId"


T = TypeVar("T")


class Mlflow:
    """Logs the rounds of one party to one MLflow run. A later export appends to the same run.

    Tags store the number of exported rounds and their last generation. A round that was repeated
    after a rollback is logged again at its step, and MLflow shows the later value.

    Args:
        source: The folder of the party.
        uri: The address of the MLflow server.
        experiment: The name of the experiment.
        under: The name of the parent run, which is created if needed; None for no parent.

    Raises InputError if the package is missing or MLflow refuses a request.
    """

    def __init__(
        self, source: PartyFolder, uri: str, experiment: str, under: str | None = None
    ) -> None:
        self._uri = uri
        # This keeps MLflow from sending usage data to its developers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # With the default, MLflow would retry for minutes if no server answers.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        try:
            from mlflow import MlflowClient, entities, set_tracking_uri
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise InputError(
                Code.CONFIG_INVALID,
                f"vfl export mlflow: MLflow cannot be imported ({str(error).splitlines()[0]}). "
                f"Install it with `{INSTALL}`.",
            ) from None
        self._entities, self._error_class = entities, MlflowException
        # Without this, clients of the model registry would create a database in this folder.
        self._request(lambda: set_tracking_uri(uri))
        self._client = self._request(lambda: MlflowClient(tracking_uri=uri))
        self._tags = {RUN: source.run_id, PARTY: source.party}
        self._run_id, tags = self._request(lambda: self._find(source, experiment))
        if under is not None:
            self._request(lambda: self._nest(under))
        self._rounds, self._generation = int(tags.get(ROUNDS, 0)), int(tags.get(GENERATION, 0))

    def _request(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._error_class as error:
            reason = next(
                (line.strip() for line in str(error).splitlines() if line.strip()),
                type(error).__name__,
            )
            raise InputError(
                Code.UNREACHABLE,
                f"MLflow at {self._uri}: request failed ({reason}). Check --tracking-uri and the "
                "server.",
            ) from None

    def _find(self, source: PartyFolder, experiment: str) -> tuple[str, dict[str, str]]:
        """Returns the id and tags of the MLflow run of an earlier export. Without an earlier
        export, creates an MLflow run with the recipe as its parameters.
        """
        client, entities = self._client, self._entities
        existing = client.get_experiment_by_name(experiment)
        experiment_id = (
            existing.experiment_id if existing is not None else client.create_experiment(experiment)
        )
        filter_string = f"tags.`{RUN}` = '{source.run_id}' and tags.`{PARTY}` = '{source.party}'"
        for run in client.search_runs([experiment_id], filter_string, max_results=1):
            return run.info.run_id, run.data.tags
        run = client.create_run(
            experiment_id, tags=self._tags, run_name=f"{source.run_id}/{source.party}"
        )
        params = [
            entities.Param(key, value[:MAX_CHARACTERS])
            for key, value in flatten(source.read("recipe.json"))
        ]
        for begin in range(0, len(params), MAX_PARAMS):
            client.log_batch(run.info.run_id, params=params[begin : begin + MAX_PARAMS])
        return run.info.run_id, {}

    def _nest(self, under: str) -> None:
        """Makes the run a child of the run with the name ``under``, which has no metrics itself."""
        client = self._client
        experiment_id = client.get_run(self._run_id).info.experiment_id
        # The name is compared here, because quotes in it would break a filter string of MLflow.
        parents = client.search_runs([experiment_id], f"tags.`{UNDER}` LIKE '%'")
        parent = next((run for run in parents if run.data.tags[UNDER] == under), None)
        if parent is None:
            parent = client.create_run(experiment_id, tags={UNDER: under}, run_name=under)
            client.set_terminated(parent.info.run_id, "FINISHED")
        client.set_tag(self._run_id, PARENT, parent.info.run_id)

    def update(self, rounds: Sequence[RoundLine]) -> None:
        """Logs the rounds that are new or were repeated. ``rounds``: All rounds so far."""
        count, last_generation = self._rounds, self._generation
        new_lines = [
            line
            for index, line in enumerate(rounds)
            if index >= count or line.generation > last_generation
        ]
        if not new_lines:
            return
        metrics = [
            self._entities.Metric(key, value, int(line.time_s * 1000), line.steps)
            for line in new_lines
            for key, value in line.values.items()
        ]
        for begin in range(0, len(metrics), MAX_METRICS):
            part = metrics[begin : begin + MAX_METRICS]
            self._request(lambda part=part: self._client.log_batch(self._run_id, metrics=part))  # type: ignore[misc]
        self._rounds, self._generation = (
            len(rounds),
            max(last_generation, *(line.generation for line in new_lines)),
        )
        tags = {ROUNDS: self._rounds, GENERATION: self._generation}
        run_tags = [self._entities.RunTag(key, str(value)) for key, value in tags.items()]
        self._request(lambda: self._client.log_batch(self._run_id, tags=run_tags))

    def register(self, name: str, stage: Stage) -> str:
        """Registers the run as a version of the model ``name`` and returns the version.

        A later export uses the same version again. The version has the alias ``production`` only if
        ``stage`` is production. Raises InputError if MLflow refuses a request.
        """
        return self._request(lambda: self._register(name, stage))

    def _register(self, name: str, stage: Stage) -> str:
        client = self._client
        try:
            client.create_registered_model(name)
        except self._error_class as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        versions = client.search_model_versions(f"run_id = '{self._run_id}'")
        model = next((version for version in versions if version.name == name), None)
        if model is None:
            # MLflow requires a location of files, but no weights are uploaded.
            location = f"runs:/{self._run_id}/model"
            model = client.create_model_version(name, location, self._run_id, tags=self._tags)
        version = str(model.version)
        if stage == PRODUCTION:
            client.set_registered_model_alias(name, PRODUCTION, version)
        elif str(client.get_registered_model(name).aliases.get(PRODUCTION)) == version:
            client.delete_registered_model_alias(name, PRODUCTION)
        return version

    def close(self, *, finished: bool) -> None:
        """Marks the MLflow run as finished if the run is finished."""
        if finished:
            self._request(lambda: self._client.set_terminated(self._run_id, "FINISHED"))


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted key, value) for each leaf of a recipe, such as ``("phases.0.optimizer.lr",
    "0.001")``. A list of scalars is one value, written as JSON.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from flatten(item, f"{name}.{number}")
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)

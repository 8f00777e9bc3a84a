"""Logs the rounds of a party as an MLflow run, and registers it as a model version."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from vfl.summary.rounds import PartyFolder, RoundLine
from vfl_common.errors import Code, InputError
from vfl_common.registry import PRODUCTION, Stage

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

"""Logs rounds as metrics of an MLflow run, and registers it, through MLflow's client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from vfl.report.rounds import PartyFolder, RoundLine
from vfl_common.errors import Code, InputError
from vfl_common.production.registry import PRODUCTION, Stage

INSTALL = "pip install mlflow-skinny"
# MLflow's limits for one request.
MAX_METRICS, MAX_PARAMS = 1000, 100
MAX_CHARACTERS = 500
# Names of our tags.
RUN, PARTY, ROUNDS, GENERATION = "vfl.run_id", "vfl.party", "vfl.rounds", "vfl.generation"
# The tag of a run that others are nested in, and MLflow's tag of the nested runs.
UNDER, PARENT = "vfl.under", "mlflow.parentRunId"

T = TypeVar("T")


class Mlflow:
    """One MLflow run per party; a later export appends to it.

    Tags hold the number of exported rounds and their last generation. A round that was repeated
    since is logged again at its step; MLflow takes the later time. ``under``: the name of the
    MLflow run that this one is nested in; it is created if needed. Raises InputError if the package
    is missing or MLflow refuses.
    """

    def __init__(
        self, source: PartyFolder, uri: str, experiment: str, under: str | None = None
    ) -> None:
        self._uri = uri
        # Without this, MLflow reports its use to its developers.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # With the default, it waits minutes if no server answers.
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
        self._entities, self._refused = entities, MlflowException
        # The clients that the registry creates otherwise create a database in this folder.
        self._ask(lambda: set_tracking_uri(uri))
        self._client = self._ask(lambda: MlflowClient(tracking_uri=uri))
        self._tags = {RUN: source.run_id, PARTY: source.party}
        self._run_id, tags = self._ask(lambda: self._find(source, experiment))
        if under is not None:
            self._ask(lambda: self._nest(under))
        self._rounds, self._generation = int(tags.get(ROUNDS, 0)), int(tags.get(GENERATION, 0))

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._refused as error:
            why = next(
                (line.strip() for line in str(error).splitlines() if line.strip()),
                type(error).__name__,
            )
            raise InputError(
                Code.UNREACHABLE,
                f"MLflow at {self._uri}: cannot be used ({why}). Check --tracking-uri and the "
                "server.",
            ) from None

    def _find(self, source: PartyFolder, experiment: str) -> tuple[str, dict[str, str]]:
        """Returns the id and tags of an earlier export's run, or of a new one that has the recipe
        as its parameters.
        """
        client, entities = self._client, self._entities
        existing = client.get_experiment_by_name(experiment)
        place = (
            existing.experiment_id if existing is not None else client.create_experiment(experiment)
        )
        ours = f"tags.`{RUN}` = '{source.run_id}' and tags.`{PARTY}` = '{source.party}'"
        for run in client.search_runs([place], ours, max_results=1):
            return run.info.run_id, run.data.tags
        run = client.create_run(place, tags=self._tags, run_name=f"{source.run_id}/{source.party}")
        params = [
            entities.Param(key, value[:MAX_CHARACTERS])
            for key, value in flat(source.read("recipe.json"))
        ]
        for begin in range(0, len(params), MAX_PARAMS):
            client.log_batch(run.info.run_id, params=params[begin : begin + MAX_PARAMS])
        return run.info.run_id, {}

    def _nest(self, under: str) -> None:
        """Nests the run in the run of that name, which has no metrics itself."""
        client = self._client
        place = client.get_run(self._run_id).info.experiment_id
        # Compared here, because a filter of MLflow needs some quotes escaped.
        known = client.search_runs([place], f"tags.`{UNDER}` LIKE '%'")
        parent = next((run for run in known if run.data.tags[UNDER] == under), None)
        if parent is None:
            parent = client.create_run(place, tags={UNDER: under}, run_name=under)
            client.set_terminated(parent.info.run_id, "FINISHED")
        client.set_tag(self._run_id, PARENT, parent.info.run_id)

    def update(self, rounds: Sequence[RoundLine]) -> None:
        """Logs the rounds that are new, and those that were repeated."""
        had, last = self._rounds, self._generation
        new = [line for place, line in enumerate(rounds) if place >= had or line.generation > last]
        if not new:
            return
        metrics = [
            self._entities.Metric(key, value, int(line.time_s * 1000), line.steps)
            for line in new
            for key, value in line.values.items()
        ]
        for begin in range(0, len(metrics), MAX_METRICS):
            part = metrics[begin : begin + MAX_METRICS]
            self._ask(lambda part=part: self._client.log_batch(self._run_id, metrics=part))  # type: ignore[misc]
        self._rounds, self._generation = len(rounds), max(last, *(line.generation for line in new))
        tags = {ROUNDS: self._rounds, GENERATION: self._generation}
        tagged = [self._entities.RunTag(key, str(value)) for key, value in tags.items()]
        self._ask(lambda: self._client.log_batch(self._run_id, tags=tagged))

    def register(self, name: str, stage: Stage) -> str:
        """Registers the run as a version of the model ``name`` and returns the version.

        A later export finds the version of an earlier one. The version has the alias ``production``
        in that stage only. Raises InputError if MLflow refuses.
        """
        return self._ask(lambda: self._register(name, stage))

    def _register(self, name: str, stage: Stage) -> str:
        client = self._client
        try:
            client.create_registered_model(name)
        except self._refused as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        known = client.search_model_versions(f"run_id = '{self._run_id}'")
        mine = next((candidate for candidate in known if candidate.name == name), None)
        if mine is None:
            # MLflow requires a location of files; there are none, because the weights stay here.
            place = f"runs:/{self._run_id}/model"
            mine = client.create_model_version(name, place, self._run_id, tags=self._tags)
        version = str(mine.version)
        if stage == PRODUCTION:
            client.set_registered_model_alias(name, PRODUCTION, version)
        elif str(client.get_registered_model(name).aliases.get(PRODUCTION)) == version:
            client.delete_registered_model_alias(name, PRODUCTION)
        return version

    def close(self, *, finished: bool) -> None:
        """Marks the MLflow run as finished if the run is."""
        if finished:
            self._ask(lambda: self._client.set_terminated(self._run_id, "FINISHED"))


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves of a recipe, such as ``("phases.0.optimizer.lr", "0.001")``; lists of
    scalars are JSON.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for number, item in enumerate(value):
            yield from flat(item, f"{name}.{number}")
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)

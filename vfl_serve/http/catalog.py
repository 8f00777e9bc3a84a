"""The served models by name and run, and the access to them by tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from vfl_serve.counts import Counts
from vfl_serve.http.served import Served, read_bearer
from vfl_serve.models import Lineage, LoadedRun
from vfl_serve.tokens import Denied, Token, Tokens


class ServedAnswering(LoadedRun, Protocol):
    """A run that answers requests."""

    @property
    def served(self) -> Served: ...


A = TypeVar("A", bound=ServedAnswering)


@dataclass(frozen=True)
class ServedModel(Generic[A]):
    """The runs of one model."""

    line: Lineage[A]

    @property
    def served(self) -> Served:
        """Returns the run that answers requests without a version."""
        return replace(self.line.now.served, instead=lambda: self.served)

    def version(self, run_id: str) -> Served | None:
        """Returns a loaded run of the model; None if it is not loaded."""
        run = self.line.find(run_id)
        return run.served if run is not None else None

    def describe(self) -> dict[str, Any]:
        """Returns the public facts about the model."""
        line, next_run = self.line, self.line.next
        return {
            "name": line.name,
            "run": line.now.run_id,
            "waits": next_run.run_id if next_run is not None else None,
            "versions": [
                {
                    "run": run.run_id,
                    "present": list(run.present()),
                    **run.served.exactness,
                }
                for run in line.runs
            ],
        }


class Catalog(Generic[A]):
    """All served models.

    Args:
        models: {name: model}, at least one.
        counts: Counts requests by status.
        ready: Returns whether requests can be answered.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel[A]],
        tokens: Tokens,
        counts: Counts,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.models, self._tokens, self.counts = dict(models), tokens, counts
        self.ready = ready

    @property
    def first(self) -> Served:
        """Returns the current run of the first model on the command line."""
        return next(iter(self.models.values())).served

    def allow(self, header: str) -> None:
        """Raises Denied if a caller may use none of the models.

        ``header``: the value of ``Authorization``.
        """
        names = [
            name
            for model in self.models.values()
            for name in (model.line.name, *(run.run_id for run in model.line.runs))
        ]
        self._tokens.check(read_bearer(header), names)

    def open(
        self, header: str | None, name: str | None = None, version: str | None = None
    ) -> tuple[Served, Token | None]:
        """Returns a run of a model and the caller's token for it. Raises Denied.

        Args:
            name: The name of the model, or the id of a run; None: the only model.
            version: The id of a run; None: the run that answers now.
        """
        if name is None and len(self.models) > 1:
            raise Denied(
                422, "model: must be given if several are served. Choose one that /v1/models lists."
            )
        served = self._find(name, version)
        if served is None:
            # A caller without access must not learn whether the model is served.
            self._tokens.check(read_bearer(header), [text for text in (name, version) if text])
            raise Denied(404, "no such model is served")
        token = served.allow(header)
        if token is not None and not {"*", served.name} & set(token.models):
            # The token is for this run, and not for the run that takes its place.
            served = replace(served, instead=None)
        return served, token

    def _find(self, name: str | None, version: str | None) -> Served | None:
        if name is None:
            model = next(iter(self.models.values()))
        elif (known := self.models.get(name)) is not None:
            model = known
        else:
            served = next(
                filter(None, (entry.version(name) for entry in self.models.values())), None
            )
            return served if version in (None, name) else None
        return model.served if version is None else model.version(version)

    def versions(self, served: Served) -> list[str]:
        """Returns the ids of a model's runs; the run that answers is the first."""
        model = self.models.get(served.name)
        return [run.run_id for run in model.line.runs] if model is not None else [served.run_id]

    def list_models(self, header: str | None) -> list[dict[str, Any]]:
        """Returns the facts about the models that the caller's token allows. Raises Denied."""
        self.allow(header or "")
        result = []
        for model in self.models.values():
            try:
                model.served.allow(header)
            except Denied:
                continue
            result.append(model.describe())
        return result

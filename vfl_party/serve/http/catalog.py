"""The models that the port serves, by name and run, and who may ask which of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from vfl_party.serve.counts import Counts
from vfl_party.serve.http.served import Served, read_bearer
from vfl_party.serve.models import Lineage, LoadedRun
from vfl_party.serve.tokens import Denied, Token, Tokens


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
        """What answers a request that names no run."""
        return replace(self.line.now.served, instead=lambda: self.served)

    def version(self, run_id: str) -> Served | None:
        """Returns a run of the model."""
        run = self.line.find(run_id)
        return run.served if run is not None else None

    def about(self) -> dict[str, Any]:
        """Returns what a caller may know of it."""
        line, following = self.line, self.line.next
        return {
            "name": line.name,
            "run": line.now.run_id,
            "waits": following.run_id if following is not None else None,
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
    """All models that are served.

    Args:
        models: {name: model}, at least one.
        counts: of requests by status.
        ready: returns whether requests can be answered.
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
        """The model that was named first."""
        return next(iter(self.models.values())).served

    def allow(self, header: str) -> None:
        """Raises Denied if a caller may ask none of the models. ``header``: ``Authorization``."""
        names = [
            name
            for model in self.models.values()
            for name in (model.line.name, *(run.run_id for run in model.line.runs))
        ]
        self._tokens.check(read_bearer(header), names)

    def open(
        self, header: str | None, name: str | None = None, version: str | None = None
    ) -> tuple[Served, Token | None]:
        """Returns a model, and the caller's token for it. Raises Denied.

        Args:
            name: of the model, or the id of a run; None: of the only model.
            version: the id of a run; None: of the one that answers now.
        """
        if name is None and len(self.models) > 1:
            raise Denied(
                422, "model: must be given if several are served. Choose one that /v1/models lists."
            )
        served = self._find(name, version)
        if served is None:
            # Who may not ask for it does not hear whether it is here.
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
        """Returns the runs of a model; the one that answers is the first."""
        model = self.models.get(served.name)
        return [run.run_id for run in model.line.runs] if model is not None else [served.run_id]

    def listed(self, header: str | None) -> list[dict[str, Any]]:
        """Returns what a caller may know of the models that its token is for. Raises Denied."""
        self.allow(header or "")
        result = []
        for model in self.models.values():
            try:
                model.served.allow(header)
            except Denied:
                continue
            result.append(model.about())
        return result

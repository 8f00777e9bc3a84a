"""Served runs and catalogs that are made in this process, without parties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vfl_party.predict.run import Quality
from vfl_serve.models import Lineage
from vfl_serve.scored import Counts, ServedScores
from vfl_serve.scorer import Batcher
from vfl_serve.served import Catalog, Served, ServedModel
from vfl_serve.tokens import Tokens


def made_served(score: Callable[..., ServedScores], **more: Any) -> Served:
    """Makes a run of model ``case`` that scores so; ``more``: other fields."""
    given: dict[str, Any] = {
        "name": "case",
        "run_id": "run",
        "columns": {"score": np.dtype(float)},
        "parties": ("bank",),
        "batcher": Batcher(score, 8, 0.0),
        "tokens": Tokens(None),
        "quality": Quality(),
        "counts": Counts(),
        "max_rows": 10,
        "max_at_once": 8,
        "present": lambda: (),
    }
    return Served(**given | more)


@dataclass
class FakeRun:
    """A run of a line. ``there``: the parties that attend."""

    served: Served
    there: list[str] = field(default_factory=list)
    closed: bool = False

    @property
    def run_id(self) -> str:
        return self.served.run_id

    def present(self) -> Sequence[str]:
        return self.there

    def close(self) -> None:
        self.closed = True


def catalog(tokens: Tokens, counts: Counts, *served: Served) -> Catalog[FakeRun]:
    """Makes a catalog: a model of each name, whose first run answers."""
    of = dict[str, list[FakeRun]]()
    for each in served:
        of.setdefault(each.name, []).append(FakeRun(each))
    lines = {
        name: Lineage(name, runs, (), 1, lambda *_args, **_facts: None) for name, runs in of.items()
    }
    return Catalog({name: ServedModel(line) for name, line in lines.items()}, tokens, counts)

"""A run that is served by all its parties in this process: what is asked goes to their answers, and
no wire is between.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

import vfl
from vfl.simulation.federation import Origin
from vfl_common.config.base import parse
from vfl_common.config.party import ServeSettings
from vfl_common.errors import VflError
from vfl_common.rpc.serving.stream import Absent, ServingAnswer, Step
from vfl_party.outbound.policies import AllowAll
from vfl_party.phases import stand_in
from vfl_party.predict.run import load_joint, load_solo, read_quality
from vfl_serve.answering import SentBefore
from vfl_serve.kinds import RowScorer, make_answers, make_scorer
from vfl_serve.scored import ServedScores
from vfl_serve.store import FeatureLookup

# Of a score, if rows are not exact.
_ROUNDING = 1e-5


def store_of(
    run: Path, name: str, *, solo: bool = False, serve: dict[str, Any] | None = None
) -> FeatureLookup:
    """Opens a party's rows and models, with the data of training. ``serve``: the file's table."""
    trained = load_solo(run, name) if solo else load_joint(run, name)
    party = trained.recipe.party(name)
    assert party is not None
    settings = parse(ServeSettings, serve or {}, "serve")
    file = SimpleNamespace(data=Origin.of(run).data[name], serve=settings)
    files = SimpleNamespace(
        file=file, name=name, settings=party, device=torch.device("cpu"), policy=AllowAll
    )
    return FeatureLookup(cast(Any, files), trained, lambda *_, **__: None)


@dataclass
class Online:
    """The parties of a run. ``away``: {party: why it does not answer, from which question on}."""

    scorer: RowScorer
    answers: Mapping[str, Any]
    away: dict[str, tuple[Absent, int]] = field(default_factory=dict)
    asked: list[tuple[str, list[str], Step | None]] = field(default_factory=list)
    number: int = 0

    @classmethod
    def of(
        cls,
        run: Path,
        *,
        timeout_s: float = 5.0,
        limit: Any = None,
        serve: Mapping[str, dict[str, Any]] | None = None,
    ) -> Online:
        """Opens all parties of a run. ``serve``: {party: this table of its file}."""
        serve = serve or {}
        recipe = load_joint(run, Origin.of(run).data.__iter__().__next__()).recipe
        active = store_of(run, recipe.active.name, serve=serve.get(recipe.active.name))
        answers = {
            each.name: make_answers(
                store_of(run, each.name, serve=serve.get(each.name)),
                partial(SentBefore, run / each.name / "sent.sqlite", run.name),
                limit,
            )
            for each in recipe.passives
        }
        found = cls(cast(Any, None), answers)
        means = stand_in.read_means(run / recipe.active.name)
        kept, quality = cast(Any, found), read_quality(run, recipe)
        found.scorer = make_scorer(active, kept, timeout_s, quality, means, solo=False, kept=kept)
        return found

    def ask(
        self, ids: Sequence[str], timeout_s: float, steps: Mapping[str, Step] | None = None
    ) -> Any:
        """See ``ServingService.ask``."""
        until_s = time.monotonic() + timeout_s
        self.number += 1
        found: dict[str, ServingAnswer | Absent] = {}
        for name in self.answers if steps is None else steps:
            step = steps[name] if steps is not None else None
            why, since = self.away.get(name, ("away", 1 << 60))
            self.asked.append((name, list(ids), step))
            if self.number >= since:
                found[name] = why
                continue
            if step is not None:
                step = Step(step.asked, step.first or self.number, begins=not step.first)
            try:
                given = ids if step is None or step.begins else []
                found[name] = self.answers[name](given, until_s, step)
            except TimeoutError:
                found[name] = "late"
            except VflError:
                found[name] = "failed"
        return SimpleNamespace(number=self.number, wait=lambda: found)

    def close(self) -> None:
        """Closes the parties' stores."""
        for each in (self.scorer, *self.answers.values()):
            each._store.close()

    @property
    def inexact(self) -> str:
        """Why a party's models may give a served row other bits than a prediction; '' if none."""
        stores = [each._store for each in (self.scorer, *self.answers.values())]
        return "; ".join(filter(None, (each.held.inexact for each in stores)))

    def check_same(self, found: ServedScores, ids: Sequence[str], want: Mapping[str, Any]) -> None:
        """Asserts that the scores of ``ids`` are those of a prediction, ``want``: bit for bit, or
        to rounding if a party says that its models are not exact here.
        """
        for at, each in enumerate(ids):
            mine = numbers(found, at)
            if not self.inexact:
                assert mine == want[each], each
                continue
            for name, value in mine.items():
                if isinstance(value, float):
                    assert abs(value - want[each][name]) <= _ROUNDING * max(1.0, abs(value)), each

    def score(self, *ids: str, **more: Any) -> ServedScores:
        """Scores ids."""
        return self.scorer.score(ids, **more)


def predicted(run: vfl.Run, **more: Any) -> dict[str, dict[str, Any]]:
    """Returns the columns of a prediction of the run's own rows by id, {id: {column: value}}."""
    found = run.predict(**more)
    names = [name for name in found if name not in ("state", "parties")]
    key = next((name for name in names if name.startswith("matched_")), "id")
    ids = found[key] if key in found else found[names[0]]
    columns = [
        name for name in names if name.startswith("score") or name in ("class", "value", "risk")
    ]
    return {str(each): {name: found[name][at] for name in columns} for at, each in enumerate(ids)}


def numbers(scores: ServedScores, at: int) -> dict[str, Any]:
    """Returns the columns of a row."""
    return {name: values[at].item() for name, values in scores.columns.items()}

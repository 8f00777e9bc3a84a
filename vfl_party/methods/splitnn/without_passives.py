"""Continues training at the active party without passive parties that are late or absent."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vfl_common.bundle import Lenience, StepKey
from vfl_common.process.logs import Rate
from vfl_common.summary import Absence
from vfl_party.base.seeds import Rows
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.models.top.stand_ins import learnt_stand_ins
from vfl_party.phases.absence import Absences, Cache, replace_absent
from vfl_party.phases.context import Party

# The minimum number of seconds between two messages about a party, and the number of messages
# before this limit applies.
_MIN_INTERVAL_S, _NUM_UNLIMITED = 1.0, 5

log = logging.getLogger(__name__)


class AbsentParties:
    """Replaces the embeddings of absent parties, and records their absences.

    All parties must take part in the first step of a generation, because until then they may be
    working on another phase.
    """

    def __init__(self, party: Party, phase: str, settings: SplitNNSettings) -> None:
        self._party, self._policy, self._rule = (
            party,
            settings.late_policy,
            party.recipe.model.combine,
        )
        self._names = [passive.name for passive in party.recipe.passives]
        self._widths, self._stand_ins = party.widths, learnt_stand_ins(party.models)
        # An active party without features needs the embeddings of at least one passive party.
        self._allowed = Lenience(
            settings.deadline_s or 0.0, at_least=0 if party.features is not None else 1
        )
        self.lenience: Lenience | None = None
        self._cache: Cache | None = None
        if self._policy == "cached" and self._names:
            n = 1 + max(
                (int(rows.max()) for rows in party.data.splits.values() if len(rows)), default=0
            )
            self._cache = Cache(party.widths, n, party.device)
        self._absences = Absences(phase)
        self._shows = Rate(_MIN_INTERVAL_S, _NUM_UNLIMITED)
        # {party: the number of steps that it has missed in the current round}.
        self._missed: Counter[str] = Counter()
        # The parties that were absent in the previous round.
        self._reported: frozenset[str] = frozenset()

    def fill(
        self, step: StepKey, rows: Rows, own: Sequence[Tensor], z_BD: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Returns {passive party: its embeddings [B, D] of a batch, or the replacement of these}.

        This is called after each step. All parties have taken part in the first step, so from then
        on they may be absent.
        """
        if self.lenience is None:
            self.lenience = self._allowed
            self._party.lenient(True)
        embeddings: dict[str, Tensor | None] = {name: z_BD.get(name) for name in self._names}
        missing = [name for name, z in embeddings.items() if z is None]
        self._missed.update(missing)
        newly_absent, returned = self._absences.note(step, missing)
        for name in newly_absent:
            log.warning(
                "going on without %s at %s",
                name,
                _describe_step(step),
                extra={"event": "away", "away": name},
            )
            self._show("away", name, step)
        for name in returned:
            log.info(
                "%s is back at %s",
                name,
                _describe_step(step),
                extra={"event": "back", "back": name},
            )
            self._show("back", name, step)
        if self._cache is not None:
            embeddings = self._cache.fill(embeddings, rows)
        return replace_absent(
            self._policy, self._rule, own, embeddings, self._widths, self._stand_ins
        )

    def _show(self, event: str, name: str, step: StepKey) -> None:
        """Shows that a party has left or returned, with a limited rate for each party."""
        if self._shows.passes(name, time.monotonic()) is not None:
            self._party.show(event, party=name, at=_describe_step(step))

    def describe_round(self, round_: int, steps: int) -> str:
        """Returns a sentence about the parties that were absent in the round that has ended; '' if
        there were none, or the same parties as in the previous round.
        """
        missed, self._missed = self._missed, Counter()
        reported_before, self._reported = self._reported, frozenset(missed)
        texts = [
            f"{name} for {missed[name]} of {steps} steps" for name in self._names if missed[name]
        ]
        if not texts or reported_before == self._reported:
            return ""
        return f"round {round_ + 1} went on without {', '.join(texts)}"

    @property
    def absences(self) -> tuple[Absence, ...]:
        """All absences of the phase so far."""
        return self._absences.stretches

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        cache = self._cache.state() if self._cache is not None else None
        return {"absences": self._absences.state(), "cache": cache}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._absences.load_state(tree["absences"])
        if self._cache is not None:
            self._cache.load_state(tree["cache"])


def _describe_step(step: StepKey) -> str:
    """Returns a text about a step, with numbers that start at 1."""
    return f"phase {step.phase}, round {step.round + 1}, batch {step.batch + 1}"

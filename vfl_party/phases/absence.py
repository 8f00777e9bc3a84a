"""Training while a passive party is late or away: what stands in for its embeddings, and what is
recorded of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.config.models import Combine
from vfl_common.errors import Code, PeerError
from vfl_common.link import StepPassed
from vfl_common.summary import Absence
from vfl_party.base.devices import index_on
from vfl_party.base.seeds import Rows
from vfl_party.models.top.stand_ins import StandIns

LatePolicy = Literal["wait", "zeros", "cached", "skip"]
# A phase has no more stretches; further steps are added to their party's last one.
MAX_STRETCHES = 200


def fill_missing(
    policy: LatePolicy,
    rule: Combine,
    own: Sequence[Tensor],
    z_BD: Mapping[str, Tensor | None],
    widths: Mapping[str, int],
    stand_ins: StandIns | None = None,
) -> list[Tensor]:
    """Returns the embeddings [B, D] to combine for a batch: the active party's own, then the
    others' in roster order.

    None stands for a party that is absent. Under ``skip`` only the others are combined; a
    concatenation has no narrower form, so there, and with the other policies, zeros take its place:
    or what the model has learnt in ``stand_ins``, under every policy. ``widths``: {passive party:
    D}.
    """
    return [*own, *others(policy, rule, own, z_BD, widths, stand_ins).values()]


def others(
    policy: LatePolicy,
    rule: Combine,
    own: Sequence[Tensor],
    z_BD: Mapping[str, Tensor | None],
    widths: Mapping[str, int],
    stand_ins: StandIns | None = None,
) -> dict[str, Tensor]:
    """Returns {passive party: its embeddings, or what stands in for them}; see ``filled``."""
    there = {name: z for name, z in z_BD.items() if z is not None}
    left_out = stand_ins is None and policy == "skip" and rule != "concat"
    if len(there) == len(z_BD) or left_out:
        return there
    like = next(iter((*own, *there.values())))
    rows = len(like)
    return {
        name: z
        if z is not None
        else stand_ins.of(name, rows)
        if stand_ins is not None
        else like.new_zeros(rows, widths[name])
        for name, z in z_BD.items()
    }


class Cache:
    """The last embedding of each row that each party has sent, float32 [N, D]; zeros for rows never
    seen.

    ``widths``: {party: D}. ``n``: the number of aligned rows.
    """

    def __init__(self, widths: Mapping[str, int], n: int, device: torch.device) -> None:
        self._last = {
            party: torch.zeros(n, width, device=device) for party, width in widths.items()
        }

    def fill(self, z_BD: Mapping[str, Tensor | None], rows: Rows) -> dict[str, Tensor | None]:
        """Keeps the embeddings that came, and returns them with the cached ones of the absent
        parties.
        """
        at = index_on(torch.from_numpy(rows), next(iter(self._last.values())).device)
        embeddings: dict[str, Tensor | None] = {}
        for party, z in z_BD.items():
            if z is None:
                embeddings[party] = self._last[party].index_select(0, at)
            else:
                self._last[party].index_copy_(0, at, z.detach())
                embeddings[party] = z
        return embeddings

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint keeps."""
        return dict(self._last)

    def load_state(self, tree: dict[str, Tensor]) -> None:
        """Restores what ``state`` has returned."""
        for party, last in self._last.items():
            last.copy_(tree[party])


class Absences:
    """Records which training steps of a phase were computed without whom, as stretches of
    successive steps.
    """

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._stretches: list[dict[str, Any]] = []
        # Each party's newest stretch.
        self._last: dict[str, dict[str, Any]] = {}
        self._away: frozenset[str] = frozenset()

    def note(self, step: StepKey, absent: Collection[str]) -> tuple[list[str], list[str]]:
        """Records one step. Returns (parties that were there at the step before, parties that have
        come back).
        """
        for party in absent:
            stretch = self._last.get(party)
            if stretch is None or (
                party not in self._away and len(self._stretches) < MAX_STRETCHES
            ):
                first = {"first_round": step.round, "first_batch": step.batch}
                stretch = self._last[party] = {
                    "phase": self._phase,
                    "party": party,
                    **first,
                    "steps": 0,
                }
                self._stretches.append(stretch)
            stretch |= {
                "last_round": step.round,
                "last_batch": step.batch,
                "steps": stretch["steps"] + 1,
            }
        before, self._away = self._away, frozenset(absent)
        return sorted(self._away - before), sorted(before - self._away)

    @property
    def stretches(self) -> tuple[Absence, ...]:
        """All stretches, in the order of their first steps."""
        return tuple(Absence(**stretch) for stretch in self._stretches)

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps."""
        return {"found": self._stretches, "away": sorted(self._away)}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores what ``state`` has returned."""
        self._stretches = [dict(stretch) for stretch in tree["found"]]
        self._last = {stretch["party"]: stretch for stretch in self._stretches}
        self._away = frozenset(tree["away"])


class Following:
    """A passive party's place in a phase that goes on without it.

    ``order``: the names of the run's phases. ``peer``: the active party, for messages.
    """

    def __init__(self, order: Sequence[str], peer: str) -> None:
        self._order, self._peer = {name: place for place, name in enumerate(order)}, peer
        self._now: tuple[int, int, int] | None = None

    def is_over(self, step: StepKey) -> bool:
        """Returns whether the others have gone on beyond ``step``."""
        return self._now is not None and self._place(step) < self._now

    def skip(self, step: StepKey, passed: StepPassed) -> None:
        """Notes that ``step`` has passed. Raises PeerError if the step that the peer reports as
        under way comes before it.
        """
        now = self._place(passed.now)
        if now <= self._place(step):
            raise PeerError(
                Code.STEP_OUT_OF_ORDER,
                f"{self._peer} says that {passed.now} is under way, when asked for {step}",
                party=self._peer,
            )
        self._now = now

    def _place(self, step: StepKey) -> tuple[int, int, int]:
        place = self._order.get(step.phase)
        if place is None:
            raise PeerError(
                Code.STEP_OUT_OF_ORDER,
                f"{self._peer} is at {step}, which no phase has",
                party=self._peer,
            )
        return place, step.round, step.batch

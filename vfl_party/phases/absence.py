"""Supports training while a passive party is late or away: replaces its embeddings, and records the
steps without it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from vfl_common.bundle import StepKey, StepPassed
from vfl_common.config.models import Combine
from vfl_common.errors import Code, PeerError
from vfl_common.summary import Absence
from vfl_party.base.devices import copy_index
from vfl_party.base.seeds import Rows
from vfl_party.models.top import StandIns

LatePolicy = Literal["wait", "zeros", "cached", "skip"]
# The maximum number of stretches in a phase. Further steps are added to the party's last stretch.
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
    passive parties' in roster order.

    ``z_BD``: {passive party: its embeddings, or None if it is absent}. With ``stand_ins``, the
    learnt vectors replace an absent party's embeddings under every policy. Otherwise the policy
    ``skip`` leaves an absent party out. The other policies, and a concatenation, which needs all
    widths, use zeros instead. ``widths``: {passive party: D}.
    """
    return [*own, *replace_absent(policy, rule, own, z_BD, widths, stand_ins).values()]


def replace_absent(
    policy: LatePolicy,
    rule: Combine,
    own: Sequence[Tensor],
    z_BD: Mapping[str, Tensor | None],
    widths: Mapping[str, int],
    stand_ins: StandIns | None = None,
) -> dict[str, Tensor]:
    """Returns {passive party: its embeddings or their replacement}; see ``fill_missing``."""
    present = {name: z for name, z in z_BD.items() if z is not None}
    leaves_out = stand_ins is None and policy == "skip" and rule != "concat"
    if len(present) == len(z_BD) or leaves_out:
        return present
    example = next(iter((*own, *present.values())))
    rows = len(example)
    return {
        name: z
        if z is not None
        else stand_ins.of(name, rows)
        if stand_ins is not None
        else example.new_zeros(rows, widths[name])
        for name, z in z_BD.items()
    }


class Cache:
    """Stores the last embedding of each row that each passive party has sent, float32 [N, D]; zeros
    for rows not sent yet.

    ``widths``: {party: D}. ``n``: The number of aligned rows.
    """

    def __init__(self, widths: Mapping[str, int], n: int, device: torch.device) -> None:
        self._last = {
            party: torch.zeros(n, width, device=device) for party, width in widths.items()
        }

    def fill(self, z_BD: Mapping[str, Tensor | None], rows: Rows) -> dict[str, Tensor | None]:
        """Stores the received embeddings. Returns them together with the cached embeddings of
        absent parties.
        """
        row_index = copy_index(torch.from_numpy(rows), next(iter(self._last.values())).device)
        embeddings: dict[str, Tensor | None] = {}
        for party, z in z_BD.items():
            if z is None:
                embeddings[party] = self._last[party].index_select(0, row_index)
            else:
                self._last[party].index_copy_(0, row_index, z.detach())
                embeddings[party] = z
        return embeddings

    def state(self) -> dict[str, Tensor]:
        """Returns the cached embeddings for a checkpoint."""
        return dict(self._last)

    def load_state(self, tree: dict[str, Tensor]) -> None:
        """Restores what ``state`` has returned."""
        for party, last in self._last.items():
            last.copy_(tree[party])


class Absences:
    """Records the training steps of a phase that were computed without some party, as stretches of
    successive steps.
    """

    def __init__(self, phase: str) -> None:
        self._phase = phase
        self._stretches: list[dict[str, Any]] = []
        # Each party's newest stretch.
        self._last: dict[str, dict[str, Any]] = {}
        self._away: frozenset[str] = frozenset()

    def note(self, step: StepKey, absent: Collection[str]) -> tuple[list[str], list[str]]:
        """Records one step. Returns (parties that are newly absent, parties that have returned)."""
        for party in absent:
            stretch = self._last.get(party)
            if stretch is None or (
                party not in self._away and len(self._stretches) < MAX_STRETCHES
            ):
                position = {"first_round": step.round, "first_batch": step.batch}
                stretch = self._last[party] = {
                    "phase": self._phase,
                    "party": party,
                    **position,
                    "steps": 0,
                }
                self._stretches.append(stretch)
            stretch |= {
                "last_round": step.round,
                "last_batch": step.batch,
                "steps": stretch["steps"] + 1,
            }
        away_before, self._away = self._away, frozenset(absent)
        return sorted(self._away - away_before), sorted(away_before - self._away)

    @property
    def stretches(self) -> tuple[Absence, ...]:
        """All stretches, in the order of their first steps."""
        return tuple(Absence(**stretch) for stretch in self._stretches)

    def state(self) -> dict[str, Any]:
        """Returns the recorded stretches for a checkpoint."""
        return {"found": self._stretches, "away": sorted(self._away)}

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores what ``state`` has returned."""
        self._stretches = [dict(stretch) for stretch in tree["found"]]
        self._last = {stretch["party"]: stretch for stretch in self._stretches}
        self._away = frozenset(tree["away"])


class Following:
    """Tracks, at a passive party, the current step of a phase that may continue without it.

    ``order``: The names of the run's phases, in order. ``peer``: The name of the active party, for
    messages.
    """

    def __init__(self, order: Sequence[str], peer: str) -> None:
        self._order, self._peer = {name: place for place, name in enumerate(order)}, peer
        self._now: tuple[int, int, int] | None = None

    def is_over(self, step: StepKey) -> bool:
        """Returns whether the other parties have continued beyond ``step``."""
        return self._now is not None and self._place(step) < self._now

    def skip(self, step: StepKey, passed: StepPassed) -> None:
        """Records that ``step`` has passed without this party. Raises PeerError if the peer's
        current step is not later than ``step``.
        """
        current = self._place(passed.now)
        if current <= self._place(step):
            raise PeerError(
                Code.STEP_OUT_OF_ORDER,
                f"{self._peer} reports {passed.now} as its current step when asked for {step}",
                party=self._peer,
            )
        self._now = current

    def _place(self, step: StepKey) -> tuple[int, int, int]:
        phase_number = self._order.get(step.phase)
        if phase_number is None:
            raise PeerError(
                Code.STEP_OUT_OF_ORDER,
                f"{self._peer} reports step {step}, which belongs to no phase of the recipe",
                party=self._peer,
            )
        return phase_number, step.round, step.batch

"""What the private phases of a recipe are to cost: every party computes it for all of them, before the first step.

Sampling rate and number of steps of each party and phase follow from the recipe and the number of training rows, which
is the same at all parties. So nobody has to be told what the others spend, and one noise multiplier fits all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from vfl_common.errors import Code, InputError, InternalError
from vfl_common.summary import Privacy
from vfl_party.privacy import poisson
from vfl_party.privacy.accountant import Budget, Spending, epsilon, noise_for
from vfl_party.privacy.settings import DpSettings, Mode
from vfl_party.privacy.statement import statement

_ALIKE = ("epsilon", "noise_multiplier", "delta", "division")  # one budget for all phases


@dataclass(frozen=True)
class PrivatePhase:
    """A phase that trains with differential privacy: who trains in it, and for how long."""

    name: str
    dp: DpSettings
    parties: tuple[str, ...]
    batch_size: int
    epochs: int


@dataclass(frozen=True)
class Share:
    """What one party is to spend in one phase."""

    phase: str
    party: str
    spending: Spending


@dataclass(frozen=True)
class Plan:
    """All shares of a run. ``dp``: what is alike in all private phases; ``outside``: what trains without privacy."""

    dp: DpSettings
    mode: Mode  # matched where one phase is
    shares: tuple[Share, ...]
    outside: tuple[str, ...] = ()

    @property
    def parties(self) -> tuple[str, ...]:
        """Those that train with privacy: the k of simple division."""
        return tuple(dict.fromkeys(share.party for share in self.shares))

    def share(self, phase: str, party: str) -> Share:
        for share in self.shares:
            if (share.phase, share.party) == (phase, party):
                return share
        raise InternalError(f"the plan has no share of {party} in {phase}")

    @property
    def epsilon(self) -> float:
        """The joint ε of all parties once all have done what they plan; none does more."""
        if self.dp.division == "moments":
            return epsilon(_spendings(self.shares), self.dp.delta)
        return sum(self._simple(party) for party in self.parties)

    def budget(self, phase: str, party: str) -> Budget:
        """How far a party may train in a phase: of the run's ε, or by simple division of its own part of it."""
        own = self.share(phase, party)
        if self.dp.division == "moments":
            parts, others = 1, [share for share in self.shares if share != own]
        else:
            parts, others = len(self.parties), [each for each in self.shares if each.party == party and each != own]
        delta, rest = self.dp.delta / parts, tuple(_spendings(others))
        if self.dp.epsilon is not None:
            return Budget(self.dp.epsilon / parts, delta, own.spending, rest)
        planned = Budget(math.inf, delta, own.spending, rest).spent(own.spending.steps)
        return Budget(planned, delta, own.spending, rest)

    def spent(self, phase: str, party: str, steps_done: int) -> float:
        """The joint ε once this party has done so many steps of the phase, and all else is as planned."""
        own = self.budget(phase, party).spent(steps_done)
        if self.dp.division == "moments":
            return own
        return own + sum(self._simple(other) for other in self.parties if other != party)

    def report(self) -> Privacy:
        """What the summary of the run says."""
        return Privacy(
            epsilon=self.epsilon,
            delta=self.dp.delta,
            mode=self.mode,
            division=self.dp.division,
            noise_multiplier=min(share.spending.noise_multiplier for share in self.shares),
            statement=statement(self.mode, self.epsilon, self.dp.delta, self.outside),
        )

    def _simple(self, party: str) -> float:
        own = _spendings(share for share in self.shares if share.party == party)
        return epsilon(own, self.dp.delta / len(self.parties))


def make_plan(phases: Sequence[PrivatePhase], rows: int, outside: Sequence[str] = ()) -> Plan | None:
    """The plan of a recipe's private phases over so many training rows; None where there are none.

    outside: names of what trains without privacy. Raises InputError where two phases do not share one budget, where
    delta is too large for so many rows, or where no noise gives epsilon.
    """
    if not phases or not rows:
        return None
    dp = phases[0].dp
    if dp.delta * rows >= 1.0:
        text = f"recipe: phases: dp.delta = {dp.delta:g} of {phases[0].name} is not below 1 / {rows} training rows"
        raise InputError(
            Code.CONFIG_INVALID, f"{text}: giving away one whole row would be within it; take {0.1 / rows:.0e} or less"
        )
    for phase in phases[1:]:
        for key in _ALIKE:
            if getattr(phase.dp, key) != getattr(dp, key):
                text = f"recipe: phases: dp.{key} of {phases[0].name} and of {phase.name} differ"
                raise InputError(
                    Code.CONFIG_INVALID, f"{text}; one budget covers all phases that have dp: give both the same"
                )
    shares = [
        Share(phase.name, party, Spending(dp.noise_multiplier or 0.0, rate, steps))
        for phase in phases
        for rate in [poisson.sampling_rate(rows, phase.batch_size)]
        for steps in [phase.epochs * poisson.steps_an_epoch(rows, phase.batch_size)]
        for party in phase.parties
    ]
    if not shares:
        return None  # the phases are those of passive parties, and there are none
    mode: Mode = "matched" if any(phase.dp.mode == "matched" for phase in phases) else "fixed"
    if dp.epsilon is not None:
        shares = _with_noise(dp.epsilon, dp, shares)
    return Plan(dp, mode, tuple(shares), tuple(outside))


def _with_noise(target: float, dp: DpSettings, shares: Sequence[Share]) -> list[Share]:
    """Moments division: the noise multiplier that all share. Simple division: each party's own, by its own part."""
    names = list(dict.fromkeys(share.party for share in shares))
    groups = [names] if dp.division == "moments" else [[name] for name in names]
    found = {}
    for group in groups:
        own = tuple((s.spending.sampling_rate, s.spending.steps) for s in shares if s.party in group)
        noise = _noise(target / len(groups), dp.delta / len(groups), own)
        found.update(dict.fromkeys(group, noise))
    return [
        Share(each.phase, each.party, Spending(found[each.party], each.spending.sampling_rate, each.spending.steps))
        for each in shares
    ]


def _spendings(shares: Iterable[Share]) -> list[Spending]:
    return [share.spending for share in shares]


_noise = lru_cache(maxsize=64)(noise_for)  # each phase of a party asks again

"""Plans the privacy cost of a recipe's private phases: every party computes it for all, before the
first step.

Each party's sampling rate and number of steps in a phase follow from the recipe and the number of
training rows, which is equal at all parties. So no party needs the others' spending, and one noise
multiplier fits all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from vfl_common.errors import Code, InputError, InternalError
from vfl_common.summary import Privacy
from vfl_party.base.mechanism import Mechanism
from vfl_party.privacy import poisson
from vfl_party.privacy.accountant import Budget, Spending, epsilon, noise_for
from vfl_party.privacy.settings import DpSettings, Mode
from vfl_party.privacy.statement import statement

# Settings that must be equal in all phases: they share one budget.
_SHARED = ("epsilon", "noise_multiplier", "delta", "division")


@dataclass(frozen=True)
class PrivatePhase:
    """A phase that trains with differential privacy: the parties that train in it, and for how
    long.
    """

    name: str
    dp: DpSettings
    parties: tuple[str, ...]
    batch_size: int
    epochs: int


@dataclass(frozen=True)
class Share:
    """The planned spending of one party in one phase."""

    phase: str
    party: str
    spending: Spending


def _untold(phase: str, spending: Spending, of: str) -> None:
    """Does nothing: outside of a run, no budget is spent."""


@dataclass(frozen=True)
class PrivacyPlan:
    """All shares of a run. ``dp``: the common settings of all private phases; ``outside``: phases
    without privacy.
    """

    dp: DpSettings
    # Matched if any phase is matched.
    mode: Mode
    shares: tuple[Share, ...]
    outside: tuple[str, ...] = ()
    # Told of each step of this party before it is taken: the phase, the steps so far under the keys
    # of samples and noise, and what tells these keys from others.
    spends: Callable[[str, Spending, str], None] = field(default=_untold, compare=False)

    @property
    def parties(self) -> tuple[str, ...]:
        """The parties that train with privacy: the k of simple division."""
        return tuple(dict.fromkeys(share.party for share in self.shares))

    def cost(self, spending: Spending) -> Mechanism:
        """Returns what each step costs a row, for the account: without bound if targets were
        matched.
        """
        mechanism = spending.mechanism
        return mechanism if self.mode == "fixed" else replace(mechanism, noise=0.0)

    def share(self, phase: str, party: str) -> Share:
        """Returns a party's share in a phase."""
        for share in self.shares:
            if (share.phase, share.party) == (phase, party):
                return share
        raise InternalError(f"the plan has no share of {party} in {phase}")

    @property
    def epsilon(self) -> float:
        """The joint ε of all parties after all planned steps; no party does more."""
        if self.dp.division == "moments":
            return epsilon(_spendings(self.shares), self.dp.delta)
        return sum(self._simple(party) for party in self.parties)

    def budget(self, phase: str, party: str) -> Budget:
        """Returns a party's budget in a phase: within the run's ε or, by simple division, within
        its own part.
        """
        own = self.share(phase, party)
        if self.dp.division == "moments":
            parts, others = 1, [share for share in self.shares if share != own]
        else:
            parts, others = (
                len(self.parties),
                [share for share in self.shares if share.party == party and share != own],
            )
        delta, rest = self.dp.delta / parts, tuple(_spendings(others))
        if self.dp.epsilon is not None:
            return Budget(self.dp.epsilon / parts, delta, own.spending, rest)
        planned = Budget(math.inf, delta, own.spending, rest).epsilon_after(own.spending.steps)
        return Budget(planned, delta, own.spending, rest)

    def epsilon_after(self, phase: str, party: str, steps_done: int) -> float:
        """Returns the joint ε after ``steps_done`` steps of this party in the phase, with all else
        as planned.
        """
        own = self.budget(phase, party).epsilon_after(steps_done)
        if self.dp.division == "moments":
            return own
        return own + sum(self._simple(other) for other in self.parties if other != party)

    def report(self) -> Privacy:
        """Returns the entry for the run's summary."""
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


def make_plan(
    phases: Sequence[PrivatePhase], rows: int, outside: Sequence[str] = ()
) -> PrivacyPlan | None:
    """Plans a recipe's private phases over ``rows`` training rows; returns None without such phases
    or rows.

    outside: names of phases that train without privacy. Raises InputError if two phases do not
    share one budget, if delta is too large for ``rows``, or if no noise gives epsilon.
    """
    if not phases or not rows:
        return None
    dp = phases[0].dp
    if dp.delta * rows >= 1.0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phases[0].name}: dp.delta: must be less than 1 / {rows} training "
            f"rows, or one whole row may be revealed (got {dp.delta:g}). Set {0.1 / rows:.0e} or "
            "less.",
        )
    for phase in phases[1:]:
        for key in _SHARED:
            if getattr(phase.dp, key) != getattr(dp, key):
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"recipe: phases: dp.{key} of {phases[0].name} and {phase.name} must be equal, "
                    f"because one budget covers all phases with dp (got {getattr(dp, key)} and "
                    f"{getattr(phase.dp, key)}). Set the same value in both.",
                )
    shares = [
        Share(phase.name, party, Spending(dp.noise_multiplier or 0.0, rate, steps))
        for phase in phases
        for rate in [poisson.sampling_rate(rows, phase.batch_size)]
        for steps in [phase.epochs * poisson.steps_an_epoch(rows, phase.batch_size)]
        for party in phase.parties
    ]
    if not shares:
        # Only passive parties train in these phases, and there are none.
        return None
    mode: Mode = "matched" if any(phase.dp.mode == "matched" for phase in phases) else "fixed"
    if dp.epsilon is not None:
        shares = _with_noise(dp.epsilon, dp, shares)
    return PrivacyPlan(dp, mode, tuple(shares), tuple(outside))


def _with_noise(target: float, dp: DpSettings, shares: Sequence[Share]) -> list[Share]:
    """Sets the noise multipliers: by moments division one for all; by simple division one for each
    party's part.
    """
    names = list(dict.fromkeys(share.party for share in shares))
    groups = [names] if dp.division == "moments" else [[name] for name in names]
    noise_by_party = {}
    for group in groups:
        own = tuple(
            (s.spending.sampling_rate, s.spending.steps) for s in shares if s.party in group
        )
        noise = _noise(target / len(groups), dp.delta / len(groups), own)
        noise_by_party.update(dict.fromkeys(group, noise))
    return [
        Share(
            share.phase,
            share.party,
            Spending(
                noise_by_party[share.party], share.spending.sampling_rate, share.spending.steps
            ),
        )
        for share in shares
    ]


def _spendings(shares: Iterable[Share]) -> list[Spending]:
    return [share.spending for share in shares]


# Each phase of a party asks for the same values.
_noise = lru_cache(maxsize=64)(noise_for)

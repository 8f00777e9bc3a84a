"""Plans the privacy cost of the phases of a recipe that train with differential privacy.

Each party's sampling rate and number of steps in a phase follow from the recipe and the number of
training rows, which are the same at all parties. So every party computes the same plan for all
parties before the first step, and no party sends its spending to another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from vfl_common.config.base import Section
from vfl_common.config.models import Norm
from vfl_common.errors import Code, InputError, InternalError
from vfl_common.summary import Privacy
from vfl_party.base.mechanism import Mechanism
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.privacy.accountant import Budget, Spending, compute_epsilon, find_noise

Mode = Literal["fixed", "matched"]
Division = Literal["moments", "simple"]


class DpSettings(Section):
    """The keys of ``dp``: differential privacy of a phase. With ``mode = "matched"`` a row's
    gradient depends on other rows, so there is no guarantee. ``division = "simple"`` is the
    Priv-Baseline of FedOnce.
    """

    epsilon: Annotated[float, Field(ge=1e-3, le=1e6)] | None = None
    """The joint ε of all parties. Set this or ``noise_multiplier``."""
    noise_multiplier: Annotated[float, Field(ge=0.0, le=1e4)] | None = None
    """The standard deviation of the noise, as a multiple of ``max_grad_norm``; 0 clips gradients
    without noise.
    """
    delta: Annotated[float, Field(gt=0.0, lt=1.0)] = 1e-5
    """δ of the guarantee; keep it far below 1 / rows."""
    max_grad_norm: Norm = 1.0
    """The maximum L2 norm of one row's gradient over all parameters of a party; a longer gradient
    is scaled down.
    """
    mode: Mode = "fixed"
    """``fixed``: every row keeps its target. ``matched``: targets are assigned within a batch,
    without a guarantee.
    """
    division: Division = "moments"
    """How the budget is divided: ``moments`` adds the parties' Rényi divergences; ``simple`` gives
    each of k parties ε / k at δ / k, with more noise.
    """

    def model_post_init(self, _context: Any) -> None:
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("set epsilon or noise_multiplier, and not both")


# Settings that must be the same in all phases, because all phases share one budget.
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


def _ignore_spending(phase: str, spending: Spending, keys_digest: str) -> None:
    """Does nothing. It takes the place of the recorder outside of a run."""


@dataclass(frozen=True)
class PrivacyPlan:
    """The planned spendings of all parties in all private phases of a run.

    dp: The common settings of all private phases.
    outside: The names of the phases that train without differential privacy.
    """

    dp: DpSettings
    # "matched" if any phase has this mode, else "fixed".
    mode: Mode
    shares: tuple[Share, ...]
    outside: tuple[str, ...] = ()
    # Records each step of this party before it is taken. Its arguments are the phase, the steps so
    # far including this one, and ``DpTraining.keys_digest``.
    spends: Callable[[str, Spending, str], None] = field(default=_ignore_spending, compare=False)

    @property
    def parties(self) -> tuple[str, ...]:
        """The names of the parties that train with differential privacy."""
        return tuple(dict.fromkeys(share.party for share in self.shares))

    def cost(self, spending: Spending) -> Mechanism:
        """Returns the mechanism of each step for the privacy account. Its noise is 0 with matched
        targets, because then no bound on the cost is known.
        """
        mechanism = spending.mechanism
        return mechanism if self.mode == "fixed" else replace(mechanism, noise=0.0)

    def get_share(self, phase: str, party: str) -> Share:
        """Returns the planned spending of a party in a phase."""
        for share in self.shares:
            if (share.phase, share.party) == (phase, party):
                return share
        raise InternalError(f"the privacy plan has no entry of {party} in {phase}")

    @property
    def epsilon(self) -> float:
        """The joint ε of all parties after all planned steps."""
        if self.dp.division == "moments":
            return compute_epsilon([share.spending for share in self.shares], self.dp.delta)
        return sum(self._compute_simple_epsilon(party) for party in self.parties)

    def get_budget(self, phase: str, party: str) -> Budget:
        """Returns a party's budget in a phase. With simple division, the budget is one k-th of the
        run's ε and δ, for k parties.
        """
        own_share = self.get_share(phase, party)
        is_joint = self.dp.division == "moments"
        divisor = 1 if is_joint else len(self.parties)
        other_spendings = tuple(
            share.spending
            for share in self.shares
            if share != own_share and (is_joint or share.party == party)
        )
        budget = Budget(math.inf, self.dp.delta / divisor, own_share.spending, other_spendings)
        if self.dp.epsilon is not None:
            return replace(budget, target=self.dp.epsilon / divisor)
        return replace(budget, target=budget.epsilon_after(own_share.spending.steps))

    def epsilon_after(self, phase: str, party: str, steps_done: int) -> float:
        """Returns the joint ε after ``steps_done`` steps of this party in the phase, and all other
        planned steps.
        """
        own_epsilon = self.get_budget(phase, party).epsilon_after(steps_done)
        if self.dp.division == "moments":
            return own_epsilon
        return own_epsilon + sum(
            self._compute_simple_epsilon(other) for other in self.parties if other != party
        )

    def report(self) -> Privacy:
        """Returns the privacy entry of the run's summary."""
        return Privacy(
            epsilon=self.epsilon,
            delta=self.dp.delta,
            mode=self.mode,
            division=self.dp.division,
            noise_multiplier=min(share.spending.noise_multiplier for share in self.shares),
            statement=describe_guarantee(self.mode, self.epsilon, self.dp.delta, self.outside),
        )

    def _compute_simple_epsilon(self, party: str) -> float:
        spendings = [share.spending for share in self.shares if share.party == party]
        return compute_epsilon(spendings, self.dp.delta / len(self.parties))


def make_plan(
    phases: Sequence[PrivatePhase], rows: int, outside: Sequence[str] = ()
) -> PrivacyPlan | None:
    """Plans the private phases of a recipe over ``rows`` training rows.

    Returns None if there are no private phases, no rows or no party that trains in these phases.

    outside: The names of the phases that train without differential privacy.

    Raises InputError if two phases have different budgets, if delta is too large for ``rows``, or
    if no noise gives epsilon.
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
        for rate in [compute_sampling_rate(rows, phase.batch_size)]
        for steps in [phase.epochs * count_steps_per_epoch(rows, phase.batch_size)]
        for party in phase.parties
    ]
    if not shares:
        # Only passive parties train in these phases, and the recipe has no passive party.
        return None
    mode: Mode = "matched" if any(phase.dp.mode == "matched" for phase in phases) else "fixed"
    if dp.epsilon is not None:
        shares = _set_noise(dp.epsilon, dp, shares)
    return PrivacyPlan(dp, mode, tuple(shares), tuple(outside))


def _set_noise(target: float, dp: DpSettings, shares: Sequence[Share]) -> list[Share]:
    """Sets the noise multipliers: one for all parties with moments division, one for each party
    with simple division.
    """
    names = list(dict.fromkeys(share.party for share in shares))
    groups = [names] if dp.division == "moments" else [[name] for name in names]
    noise_by_party = {}
    for group in groups:
        party_shares = tuple(
            (s.spending.sampling_rate, s.spending.steps) for s in shares if s.party in group
        )
        noise = _find_noise(target / len(groups), dp.delta / len(groups), party_shares)
        noise_by_party.update(dict.fromkeys(group, noise))
    return [
        replace(
            share, spending=replace(share.spending, noise_multiplier=noise_by_party[share.party])
        )
        for share in shares
    ]


# Each phase of a party needs the same noise multiplier, so the search result is cached.
_find_noise = lru_cache(maxsize=64)(find_noise)


def describe_guarantee(
    mode: Mode, epsilon: float, delta: float, without: Sequence[str] = ()
) -> str:
    """Returns one sentence on what the guarantee covers and what not. ε is rounded up.

    Removing a row would shift the targets and the split of later rows. So two neighbouring tables
    have the same ids, and one of them has an empty row without a gradient (zero-out adjacency,
    Kairouz et al. 2021, on DP-FTRL). The statistics of all rows count as known. FedOnce-L1 protects
    the trained models of all parties together, and all results computed with them (section 4.1).
    The active party gets the representations and is trusted (section 4.2). With ``matched``,
    targets are assigned among rows, so clipping a row's gradient does not bound its influence.

    without: The names of the phases that train without accounted privacy. Models trained from their
    results are not covered.
    """
    uncovered = "the uploaded representations and the reported training loss"
    caveat = f"{uncovered} are not covered: the active party is trusted with them"
    if math.isinf(epsilon):
        return (
            f"No guarantee: gradients were clipped, but a party added no noise to them; {caveat}."
        )
    rounded = math.ceil(round(epsilon * 100, 6)) / 100
    budget = f"epsilon = {rounded:.2f}, delta = {delta:g}"
    if without:
        problem = f"No guarantee: the training of {' and '.join(without)} is not covered"
        return f"{problem}, and the accountant's {budget} counts only the other phases; {caveat}."
    if mode == "matched":
        return (
            "Guarantee not established: the targets were matched over batches, so that a record "
            f"moves the targets of others, and the accountant's {budget} does not hold; {caveat}."
        )
    return (
        f"The trained models of all parties together are ({budget})-differentially private for "
        "one training record against an empty one in its place (zero-out adjacency), given the "
        "ids, the number of rows, and the vocabularies, means and scales of all columns and of "
        f"the label; {caveat}."
    )


# Poisson sampling: every row is in a batch with the same probability, independently of other rows
# (Abadi et al. 2016). The accountant's ε assumes that nobody else knows which rows were in a batch.
# All parties know the recipe's seed, so each party samples with a secret key from its operating
# system. The keys of two parties must also be independent, or their RDP does not add up.


def compute_sampling_rate(rows: int, batch_size: int) -> float:
    """Returns the probability q that a row is in a batch, so that batches have ``batch_size`` rows
    on average.
    """
    return min(1.0, batch_size / rows)


def count_steps_per_epoch(rows: int, batch_size: int) -> int:
    """Returns the number of steps of an epoch, in which a row is in one batch on average."""
    return -(-rows // batch_size)


def draw_batches(key: int, epoch: int, rows: Rows, batch_size: int) -> list[Rows]:
    """Returns the row numbers of each batch of one epoch. A batch may be empty. The same arguments
    give the same batches on every machine.
    """
    n = len(rows)
    bits = np.random.Philox(key=derive_seed(key, "poisson", epoch))
    if batch_size >= n:
        return [rows.copy() for _ in range(count_steps_per_epoch(n, batch_size))]
    threshold = np.uint64(compute_sampling_rate(n, batch_size) * 2.0**64)
    return [
        rows[bits.random_raw(n) < threshold] for _ in range(count_steps_per_epoch(n, batch_size))
    ]

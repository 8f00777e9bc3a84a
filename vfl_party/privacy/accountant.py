"""Computes the joint privacy cost of the parties' training: moments division (FedOnce, Theorem 4).

Every party runs the sampled Gaussian mechanism on its own model. Its Rényi divergences (RDP) add up
over its steps and, because one record is spread over all parties, over the parties too (FedOnce,
Lemma 4). The sum is converted to (ε, δ) once. RDP of one step: Mironov et al. 2019; conversion:
Balle et al. 2020, Theorem 21; both as implemented in opacus.

The sum is right only if every party draws its batches and noise independently and keeps both
secret, and if the gradient of a record depends on no other record.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.base.mechanism import Mechanism

# opacus's orders, and orders to add if the best one is the first or the last. Binomials overflow
# above 1024.
ORDERS = (*(1 + tenths / 10 for tenths in range(1, 100)), *range(12, 64))
MORE_ORDERS = (
    *(1 + hundredths / 100 for hundredths in range(1, 10)),
    *ORDERS,
    *range(64, 128, 8),
    *range(128, 512, 32),
    512,
    1024,
)
# Less noise hides nothing, and its square may underflow.
_MIN_MEANINGFUL = 1e-9
# The range in which a noise multiplier is searched.
MAX_NOISE, MIN_NOISE = 2.0**13, 2.0**-6


@dataclass(frozen=True)
class Spending:
    """One party's report: ``steps`` with noise ``noise_multiplier * max_grad_norm``, each on a
    Poisson sample.

    ``sampling_rate``: the probability that a record is in a batch.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        if not (self.noise_multiplier >= 0 and math.isfinite(self.noise_multiplier)):
            raise InputError(
                Code.CONFIG_INVALID,
                f"noise_multiplier: must be at least 0 (got {self.noise_multiplier}). Set 0 or "
                "more.",
            )
        if not 0 <= self.sampling_rate <= 1:
            raise InputError(
                Code.CONFIG_INVALID,
                f"sampling_rate: must be between 0 and 1 (got {self.sampling_rate}). Set a "
                "probability.",
            )
        if self.steps < 0:
            raise InputError(
                Code.CONFIG_INVALID, f"steps: must be at least 0 (got {self.steps}). Set 0 or more."
            )

    @property
    def mechanism(self) -> Mechanism:
        """What each step costs a row."""
        return Mechanism("gaussian", self.noise_multiplier, self.sampling_rate)


def epsilon(spendings: Sequence[Spending], delta: float) -> float:
    """Returns the joint ε of all parties by moments division; infinite if one of them adds no
    noise.

    Raises InputError if δ is not between 0 and 1.
    """
    return compose([(spending.mechanism, spending.steps) for spending in spendings], delta)


def compose(uses: Iterable[tuple[Mechanism, int]], delta: float) -> float:
    """Returns ε of mechanisms that are used one after the other, with the number of uses of each;
    infinite if one of them adds no noise, or next to none. A draw of randomised response counts
    once: its noise is kept.

    Raises InputError if δ is not between 0 and 1.
    """
    _check(delta)
    uses = [*uses]
    once = {mechanism for mechanism, times in uses if times and mechanism.kind == "response"}
    taken = [(mechanism, times) for mechanism, times in uses if times and mechanism.rate]
    taken = [(mechanism, times) for mechanism, times in taken if mechanism.kind != "response"]
    # Pure differential privacy adds up as it is.
    pure = sum(mechanism.noise for mechanism in once)
    if not taken:
        return pure
    if any(mechanism.noise < _MIN_MEANINGFUL for mechanism, _ in taken):
        return math.inf
    value, order = _convert(taken, ORDERS, delta)
    if order in (ORDERS[0], ORDERS[-1]):
        value, _ = _convert(taken, MORE_ORDERS, delta)
    return pure + max(0.0, value)


def simple_epsilon(spendings: Sequence[Spending], delta: float) -> float:
    """Returns the joint ε by simple division (FedOnce's Priv-Baseline, Theorem 2): the sum of each
    party's ε at δ/k.
    """
    _check(delta)
    return sum(epsilon([spending], delta / len(spendings)) for spending in spendings)


def noise_for(target: float, delta: float, parties: Sequence[tuple[float, int]]) -> float:
    """Finds the common noise multiplier with a joint ε of at most ``target``, and within 1 % of it.

    parties: (sampling rate, steps) of each. Raises InputError if no multiplier gives that ε.
    """
    if not (target > 0 and math.isfinite(target)):
        raise InputError(
            Code.CONFIG_INVALID,
            f"epsilon: must be greater than 0 (got {target}). Set a positive number.",
        )

    def joint_epsilon(noise: float) -> float:
        return epsilon([Spending(noise, rate, steps) for rate, steps in parties], delta)

    if not any(rate and steps for rate, steps in parties):
        raise InputError(
            Code.CONFIG_INVALID,
            f"epsilon: no party takes a step, so noise cannot give epsilon (got {target:g}). Set "
            "noise_multiplier instead.",
        )
    low = high = 1.0
    while joint_epsilon(high) > target:
        low, high = high, 2 * high
        if high > MAX_NOISE:
            raise InputError(
                Code.CONFIG_INVALID,
                f"epsilon: too small for these steps at delta = {delta:g} (got {target:g}). Set a "
                "larger epsilon or delta, or fewer steps.",
            )
    while low == high or joint_epsilon(low) <= target:
        low, high = low / 2, low
        if low < MIN_NOISE:
            raise InputError(
                Code.CONFIG_INVALID,
                f"epsilon: too large for these steps at delta = {delta:g} (got {target:g}). Set "
                "noise_multiplier instead.",
            )
    while joint_epsilon(high) < 0.99 * target:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if joint_epsilon(middle) > target else (low, middle)
    return high


@dataclass(frozen=True)
class Budget:
    """Limits one party's training so that the joint ε stays at most ``target``.

    own: this party's spending; its number of steps is ignored. others: the planned spendings of the
    other parties.
    """

    target: float
    delta: float
    own: Spending
    others: tuple[Spending, ...] = ()

    def epsilon_after(self, steps_done: int) -> float:
        """Returns the joint ε after ``steps_done`` steps of this party and all planned steps of the
        others.
        """
        return epsilon([*self.others, replace(self.own, steps=steps_done)], self.delta)

    def may_step(self, steps_done: int) -> bool:
        """Returns whether the joint ε stays within the target after one more step."""
        return self.epsilon_after(steps_done + 1) <= self.target

    def note(self, steps_done: int) -> str:
        """Says why training stopped, for the report."""
        return (
            f"training stopped after {steps_done} steps: the next step would exceed epsilon = "
            f"{self.target:g} (delta = {self.delta:g})"
        )


def _check(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"delta: must be greater than 0 and less than 1 (got {delta}). Set a small "
            "probability.",
        )


def _convert(
    uses: Iterable[tuple[Mechanism, int]], orders: tuple[float, ...], delta: float
) -> tuple[float, float]:
    """Converts the summed RDP to (ε, its order)."""
    # Late: opacus costs 1.6 s and 110 MB.
    from opacus.accountants.analysis.rdp import get_privacy_spent

    rdp = np.sum([times * _of(mechanism, orders) for mechanism, times in uses], axis=0)
    with warnings.catch_warnings():
        # The bound holds at any order; epsilon() adds orders.
        warnings.filterwarnings("ignore", "Optimal order is the")
        value, order = get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
    return float(value), float(order)


def _of(of: Mechanism, orders: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Returns the RDP of one use of a mechanism at each order."""
    if of.kind == "laplace":
        return of.times * _laplace(of.noise, orders)
    return of.times * _one_step(of.rate, of.noise, orders)


@lru_cache(maxsize=256)
def _laplace(scale: float, orders: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Returns the RDP of Laplace noise of ``scale`` on a number that a row moves by 1 (Mironov
    2017, Proposition 6).
    """
    a = np.asarray(orders, dtype=np.float64)
    up, down = np.log(a / (2 * a - 1)), np.log((a - 1) / (2 * a - 1))
    rdp: npt.NDArray[np.float64] = np.logaddexp(up + (a - 1) / scale, down - a / scale) / (a - 1)
    return np.maximum(rdp, 0.0)


@lru_cache(maxsize=256)
def _one_step(
    sampling_rate: float, noise_multiplier: float, orders: tuple[float, ...]
) -> npt.NDArray[np.float64]:
    """Returns the RDP of one step at each order; values rounded below zero become zero."""
    from opacus.accountants.analysis.rdp import compute_rdp

    rdp = compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    return np.maximum(np.asarray(rdp, dtype=np.float64), 0.0)

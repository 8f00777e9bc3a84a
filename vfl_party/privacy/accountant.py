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

# The Rényi orders that opacus tries. ``MORE_ORDERS`` is used if the best order is the first or the
# last of these. Orders above 1024 overflow.
ORDERS = (*(1 + tenths / 10 for tenths in range(1, 100)), *range(12, 64))
MORE_ORDERS = (
    *(1 + hundredths / 100 for hundredths in range(1, 10)),
    *ORDERS,
    *range(64, 128, 8),
    *range(128, 512, 32),
    512,
    1024,
)
# A smaller noise multiplier counts as no noise: it hides nothing, and its square may underflow.
_MIN_MEANINGFUL = 1e-9
# The range in which ``find_noise`` searches a noise multiplier.
MAX_NOISE, MIN_NOISE = 2.0**13, 2.0**-6


@dataclass(frozen=True)
class Spending:
    """The training of one party, as the accountant needs it.

    Each of the ``steps`` uses a Poisson sample, to which a record belongs with probability
    ``sampling_rate``, and adds noise of standard deviation ``noise_multiplier * max_grad_norm``.
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
        """The mechanism that each step applies to a row."""
        return Mechanism("gaussian", self.noise_multiplier, self.sampling_rate)


def compute_epsilon(spendings: Sequence[Spending], delta: float) -> float:
    """Returns the joint ε of all parties by moments division; infinite if a party adds no noise.

    Raises InputError if δ is not between 0 and 1.
    """
    return compose([(spending.mechanism, spending.steps) for spending in spendings], delta)


def compose(uses: Iterable[tuple[Mechanism, int]], delta: float) -> float:
    """Returns the joint ε of mechanisms that are used one after the other.

    ε is infinite if a mechanism adds no noise, or almost none. A mechanism of randomised response
    counts once, because its noise is drawn once and kept.

    Args:
        uses: Pairs of a mechanism and the number of its uses.
        delta: δ of the guarantee, between 0 and 1, exclusive.

    Raises:
        InputError: δ is out of range.
    """
    _check_delta(delta)
    uses = [*uses]
    responses = {mechanism for mechanism, times in uses if times and mechanism.kind == "response"}
    noisy_uses = [(mechanism, times) for mechanism, times in uses if times and mechanism.rate]
    noisy_uses = [
        (mechanism, times) for mechanism, times in noisy_uses if mechanism.kind != "response"
    ]
    # The ε of randomised response has no δ, so these ε are simply added.
    response_epsilon = sum(mechanism.noise for mechanism in responses)
    if not noisy_uses:
        return response_epsilon
    if any(mechanism.noise < _MIN_MEANINGFUL for mechanism, _ in noisy_uses):
        return math.inf
    value, order = _convert_to_epsilon(noisy_uses, ORDERS, delta)
    if order in (ORDERS[0], ORDERS[-1]):
        value, _ = _convert_to_epsilon(noisy_uses, MORE_ORDERS, delta)
    return response_epsilon + max(0.0, value)


def compute_simple_epsilon(spendings: Sequence[Spending], delta: float) -> float:
    """Returns the joint ε by simple division (FedOnce's Priv-Baseline, Theorem 2): the sum of the ε
    of the k parties, each at δ / k.
    """
    _check_delta(delta)
    return sum(compute_epsilon([spending], delta / len(spendings)) for spending in spendings)


def find_noise(target: float, delta: float, parties: Sequence[tuple[float, int]]) -> float:
    """Finds the common noise multiplier with a joint ε of at most ``target``, and within 1 % of it.

    parties: The sampling rate and the number of steps of each party. Raises InputError if no
    multiplier gives that ε.
    """
    if not (target > 0 and math.isfinite(target)):
        raise InputError(
            Code.CONFIG_INVALID,
            f"epsilon: must be greater than 0 (got {target}). Set a positive number.",
        )

    def joint_epsilon(noise: float) -> float:
        return compute_epsilon([Spending(noise, rate, steps) for rate, steps in parties], delta)

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

    own_spending: The spending of this party; its number of steps is ignored.
    other_spendings: The planned spendings of the other parties.
    """

    target: float
    delta: float
    own_spending: Spending
    other_spendings: tuple[Spending, ...] = ()

    def epsilon_after(self, steps_done: int) -> float:
        """Returns the joint ε after ``steps_done`` steps of this party and all planned steps of the
        other parties.
        """
        return compute_epsilon(
            [*self.other_spendings, replace(self.own_spending, steps=steps_done)], self.delta
        )

    def may_step(self, steps_done: int) -> bool:
        """Returns whether the joint ε stays within the target after one more step."""
        return self.epsilon_after(steps_done + 1) <= self.target

    def explain_stop(self, steps_done: int) -> str:
        """Returns the sentence of the report that says why training stopped."""
        return (
            f"training stopped after {steps_done} steps: the next step would exceed epsilon = "
            f"{self.target:g} (delta = {self.delta:g})"
        )


def _check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(
            Code.CONFIG_INVALID,
            f"delta: must be greater than 0 and less than 1 (got {delta}). Set a small "
            "probability.",
        )


def _convert_to_epsilon(
    uses: Iterable[tuple[Mechanism, int]], orders: tuple[float, ...], delta: float
) -> tuple[float, float]:
    """Converts the RDP of all uses to ε. Returns ε and the order that gives it."""
    # Imported late, because opacus takes 1.6 s and 110 MB.
    from opacus.accountants.analysis.rdp import get_privacy_spent

    rdp = np.sum([times * _compute_rdp(mechanism, orders) for mechanism, times in uses], axis=0)
    with warnings.catch_warnings():
        # opacus warns if the best order is the first or the last. compose() then tries more orders.
        warnings.filterwarnings("ignore", "Optimal order is the")
        value, order = get_privacy_spent(orders=orders, rdp=rdp, delta=delta)
    return float(value), float(order)


def _compute_rdp(mechanism: Mechanism, orders: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Returns the RDP of one use of a mechanism at each order."""
    if mechanism.kind == "laplace":
        return mechanism.times * _compute_laplace_rdp(mechanism.noise, orders)
    return mechanism.times * _compute_gaussian_rdp(mechanism.rate, mechanism.noise, orders)


@lru_cache(maxsize=256)
def _compute_laplace_rdp(scale: float, orders: tuple[float, ...]) -> npt.NDArray[np.float64]:
    """Returns the RDP of Laplace noise of ``scale`` on a number that a row moves by 1 (Mironov
    2017, Proposition 6).
    """
    a = np.asarray(orders, dtype=np.float64)
    up, down = np.log(a / (2 * a - 1)), np.log((a - 1) / (2 * a - 1))
    rdp: npt.NDArray[np.float64] = np.logaddexp(up + (a - 1) / scale, down - a / scale) / (a - 1)
    return np.maximum(rdp, 0.0)


@lru_cache(maxsize=256)
def _compute_gaussian_rdp(
    sampling_rate: float, noise_multiplier: float, orders: tuple[float, ...]
) -> npt.NDArray[np.float64]:
    """Returns the RDP of one step with Gaussian noise at each order, at least 0."""
    from opacus.accountants.analysis.rdp import compute_rdp

    rdp = compute_rdp(q=sampling_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    return np.maximum(np.asarray(rdp, dtype=np.float64), 0.0)

"""Transforms, which change a party's tensors before other parties get them. ``TRANSFORMS`` at the
end has each transform under its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from vfl_common.config.base import Section
from vfl_common.config.models import Norm
from vfl_common.errors import Code, InputError
from vfl_party.base.mechanism import Mechanism
from vfl_party.outbound.filter import BuiltIns, Filter, NoisyFilter, Positive, Tensors

S = TypeVar("S", bound=Section)


@dataclass(frozen=True)
class Transform(Generic[S]):
    """What ``TRANSFORMS`` has or a plug-in exports: the model of a transform's settings, and a
    function that makes a filter from them.

    ``tasks``: the kinds of task that the transform supports; empty: all. ``of_batch``: whether the
    noise depends on all rows of a batch, so that a part of a batch would get too little.
    ``of_row``: whether the privacy guarantee is for one row of a message.
    """

    settings: type[S]
    make: Callable[[S], Filter]
    tasks: frozenset[str] = frozenset()
    of_batch: bool = False
    of_row: bool = False


def load(kind: str, where: str) -> Transform[Any]:
    """Returns the transform ``kind``. An exported subclass of Filter, or a function of one tensor,
    becomes a transform without settings. Raises InputError that names ``where`` if the transform is
    unknown.
    """
    export = REGISTRY.load(kind, where)
    if isinstance(export, type) and issubclass(export, Filter):
        transform: Any = Transform(Section, lambda _settings: export())
    elif callable(export) and not isinstance(export, type):
        transform = Transform(Section, lambda _settings: _TensorFunctionFilter(kind, export))
    else:
        transform = export
    return REGISTRY.check_type(transform, kind, where, Transform)


class _TensorFunctionFilter(Filter):
    """Applies a function to each tensor."""

    def __init__(self, text: str, change: Callable[[Tensor], Tensor]) -> None:
        self.text, self._change = text, change

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self._change(x.detach()) for name, x in tensors.items()}


class GaussianSettings(Section):
    """Settings of ``gaussian``."""

    sigma: Positive
    """The noise's standard deviation σ."""


class GaussianNoise(NoisyFilter):
    """Sends R + N(0, σ²), for the representations of a passive party (FedOnce, Section 5.8 and
    Table 8).
    """

    def __init__(self, sigma: float) -> None:
        self._sigma, self.text = sigma, f"Gaussian noise (σ = {sigma:g})"
        super().__init__()

    def noise(self, r_ND: Tensor) -> Tensor:
        """Returns r_ND with noise, in the same shape, dtype and device, without a graph; r_ND
        itself if σ is 0.
        """
        if self._sigma == 0:
            return r_ND
        r_ND = r_ND.detach()
        return r_ND + (self._sigma * self._random.like(r_ND)).to(r_ND.dtype)

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


class IsoSettings(Section):
    """Settings of ``iso``."""

    amplifier: Positive
    """λ, the factor of the noise, which is proportional to the largest norm of a row."""


class IsoNoise(NoisyFilter):
    """ISO(d) = d + N(0, σ²), σ = amplifier * (the largest L2 norm of d's rows) / √m (FedHSSL, Eq.
    7).
    """

    def __init__(self, amplifier: float) -> None:
        self._amplifier, self.text = amplifier, f"iso noise (λ = {amplifier:g})"
        super().__init__()

    def noise(self, d_BM: Tensor) -> Tensor:
        """Returns d with noise, in the same shape, dtype and device, without a graph; d itself if
        the amplifier is 0.

        d may have more dimensions, [B, …], with m elements per row. A d of one dimension is one
        row.
        """
        if self._amplifier == 0:
            return d_BM
        d_BM = d_BM.detach()
        rows = d_BM.reshape(1, -1) if d_BM.dim() < 2 else d_BM.flatten(1)
        norm = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).max()
        sigma = self._amplifier * norm / math.sqrt(rows.shape[1])
        noisy: Tensor = d_BM + (sigma * self._random.like(d_BM)).to(d_BM.dtype)
        return noisy

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


class MaxNorm(NoisyFilter):
    """Sends g·(1 + ξ·√(‖g_max‖²/‖g‖² − 1)), ξ ~ N(0, 1) for each row, so that E‖·‖² is ‖g_max‖² for
    all rows of the batch (Li et al. 2022).

    Only the length is hidden: a row keeps its direction up to its sign. A row of zeros gets a
    random direction.
    """

    text = "max norm"

    def noise(self, g_BD: Tensor) -> Tensor:
        """Returns g with noise, in the same shape, dtype and device, without a graph."""
        rows = g_BD.detach().flatten(1).double()
        xi_B, direction_BD = (
            self._random.like(rows[:, 0]).double(),
            self._random.like(rows).double(),
        )
        norm_B = torch.linalg.vector_norm(rows, dim=1)
        longest = norm_B.max() if len(rows) else norm_B.sum()
        zero_B = norm_B == 0
        safe_B = torch.where(zero_B, 1.0, norm_B)
        factor_B = 1 + xi_B * ((longest / safe_B) ** 2 - 1).clamp_min(0.0).sqrt()
        unit_BD = direction_BD / torch.linalg.vector_norm(
            direction_BD, dim=1, keepdim=True
        ).clamp_min(1e-30)
        noisy = torch.where(
            zero_B[:, None], xi_B[:, None] * longest * unit_BD, factor_B[:, None] * rows
        )
        return noisy.to(g_BD.dtype).view_as(g_BD)

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


class ClippedGaussianSettings(Section):
    """Settings of ``clipped_gaussian``."""

    clip: Norm
    """The maximum L2 norm of a row; a longer row is scaled down to it."""
    epsilon: Annotated[float, Field(ge=1e-3, le=1e4)]
    """ε of one message, for one row."""
    delta: Annotated[float, Field(ge=1e-12, lt=0.5)]
    """δ of one message, for one row."""


def sigma_of(epsilon: float, delta: float, sensitivity: float) -> float:
    """Returns the smallest σ of Gaussian noise that is (ε, δ)-differentially private (Balle and
    Wang 2018, Theorem 8): Φ(Δ/2σ − εσ/Δ) − e^ε·Φ(−Δ/2σ − εσ/Δ) <= δ.
    """

    from scipy.special import log_ndtr, ndtr

    # The ratio is σ / Δ.
    def is_private(ratio: float) -> bool:
        a, b = 0.5 / ratio, epsilon * ratio
        return float(ndtr(a - b) - math.exp(min(700.0, epsilon + float(log_ndtr(-a - b))))) <= delta

    low, high = 1e-6, 1.0
    while not is_private(high):
        high *= 2
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_private(middle) else (middle, high)
    return high * sensitivity


class ClippedGaussian(NoisyFilter):
    """Sends z·min(1, C/‖z‖) + N(0, σ²). A changed row moves by at most 2C, and σ follows from (ε,
    δ).

    The guarantee is for one message. E epochs send each row E times, and validation and evaluation
    send it again. The gradient that comes back is used as the gradient of the row before clipping.
    Noise is drawn in float32.
    """

    def __init__(self, settings: ClippedGaussianSettings) -> None:
        self._clip = settings.clip
        self._sigma = sigma_of(settings.epsilon, settings.delta, 2 * settings.clip)
        self.costs = Mechanism("gaussian", self._sigma / (2 * settings.clip))
        privacy = f"ε = {settings.epsilon:g}, δ = {settings.delta:g} a message"
        self.text = f"clip to {settings.clip:g}, Gaussian noise (σ = {self._sigma:.3g}: {privacy})"
        super().__init__()

    def noise(self, z_BD: Tensor) -> Tensor:
        """Returns z, clipped and with noise, with its shape, dtype and device, without a graph."""
        rows = z_BD.detach().flatten(1)
        norm_B = torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.float32)
        clipped = rows * (self._clip / norm_B.clamp_min(self._clip)).to(rows.dtype)
        noisy: Tensor = clipped + (self._sigma * self._random.like(rows)).to(rows.dtype)
        return noisy.view_as(z_BD)

    def apply(self, tensors: Tensors) -> Tensors:
        return {name: self.noise(x) for name, x in tensors.items()}


_GROWTH, _MAX_SCALE = 1.5, 1e6


class MarvellSettings(Section):
    """Settings of ``marvell``. With ``error``, s starts at 1 in each batch and is multiplied by
    1.5 until ½ − √sumKL/4 >= error.
    """

    scale: Positive | None = None
    """s, the mean squared length of the noise divided by the squared distance of the class means.
    Set this or ``error``.
    """
    error: Annotated[float, Field(gt=0.0, lt=0.5)] | None = None
    """The minimum error of any detector. The smallest sufficient s is found for each batch."""

    def model_post_init(self, _context: Any) -> None:
        if (self.scale is None) == (self.error is None):
            raise ValueError("set either scale or error, not both")


class Marvell(NoisyFilter):
    """Adds √(λ1 − λ2)·N(0, 1)·Δ/‖Δ‖ + √λ2·N(0, I) to each row, Δ = mean positive − mean negative
    gradient.

    ``optimum`` computes λ1 and λ2 of each class from the batch's
    gradients, at power s·‖Δ‖². A batch of one class has no Δ. Its rows get N(0, s·‖mean
    gradient‖²/d) in each element. With ``error``, s is then taken from the previous batch (1 in the
    first). Two classes with the same mean get no noise, because the power is zero.
    """

    knows = frozenset({"labels"})

    def __init__(self, settings: MarvellSettings) -> None:
        self._scale, self._error = settings.scale, settings.error
        goal = (
            f"s = {settings.scale:g}"
            if settings.scale is not None
            else f"error ≥ {settings.error:g}"
        )
        self.text = f"Marvell noise ({goal})"
        super().__init__()
        self._last_scale = settings.scale or 1.0
        self._positive_B: Tensor | None = None

    def tell(self, beside: Tensors) -> None:
        self._positive_B = beside["labels"].detach().reshape(-1) == 1

    def noise(self, g_BD: Tensor, positive_B: Tensor) -> Tensor:
        """Returns g with noise, in the same shape, dtype and device, without a graph."""
        rows = g_BD.detach().flatten(1).double()
        along_B, across_BD = (
            self._random.like(rows[:, 0]).double(),
            self._random.like(rows).double(),
        )
        if bool(positive_B.all()) or not bool(positive_B.any()):
            sigma = math.sqrt(self._last_scale / rows.shape[1]) * rows.mean(dim=0).norm()
            return _cast_like(rows + sigma * across_BD, g_BD)
        negatives, positives = rows[~positive_B], rows[positive_B]
        mean_0, mean_1 = negatives.mean(dim=0), positives.mean(dim=0)
        delta_D = mean_1 - mean_0
        statistics = Statistics(
            u=(negatives - mean_0).pow(2).mean().item(),
            v=(positives - mean_1).pow(2).mean().item(),
            gap=delta_D.pow(2).sum().item(),
            share=len(positives) / len(rows),
            width=rows.shape[1],
        )
        if statistics.gap == 0.0:
            return g_BD.detach()
        variances = optimum(statistics, self._choose_power(statistics))
        lambda1_B = torch.where(positive_B, variances.along_1, variances.along_0).double()
        lambda2_B = torch.where(positive_B, variances.across_1, variances.across_0).double()
        unit_D = delta_D / delta_D.norm()
        along_BD = ((lambda1_B - lambda2_B).clamp_min(0.0).sqrt() * along_B)[:, None] * unit_D
        return _cast_like(rows + along_BD + lambda2_B.sqrt()[:, None] * across_BD, g_BD)

    def _choose_power(self, statistics: Statistics) -> float:
        """Returns s·‖Δ‖². With ``error``, s is the first of 1, 1.5, 2.25, … that reaches it."""
        if self._error is None:
            return self._last_scale * statistics.gap
        scale = 1.0
        while (
            scale < _MAX_SCALE
            and sum_kl(statistics, optimum(statistics, scale * statistics.gap))
            > (2 - 4 * self._error) ** 2
        ):
            scale *= _GROWTH
        self._last_scale = scale
        return scale * statistics.gap

    def apply(self, tensors: Tensors) -> Tensors:
        if self._positive_B is None:
            raise InputError(
                Code.CONFIG_INVALID,
                "marvell: the method did not pass the labels of the rows. Correct the method.",
            )
        positive_B = self._positive_B
        return {name: self.noise(x, positive_B.to(x.device)) for name, x in tensors.items()}

    def state(self) -> dict[str, Any]:
        return {"random": super().state(), "last": self._last_scale}

    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state["random"])
        self._last_scale = state["last"]


def _cast_like(rows: Tensor, g_BD: Tensor) -> Tensor:
    return rows.to(g_BD.dtype).view_as(g_BD)


# Marvell's optimum: the noise that makes the gradients of two classes as similar as possible at a
# given power. Li et al., Label Leakage and Protection in Two-Party Split Learning (ICLR 2022),
# Theorem 2 and its solver, but without a random start. Of the four variances, one follows from the
# power and one is zero. One has a closed form, given the last one, which a grid search finds.
# The number of points and rounds of the grid search. Each round refines the grid around the best
# point.
_POINTS, _ROUNDS = 129, 6
# A variance below this value, relative to the squared distance of the means, counts as zero.
_NEGLIGIBLE = 1e-12

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Statistics of a batch's gradients of two classes.

    ``u``, ``v``: the mean variance of a coordinate, for negatives and for positives. ``gap``: the
    squared distance between the means. ``share``: the share of positives, between 0 and 1.
    ``width``: the number of coordinates of a gradient.
    """

    u: float
    v: float
    gap: float
    share: float
    width: int


@dataclass(frozen=True)
class Variances:
    """Variances of the noise along the difference of the means (1) and across it (2), for negatives
    (0) and positives (1).

    The variance across the difference is never the larger one: 0 <= ``across_0`` <= ``along_0``,
    and the same for positives.
    """

    along_0: float
    across_0: float
    along_1: float
    across_1: float


def sum_kl(statistics: Statistics, noise: Variances) -> float:
    """Returns KL(positive ‖ negative) + KL(negative ‖ positive) of the gradients with noise,
    assumed Gaussian.

    ½·[(d−1)·(a/b + b/a) + (A + g)/B + (B + g)/A] − d, with a = λ20 + u, b = λ21 + v, A = λ10 + u, B
    = λ11 + v.
    """
    a, b = noise.across_0 + statistics.u, noise.across_1 + statistics.v
    along = _sum_along_terms(
        noise.along_0 + statistics.u, noise.along_1 + statistics.v, statistics.gap
    )
    across_dims = statistics.width - 1
    across = across_dims * (_ratio(a, b) + _ratio(b, a)) if across_dims else 0.0
    return 0.5 * (across + along) - statistics.width


def optimum(statistics: Statistics, power: float) -> Variances:
    """Returns the noise of mean squared length ``power`` that has the minimum sumKL: p·λ11 +
    p(d−1)·λ21 + (1−p)·λ10 + (1−p)(d−1)·λ20 = power.

    The class with the larger variance gets no noise across (u < v: λ21 = 0; u > v: λ20 = 0).
    Without variance the closed form is E = √((P + (1−p)g)/(P + pg)), λ10 = (P/p)/(E + (1−p)/p), λ11
    = (P − (1−p)λ10)/p. ``gap`` must be positive.
    """
    gap, p = statistics.gap, statistics.share
    u, v, budget = statistics.u / gap, statistics.v / gap, power / gap
    if max(u, v) < _NEGLIGIBLE:
        e = math.sqrt((budget + (1 - p)) / (budget + p))
        along_0 = (budget / p) / (e + (1 - p) / p)
        return Variances(gap * along_0, 0.0, gap * (budget - (1 - p) * along_0) / p, 0.0)
    # Solve the mirrored problem, in which the two classes are swapped.
    if u > v:
        mirrored = _solve(v, u, budget, 1 - p, statistics.width)
        return Variances(gap * mirrored[2], 0.0, gap * mirrored[0], gap * mirrored[1])
    along_0, across_0, along_1 = _solve(u, v, budget, p, statistics.width)
    return Variances(gap * along_0, gap * across_0, gap * along_1, 0.0)


def _solve(u: float, v: float, budget: float, p: float, d: int) -> tuple[float, float, float]:
    """Returns the optimal λ10, λ20, λ11 for u <= v and means at distance 1. λ21 is 0."""
    low, high = 0.0, min(v - u, budget / ((1 - p) * d)) if d > 1 else 0.0
    best = 0.0
    for _ in range(_ROUNDS if high > 0 else 0):
        y = np.linspace(low, high, _POINTS)
        with np.errstate(divide="ignore"):
            values = (d - 1) * ((y + u) / v + v / (y + u)) + _solve_along(y, u, v, budget, p, d)[1]
        place = int(values.argmin())
        best = float(y[place])
        low, high = float(y[max(0, place - 1)]), float(y[min(_POINTS - 1, place + 1)])
    along_0 = float(_solve_along(np.array([best]), u, v, budget, p, d)[0][0])
    along_1 = max(0.0, (budget - (1 - p) * (d - 1) * best - (1 - p) * along_0) / p)
    return along_0, best, along_1


def _solve_along(
    y: Numbers, u: float, v: float, budget: float, p: float, d: int
) -> tuple[Numbers, Numbers]:
    """Returns the best λ10 for each λ20 = y, and the resulting sumKL terms along the difference.

    With A = λ10 + u and B = λ11 + v, the budget gives B = α − βA. Then (A + 1)/B + (B + 1)/A is
    convex in A, and its derivative is zero at a root of a quadratic.
    """
    q = 1 - p
    beta = q / p
    alpha = (budget - q * (d - 1) * y + p * v + q * u) / p
    n2, n1, n0 = 1 + beta**2, 1 - beta - 2 * alpha * beta, alpha**2 + alpha
    b = 2 * n0 * beta
    root = np.sqrt(np.maximum(0.0, b**2 + 4 * (n2 * alpha + n1 * beta) * n0 * alpha))
    a = np.clip(2 * n0 * alpha / (b + root), y + u, np.maximum(y + u, (alpha - v) / beta))
    with np.errstate(divide="ignore"):
        b_11 = np.maximum(alpha - beta * a, 0.0)
        return a - u, (a + 1) / b_11 + (b_11 + 1) / a


def _sum_along_terms(a: float, b: float, gap: float) -> float:
    return _ratio(a + gap, b) + _ratio(b + gap, a)


def _ratio(above: float, below: float) -> float:
    """Returns above / below; 0 / 0 is 1, because both classes are then equal."""
    if below == 0.0:
        return 1.0 if above == 0.0 else math.inf
    return above / below


# The transforms by name.
TRANSFORMS: dict[str, Transform[Any]] = {
    "gaussian": Transform(GaussianSettings, lambda settings: GaussianNoise(settings.sigma)),
    "iso": Transform(IsoSettings, lambda settings: IsoNoise(settings.amplifier), of_batch=True),
    "max_norm": Transform(Section, lambda _settings: MaxNorm(), of_batch=True),
    "clipped_gaussian": Transform(ClippedGaussianSettings, ClippedGaussian, of_row=True),
    "marvell": Transform(MarvellSettings, Marvell, frozenset({"binary"}), of_batch=True),
}
REGISTRY = BuiltIns("vfl.transforms", "transform", TRANSFORMS, ours=tuple(TRANSFORMS))

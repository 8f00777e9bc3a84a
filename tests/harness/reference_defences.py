"""Split training with a defence in one process, from the papers' formulas: the reference of the
exactness tests.

The cut is made by hand: the gradient of each passive party's embedding is taken, changed by the
defence, and passed on backwards. Marvell's noise comes of a nested numerical search that shares
nothing with the closed forms of ``vfl_party.outbound.transforms``. Noise is drawn as the transforms draw
it, from a generator whose key both are given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.stats import norm
from torch import Tensor
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import one_hot

from tests.harness import reference
from tests.harness.present import present
from tests.harness.reference_sets import loss_over_sets, zero_gradients
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import batches

KEY = 20261123
Up = Callable[[Tensor], Tensor]
# The encoder's output [B, 2D] -> z [B, D], the party's own loss.
Draw = Callable[[Tensor], tuple[Tensor, Tensor]]
# G [B, D], y [B].
Down = Callable[[Tensor, Tensor], Tensor]


def secret(size: int) -> bytes:
    """Stands for ``secrets.token_bytes``."""
    return bytes(range(size))


class Noise:
    """The numbers that a transform draws, in its order."""

    def __init__(self) -> None:
        self._random = np.random.Generator(np.random.Philox(key=KEY))

    def gaussian(self, *shape: int) -> Tensor:
        return torch.from_numpy(self._random.standard_normal(shape, dtype=np.float32))


def max_norm() -> Down:
    noise = Noise()

    def changed(g: Tensor, _y: Tensor) -> Tensor:
        xi = noise.gaussian(len(g)).double()
        anywhere = noise.gaussian(*g.shape).double()
        g = g.double()
        longest = max(math.sqrt(float((row**2).sum())) for row in g)
        rows = []
        for x, row, other in zip(xi, g, anywhere, strict=True):
            length = math.sqrt(float((row**2).sum()))
            if length == 0:
                rows.append(x * longest * other / other.norm())
                continue
            rows.append(row * (1 + x * math.sqrt(max(0.0, longest**2 / length**2 - 1))))
        return torch.stack(rows).float()

    return changed


def marvell(scale: float | None = None, error: float | None = None) -> Down:
    noise = Noise()

    def changed(g: Tensor, y: Tensor) -> Tensor:
        along, across, g = (
            noise.gaussian(len(g)).double(),
            noise.gaussian(*g.shape).double(),
            g.double(),
        )
        zero, one = g[y == 0], g[y == 1]
        assert len(zero)
        assert len(one)
        difference = one.mean(0) - zero.mean(0)
        u, v = (float(((part - part.mean(0)) ** 2).mean()) for part in (zero, one))
        gap, p, d = float((difference**2).sum()), len(one) / len(g), g.shape[1]
        s = scale or 1.0
        best = search(u, v, gap, p, d, s * gap)
        while error is not None and sum_kl(u, v, gap, d, *best) > (2 - 4 * error) ** 2:
            s *= 1.5
            best = search(u, v, gap, p, d, s * gap)
        unit, rows = difference / difference.norm(), []
        for row, label, a, b in zip(g, y, along, across, strict=True):
            l1, l2 = (best[2], best[3]) if label == 1 else (best[0], best[1])
            rows.append(row + math.sqrt(max(0.0, l1 - l2)) * a * unit + math.sqrt(l2) * b)
        return torch.stack(rows).float()

    return changed


def sum_kl(
    u: float, v: float, gap: float, d: int, l10: float, l20: float, l11: float, l21: float
) -> float:
    a, b, x, y = l10 + u, l11 + v, l20 + u, l21 + v
    return 0.5 * ((d - 1) * (x / y + y / x) + (a + gap) / b + (b + gap) / a) - d


def search(
    u: float, v: float, gap: float, p: float, d: int, power: float
) -> tuple[float, float, float, float]:
    """λ10, λ20, λ11, λ21 by two nested searches, for u != v."""
    q = 1 - p
    # The shares of the class with noise across, and of the one without.
    mine, other = (q, p) if u < v else (p, q)

    def of(across: float) -> tuple[float, tuple[float, float, float, float]]:
        left = power - mine * (d - 1) * across

        def noise(along: float) -> tuple[float, float, float, float]:
            rest = max(0.0, (left - mine * along) / other)
            return (along, across, rest, 0.0) if u < v else (rest, 0.0, along, across)

        found = minimize_scalar(
            lambda along: sum_kl(u, v, gap, d, *noise(along)),
            bounds=(across, left / mine),
            method="bounded",
            options={"xatol": 1e-14 * power, "maxiter": 500},
        )
        return found.fun, noise(found.x)

    most = min(abs(v - u), power / (mine * d))
    found = minimize_scalar(
        lambda x: of(x)[0], bounds=(0.0, most), method="bounded", options={"xatol": 1e-14 * power}
    )
    return min((of(0.0), of(found.x), of(most)), key=lambda each: each[0])[1]


def clipped(clip: float, epsilon: float, delta: float) -> Up:
    noise, low, high = Noise(), 1e-6, 1e9
    for _ in range(300):
        sigma = (low + high) / 2
        ratio = sigma / (2 * clip)
        reached = norm.cdf(0.5 / ratio - epsilon * ratio) - math.exp(epsilon) * norm.cdf(
            -0.5 / ratio - epsilon * ratio
        )
        low, high = (low, sigma) if reached <= delta else (sigma, high)

    def changed(z: Tensor) -> Tensor:
        lengths = z.norm(dim=1, keepdim=True)
        return z * torch.where(
            lengths > clip, clip / lengths, torch.ones(())
        ) + high * noise.gaussian(*z.shape)

    return changed


def dcor(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    """λ log dCor by its definition: the distances of all pairs of rows, and sums over them."""

    def covariance(one: list[list[Tensor]], other: list[list[Tensor]]) -> Tensor:
        """V² as the mean of a·b, plus the product of the means, minus twice the mean of products of
        row means.
        """
        a, b = (torch.stack([torch.stack(row) for row in each]) for each in (one, other))
        n = len(a)
        first = (a * b).sum() / n**2
        second = a.sum() / n**2 * b.sum() / n**2
        third = sum((a[i].sum() / n * b[i].sum() / n for i in range(n)), torch.zeros(())) / n
        return first + second - 2 * third

    def distances(rows: Tensor) -> list[list[Tensor]]:
        zero = torch.zeros((), dtype=rows.dtype)
        return [
            [zero if i == j else ((p - q) ** 2).sum().sqrt() for j, q in enumerate(rows)]
            for i, p in enumerate(rows)
        ]

    def loss(z: Tensor, x: Tensor) -> Tensor:
        a, b = distances(z), distances(x)
        squared = covariance(a, b) / (covariance(a, a) * covariance(b, b)).sqrt()
        return weight * squared.sqrt().log()

    return loss


class Drawn:
    """The numbers that take the place of those drawn with a party's secret: the same for every
    party.
    """

    def __init__(self) -> None:
        self._noise = Noise()

    def like(self, both: Tensor) -> Tensor:
        return self._noise.gaussian(len(both), both.shape[1] // 2)


def mid(weight: float) -> Draw:
    """μ + (0.1 + softplus(s − ½)) ε, and λ KL by torch's own distributions."""
    noise = Drawn()

    def changed(both: Tensor) -> tuple[Tensor, Tensor]:
        mean, s = both.chunk(2, dim=1)
        sigma = 0.1 + (1 + (s - 0.5).exp()).log()
        apart = kl_divergence(Normal(mean, sigma), Normal(torch.zeros(()), torch.ones(())))
        return mean + sigma * noise.like(both), weight * apart.sum() / len(both)

    return changed


def train(
    tables: dict[str, Any],
    data: Mapping[str, Mapping[str, Any]],
    down: Callable[[], Down] | None = None,
    up: Callable[[], Up] | None = None,
    own_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    labels_loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    draw: Callable[[], Draw] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Returns {party: its weights} after split training with a defence, on a task of classes.

    ``up``: a passive party's defence; each has its own. ``down``: the active party's. ``own_loss``:
    a passive party's own, of z and x, whose gradient is added to what comes back. ``labels_loss``:
    the active party's, of z and y, whose gradient is added to what it sends. ``draw``: a passive
    party's embeddings and own loss from what its encoder, of twice the width, gives.
    """
    recipe = Recipe.model_validate(tables)
    phase, settings = recipe.phases[0].name, recipe.phases[0].settings
    with reference.one_thread():
        doubled = recipe.model.model_copy(
            update={"embedding_size": 2 * recipe.model.embedding_size}
        )
        wide = recipe.model_copy(update={"model": doubled})
        parties = {
            party.name: reference.OneParty(
                wide if draw is not None and party.role == "passive" else recipe,
                party.name,
                DataSettings(**data[party.name]),
                settings.get("optimizer", {}),
                {},
            )
            for party in recipe.parties
        }
        active = parties[recipe.active.name]
        names = [each.name for each in recipe.passives]
        passives = [parties[name] for name in names]
        changed = down() if down is not None else None
        sent_by = [up() for _ in passives] if up is not None else []
        drawn_by = [draw() for _ in passives] if draw is not None else []
        for epoch in range(settings["epochs"]):
            cut = batches(recipe.seed, phase, epoch, active.splits["train"], settings["batch_size"])
            for batch, rows in enumerate(cut):
                own, y = active.embed(rows), active.targets[torch.from_numpy(rows)]
                made = [party.embed(rows) for party in passives]
                assert own is not None
                terms = [torch.zeros(()) for _ in passives]
                for number, make in enumerate(drawn_by):
                    both = present(made[number])
                    made[number], terms[number] = make(both)
                came = []
                for number, z in enumerate(made):
                    assert z is not None
                    plain = z.detach()
                    came.append((sent_by[number](plain) if sent_by else plain).requires_grad_())
                others = dict(zip(names, came, strict=True))
                for party in parties.values():
                    party.optimizer.zero_grad()
                _loss(recipe, active, (epoch, batch), own, others, y).backward()
                zero_gradients(active.models)
                for number, (z, leaf) in enumerate(zip(made, came, strict=True)):
                    assert z is not None
                    back = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                    if changed is not None:
                        back = changed(back, y.reshape(-1))
                    features = passives[number].features
                    if own_loss is not None and features is not None:
                        alone = z.detach().double().requires_grad_()
                        own_loss(alone, features.inputs(rows)[0].double()).backward()
                        assert alone.grad is not None
                        back = back + alone.grad.float()
                    if labels_loss is not None:
                        alone = leaf.detach().double().requires_grad_()
                        labels_loss(alone, one_hot(y.reshape(-1).long()).double()).backward()
                        back = back + present(alone.grad).float()
                    torch.autograd.backward(
                        [z, *([terms[number]] if draw else [])], [back, *([None] if draw else [])]
                    )
                for party in parties.values():
                    party.optimizer.step()
    return {name: dict(party.models.state_dict()) for name, party in parties.items()}


def _loss(
    recipe: Recipe,
    active: reference.OneParty,
    place: tuple[int, int],
    own: Tensor,
    others: Mapping[str, Tensor],
    targets: Tensor,
) -> Tensor:
    """Returns the loss of a batch, over sets of parties if the recipe asks for that."""

    def of_set(embeddings: list[Tensor]) -> Tensor:
        outputs = reference.top_of(active, recipe.model.combine, embeddings)
        return reference.loss_of(recipe, outputs, targets)

    return loss_over_sets(recipe, active.models, place, own, others, of_set)

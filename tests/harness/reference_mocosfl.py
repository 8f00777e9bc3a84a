"""MocoSFL in one process, from its paper (SFL-V1 with momentum contrast): the reference of the
exactness tests.

Nothing is sent: the clients are a list, the server's mean is a sum over it. It shares no code with
the transport, the phases, the runner, the loss, the queue or ``vfl_party.models.training``. It shares
what both must start from: the two halves as built, seeds, tables, preprocessing, and the random
views.
"""

from __future__ import annotations

import math
from copy import deepcopy
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from tests.harness import wiring
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import Rows, batches, derive_seed, split_rows
from vfl_party.data import Preprocessor, load_table
from vfl_party.models import seed_torch
from vfl_party.models.halves import Bottleneck, Halves
from vfl_party.selfsup.augment import make_augment
from vfl_party.selfsup.settings import AugmentSettings


class _Net:
    """A half with its moving average and SGD."""

    def __init__(self, module: nn.Module, lr: float, weight_decay: float = 5e-4) -> None:
        self.online, self.slow, self.lr = module, deepcopy(module), lr
        self.sgd = torch.optim.SGD(
            module.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay
        )

    def follow(self, m: float) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.copy_(m * slow + (1 - m) * fast)

    def anneal(self, at: float) -> None:
        for group in self.sgd.param_groups:
            group["lr"] = self.lr * (1 + math.cos(math.pi * at)) / 2


class Client:
    def __init__(
        self, recipe: Recipe, name: str, data: DataSettings, phase: str, settings: dict[str, Any]
    ) -> None:
        table = load_table(data, with_label=False)
        rows = split_rows(
            recipe.seed, len(table.ids), validation=recipe.rows.validation, test=recipe.rows.test
        )
        self.rows, self.seed, self.name, self.phase = rows["local"], recipe.seed, name, phase
        fitted = Preprocessor.fit(table, self.rows, one_hot=True, flatten=False, settings=data)
        self.features = fitted.transform(table)
        self.paper = recipe.preset == "paper"
        # MoCo v2's views; the released code has torchvision's default crops.
        crops = {"blur": 0.5, "crop_scale": (0.2 if self.paper else 0.08, 1.0)}
        self.augment = make_augment(
            AugmentSettings(**crops | settings["augment"]), self.features, self.rows
        )
        self.raw = settings.get("query", "raw" if self.paper else "view") == "raw"
        self.size = settings["batch_size"]
        self.steps = 0

    def batch(self) -> Rows:
        per = len(self.rows) // self.size
        order = batches(
            derive_seed(self.seed, self.name), self.phase, self.steps // per, self.rows, self.size
        )
        full = [batch for batch in order if len(batch) == self.size]
        found: Rows = full[self.steps % per]
        return found

    def views(self) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(
            derive_seed(self.seed, "augment", self.phase, self.name, self.steps)
        )
        x = self.features.inputs(self.batch())
        self.steps += 1
        if self.raw:
            return x[0], self.augment.one_view(x, random)[0]
        (v1,), (v2,) = self.augment.two_views(x, random)
        return v1, v2


def _unit(rows: Tensor) -> Tensor:
    unit: Tensor = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return unit


def _drawn(recipe: Recipe, phase: str, number: int, epoch: int) -> list[str]:
    """The clients of an epoch: those with the smallest numbers that follow from seed and name."""
    root = derive_seed(recipe.seed, "draw", phase)
    names = [party.name for party in recipe.passives]
    lot = sorted(names, key=lambda name: derive_seed(root, epoch, name))[:number]
    return [name for name in names if name in lot]


def _info_nce(q: Tensor, k: Tensor, memory: Tensor, t: float) -> Tensor:
    q, k = _unit(q), _unit(k)
    positive, negative = (q * k).sum(1) / t, q @ memory.T / t
    loss: Tensor = (
        torch.logsumexp(torch.cat([positive[:, None], negative], 1), 1) - positive
    ).mean()
    return loss


def train(tables: dict[str, Any], data: dict[str, dict[str, Any]]) -> dict[str, dict[str, Tensor]]:
    """Returns {party: {name: weight}} after the phase ``mocosfl``: the bottoms, and the active
    party's tail.
    """
    recipe = Recipe.model_validate(tables)
    settings = dict(tables["phases"][0])
    phase, released = "mocosfl", recipe.preset == "released"
    neck = Bottleneck(**settings["bottleneck"]) if "bottleneck" in settings else None
    halves = Halves(recipe.model.encoder, tuple(settings["image"]), settings["cut"], neck)
    lr, m, epochs = settings["optimizer"]["lr"], settings["momentum"], settings["epochs"]
    with seed_torch(derive_seed(recipe.seed, "init", "bottom")):
        bottom = halves.bottom()
    with seed_torch(derive_seed(recipe.seed, "init", "tail")):
        tail = _Net(halves.tail(settings["width"]), lr)
    clients = [
        Client(recipe, p.name, DataSettings(**data[p.name]), phase, settings)
        for p in recipe.passives
    ]
    below: dict[str, Any] = settings.get("bottom_optimizer") or settings["optimizer"]
    nets = [_Net(deepcopy(bottom), below["lr"], below["weight_decay"]) for _ in clients]
    root, shared = derive_seed(recipe.seed, "queue", phase), settings.get("shared_memory", True)
    seeds = {c.name: root if shared else derive_seed(root, c.name) for c in clients}
    size = settings["queue"] if shared else settings["queue"] // len(clients)
    memories = {
        name: _unit(
            torch.randn(size, settings["width"], generator=torch.Generator().manual_seed(seed))
        )
        for name, seed in seeds.items()
    }
    number = max(1, round(settings.get("sample", 1.0) * len(clients)))
    frozen = settings.get("frozen", False)
    parts = settings.get("averages_per_epoch", 1)
    per = max(len(each.rows) for each in clients) // settings["batch_size"]
    done = dict.fromkeys(seeds, 0)
    for epoch in range(epochs):
        lot = _drawn(recipe, phase, number, epoch)
        pool = [(c, n) for c, n in zip(clients, nets, strict=True) if c.name in lot]
        ends = {per * (part + 1) // parts for part in range(parts)}
        for step in range(per):
            q_parts, k_parts = [], []
            for client, net in pool:
                client.steps = epoch * per + step
                v1, v2 = client.views()
                net.follow(m if not frozen else 1.0)
                q_parts.append(net.online(v1))
                k_parts.append((net.slow if not frozen else net.online)(v2).detach())

            def crossed(
                way: str, of: str, name: str, x: Tensor, at: tuple[int, int] = (epoch, step)
            ) -> Tensor:
                return wiring.crossed(recipe, phase, "latents", way, of, at, name, x)

            k_parts = [crossed("up", name, "k", k) for name, k in zip(lot, k_parts, strict=True)]
            sent = [crossed("up", name, "q", q) for name, q in zip(lot, q_parts, strict=True)]
            sent = [q.detach().requires_grad_() for q in sent]
            q, k = torch.cat(sent), torch.cat(k_parts)
            tail.follow(m)
            with torch.no_grad():
                slow_q, slow_k = tail.slow(q), tail.slow(k)
            t = settings["temperature"]
            terms, rows = [], settings["batch_size"]
            on_q, on_k = tail.online(q), tail.online(k)
            whole = slice(0, rows * len(lot))
            for at, name in enumerate(lot[:1] if shared else lot):
                its = whole if shared else slice(at * rows, (at + 1) * rows)
                terms.append(_info_nce(on_q[its], slow_k[its], memories[name], t))
                terms.append(_info_nce(on_k[its], slow_q[its], memories[name], t))
                if not shared:
                    new = torch.cat([memories[name], _unit(slow_q[its]), _unit(slow_k[its])])
                    memories[name] = new[-size:]
            loss = sum(terms[1:], terms[0]) / (len(terms) / 2)
            tail.sgd.zero_grad()
            (loss if released else loss / 2).backward()
            tail.sgd.step()
            if shared:
                first = next(iter(memories.values()))
                new = torch.cat([first, _unit(slow_q), _unit(slow_k)])[-size:]
                memories = dict.fromkeys(memories, new)
            for name in lot:
                done[name] += 1
            if frozen:
                continue
            for (client, net), z, of in zip(pool, q_parts, sent, strict=True):
                net.sgd.zero_grad()
                assert of.grad is not None
                z.backward(crossed("down", recipe.active.name, "dq", of.grad))
                net.sgd.step()
                if released:
                    net.anneal(done[client.name] / epochs)
            if step + 1 in ends:
                when = (epoch * parts + sorted(ends).index(step + 1), 0)
                _average(recipe, lot, [net.online for net in nets], when, "online")
                if not released:
                    _average(recipe, lot, [net.slow for net in nets], when, "momentum")
        tail.anneal((epoch + 1) / epochs)
        if not released:
            for net in nets:
                net.anneal((epoch + 1) / epochs)
    found = {
        c.name: {f"encoder.{k}": v for k, v in n.online.state_dict().items()}
        for c, n in zip(clients, nets, strict=True)
    }
    found[recipe.active.name] = {
        f"tail.{key}": value for key, value in tail.online.state_dict().items()
    }
    return found


@torch.no_grad()
def _average(
    recipe: Recipe, lot: list[str], modules: list[nn.Module], at: tuple[int, int], which: str
) -> None:
    """Gives all clients the mean of those that were drawn."""
    for name, _ in modules[0].named_parameters():
        same = [module.get_parameter(name) for module in modules]
        sent = [
            wiring.crossed(
                recipe, "mocosfl", "bottoms", "up", party.name, at, f"{which}.{name}", each.detach()
            )
            for party, each in zip(recipe.passives, same, strict=True)
            if party.name in lot
        ]
        mean = reduce(torch.add, sent) / len(sent)
        mean = wiring.crossed(
            recipe, "mocosfl", "bottoms", "down", "server", at, f"{which}.{name}", mean
        )
        for each in same:
            each.copy_(mean)
